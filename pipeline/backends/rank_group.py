"""Child processes, one a rank, started through torch's elastic launcher: they stay up, and answer one call at a time.

A call goes to every rank with its own arguments and returns when all have answered. A rank that raises, dies or hangs
at start takes the group down with one error that ends with the ranks' last output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

ADDRESS, KEY = "GRPOFLOW_RANK_ADDRESS", "GRPOFLOW_RANK_KEY"
START_SECONDS, CLOSE_SECONDS = 300.0, 20.0
LOG_LINES = 15


class RankGroup:
    """``count`` ranks of ``python -m module``; use ``call`` and, in the end, ``close``."""

    def __init__(self, module: str, count: int, scratch: Path, environment: Mapping[str, str]) -> None:
        self.count = count
        self.log = scratch / f"{module.rsplit('.', 1)[-1]}.log"
        key = os.urandom(16)
        # A short name of its own: a socket's path may have 107 characters, a run's folder can have more.
        self._listener = Listener(family="AF_UNIX", authkey=key, backlog=count)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--max-restarts=0",
            f"--nproc-per-node={count}", "-m", module,
        ]  # fmt: skip
        environment = {**os.environ, **environment, ADDRESS: str(self._listener.address), KEY: key.hex()}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._connections: list[Connection] = []
        self._processes: list[int] = []
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
        socket = self._listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(1.0)
        deadline = time.monotonic() + START_SECONDS
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < self.count:
            try:
                connection: Any = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.count} ranks did not start; {self._last_output()}") from None
                continue
            rank, process = connection.recv()
            by_rank[rank] = connection
            self._processes.append(process)
        return [by_rank[rank] for rank in range(self.count)]

    def _kill(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []
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
    connection = Client(os.environ[ADDRESS], family="AF_UNIX", authkey=bytes.fromhex(os.environ[KEY]))
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
