"""One run at a time on a device: kernel locks, one a GPU, which a dead holder lets go of at once, whatever killed it."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from pipeline.config import Recipe

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_TRIES = 1.0


@contextmanager
def devices_held(
    recipe: Recipe,
    who: str,
    say: Callable[[str], object] = logger.info,
    *,
    wait: bool = True,
    folder: Path | None = None,
) -> Iterator[None]:
    """Hold the devices that the recipe uses; waits, and says for whom, while another run on this machine holds one.

    With ``wait=False`` a BlockingIOError says who holds it. ``folder`` is where the locks are; the machine's temporary one.
    """
    with ExitStack() as stack:
        for device in devices(recipe):  # sorted, so that two runs over several GPUs cannot wait for each other
            file = stack.enter_context(_opened((folder or Path(tempfile.gettempdir())) / f"grpoflow-{device}.lock"))
            _take(file, device, say, wait=wait)
            _sign(file, who)
        yield


def devices(recipe: Recipe) -> list[str]:
    """Names of the devices that only one run may use at a time: every GPU that this process sees, by its UUID."""
    import torch

    runtime = recipe.runtime
    on_gpu = runtime.device != "cpu" and torch.cuda.is_available()
    if runtime.exclusive == "off" or (runtime.exclusive == "auto" and not on_gpu):
        return []
    if not on_gpu:
        return ["cpu"]
    return sorted(f"gpu-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count()))


def _opened(path: Path) -> TextIO:
    """The lock file, made when missing. Another user's is opened for reading, which is enough to lock it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:
        return path.open("r", encoding="utf-8")
    return os.fdopen(descriptor, "r+", encoding="utf-8")


def _take(file: TextIO, device: str, say: Callable[[str], object], *, wait: bool) -> None:
    told = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            if not wait:
                raise BlockingIOError(f"{device} is in use by {holder}") from None
        if not told:
            say(f"waiting for {device}, in use by {holder} (runtime.exclusive=off would share it)")
            told = True
        time.sleep(SECONDS_BETWEEN_TRIES)


def _sign(file: TextIO, who: str) -> None:
    if file.writable():
        file.seek(0)
        file.truncate()
        file.write(f"{who}, pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
