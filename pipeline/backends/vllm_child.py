"""One vLLM engine in a child process, seen from the sampler: start, talk, notice its death, end it.

The child has a session of its own, so that it and whatever vLLM started under it end together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.protocols import EngineDied

LAST_LINES = 15
"""Of the child's log, in the error that tells of its death."""
GRACE = 3.0
"""Seconds between the request to close and the kill; an engine has nothing to save, and a cancelled run must end soon."""


class ChildEngine:
    """Starts a child at once; ``wait_ready`` returns when it can take requests."""

    def __init__(self, name: str, options: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.backends.vllm_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        theirs.close()
        self.send(options)

    def wait_ready(self, timeout: float) -> tuple[int, int]:
        """Longest prompt plus completion, and vocabulary, of the engine; RuntimeError when it is not up in time."""
        deadline = time.monotonic() + timeout
        while not self.connection.poll(0.2):
            self.check_alive()
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(
                    f"{self.name} was not ready after {timeout:.0f} s (sampler.vllm.start_timeout); its last lines:\n"
                    f"{self.last_lines()}"
                )
        _, context, vocabulary = self.receive()
        return context, vocabulary

    def send(self, message: Any) -> None:
        """Hand over a message; EngineDied when nobody takes it."""
        try:
            self.connection.send(message)
        except OSError:
            raise self.died() from None

    def receive(self) -> tuple[Any, ...]:
        """The next message, waiting for it; EngineDied when the child ends first."""
        try:
            while not self.connection.poll(0.2):
                self.check_alive()
            return self.connection.recv()
        except (EOFError, OSError):
            raise self.died() from None

    def check_alive(self) -> None:
        """EngineDied when the process has ended (its last messages may still be unread: poll first)."""
        if self._process.poll() is not None and not self.connection.poll():
            raise self.died()

    def died(self) -> EngineDied:
        """The error that tells how the child ended; ends what is left of it."""
        try:
            status = self._process.wait(GRACE)
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        except subprocess.TimeoutExpired:
            how = "without a status"
        self.close()
        return EngineDied(f"{self.name} ended {how}; its last lines ({self.log}):\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of the child's log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.strip().splitlines()[-LAST_LINES:]) or "(it wrote nothing)"

    def close(self) -> None:
        """End the child and everything under it. May be called twice."""
        if self._process.poll() is None and not self.connection.closed:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.connection.send(("close",))
                self._process.wait(GRACE)
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also what vLLM started and left
        self._process.wait()
