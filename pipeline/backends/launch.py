"""torch's elastic launcher, whose stores listen on loopback only: ``python -m pipeline.backends.launch``, with its arguments.

The launcher of one machine (``--standalone``) opens two stores for its own ranks, and torch binds them to every address
of the machine. Whoever reaches one can hand the launcher a pickle, which is code. So they are given a socket that is
bound to 127.0.0.1 instead.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


class LoopbackStore(dist.TCPStore):
    """A ``TCPStore`` whose server can be reached from this machine alone."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **options: Any
    ) -> None:
        if is_master:
            listener = socket.create_server((LOOPBACK, port))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        super().__init__(LOOPBACK if is_master else host_name, port, world_size, is_master, **options)


def main(arguments: list[str]) -> None:
    """Run torch's launcher. ValueError unless it is for this machine alone."""
    if "--standalone" not in arguments:
        raise ValueError(
            "pipeline.backends.launch: expected --standalone; ranks on several machines need their network"
        )
    dist.TCPStore = LoopbackStore  # type: ignore[assignment,misc]  # before the launcher's own modules take the name
    from torch.distributed.run import main as launch

    launch(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
