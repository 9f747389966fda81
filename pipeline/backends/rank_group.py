"""Child processes, one a rank, started through torch's elastic launcher: they stay up, and answer one call at a time.

A call goes to every rank with its own arguments and returns when all have answered. A rank that raises, dies or hangs
at start takes the group down with one error that ends with the ranks' last output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from pipeline.backends.nodes import Launch, accept, free_port, gather_nodes, host_and_port

ADDRESS, KEY = "GRPOFLOW_RANK_ADDRESS", "GRPOFLOW_RANK_KEY"
START_SECONDS, CLOSE_SECONDS = 300.0, 20.0
LOG_LINES = 15


class RankGroup:
    """``count`` ranks of ``python -m module``; use ``call`` and, in the end, ``close``.

    With several ``nodes``, machines that join at ``rendezvous`` (HOST:PORT of this one) have their share of the ranks.
    """

    def __init__(
        self,
        module: str,
        count: int,
        scratch: Path,
        environment: Mapping[str, str],
        nodes: int = 1,
        rendezvous: str = "",
    ) -> None:
        self.count, self._here = count, count // nodes
        self.log = scratch / f"{module.rsplit('.', 1)[-1]}.log"
        key = os.urandom(16)
        self._connections: list[Connection] = []
        self._processes: list[int] = []
        self._others: list[Connection] = []
        if nodes == 1:
            # A short name of its own: a socket's path may have 107 characters, a run's folder can have more.
            self._listener = Listener(family="AF_UNIX", authkey=key, backlog=count)
            address, master = str(self._listener.address), ("127.0.0.1", 0)
        else:
            host, _ = host_and_port(rendezvous)
            self._listener = Listener((host, 0), authkey=key, backlog=count)
            address, master = f"{host}:{self._listener.address[1]}", (host, free_port(host))
        environment = {**environment, ADDRESS: address, KEY: key.hex()}
        launch = Launch(module, self._here, environment, nodes=nodes, master=master)
        if nodes > 1:
            self._others = gather_nodes(rendezvous, launch)
        with self.log.open("wb") as output:
            self._process = launch.start(output)
        try:
            self._connections = self._accept()
        except BaseException:
            self._kill()
            raise

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Every rank's answer to ``name(*arguments[rank])``, in rank order; RuntimeError when one fails."""
        if not self._connections:
            raise RuntimeError("the learner's ranks are closed: open the learner again")
        answers: dict[int, Any] = {}
        try:
            for connection, given in zip(self._connections, arguments, strict=True):
                connection.send((name, given))
            while len(answers) < self.count:
                waiting = [c for rank, c in enumerate(self._connections) if rank not in answers]
                for ready in wait(waiting):
                    assert isinstance(ready, Connection)
                    kind, value = ready.recv()
                    rank = self._connections.index(ready)
                    if kind == "error":
                        raise RuntimeError(f"rank {rank} of {self.count} failed in {name}: {value}")
                    answers[rank] = value
        except (EOFError, OSError) as error:
            output = self._last_output()  # before the launcher adds its own account of being ended
            self._kill()
            raise RuntimeError(f"a rank of {self.count} died in {name} ({error!r}); {output}") from None
        except BaseException:
            self._kill()  # the others wait for the failed one in a collective call
            raise
        return [answers[rank] for rank in range(self.count)]

    def close(self) -> None:
        """End the ranks. May be called twice."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(("close", ()))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS if self._connections else 0)
        self._kill()

    def _accept(self) -> list[Connection]:
        """One connection a rank, in rank order, within START_SECONDS and as long as the launcher lives."""
        deadline = time.monotonic() + START_SECONDS
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < self.count:
            connection = accept(self._listener, 1.0)
            if connection is None:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.count} ranks did not start; {self._last_output()}")
                continue
            rank, process = connection.recv()
            by_rank[rank] = connection
            if rank < self._here:  # the others' processes are on other machines
                self._processes.append(process)
        return [by_rank[rank] for rank in range(self.count)]

    def _kill(self) -> None:
        for connection in (*self._connections, *self._others):
            connection.close()
        self._connections, self._others = [], []
        if self._process.poll() is None:
            # A rank keeps nothing that is not written when a call returns; the launcher would wait half a minute for it.
            for process in self._processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._listener.close()

    def _last_output(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        return f"the end of {self.log}:\n" + "\n".join(lines[-LOG_LINES:])


def serve(rank: int, worker: Any) -> None:
    """A rank's side: answer calls by the worker's methods until told to close or the parent is gone."""
    address = os.environ[ADDRESS]
    where = address if address.startswith("/") else host_and_port(address)
    connection = Client(where, authkey=bytes.fromhex(os.environ[KEY]))
    connection.send((rank, os.getpid()))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        if name == "close":
            return
        try:
            answer = ("ok", getattr(worker, name)(*arguments))
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = ("error", f"{type(error).__name__}: {error}")
        connection.send(answer)
