"""A stage's deadline, kept by a process of its own (``flows.watchdog``): no thread, which a hung call would outlive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.events import Event, RunStopped
from pipeline.rundir import RunPaths

GRACE = 10.0
"""Seconds between the request to stop and the kill."""


class Deadline:
    """Starts the watchdog when the first stage has a deadline; ``close`` ends it. For the main thread: signals go there."""

    def __init__(self, paths: RunPaths, grace: float = GRACE) -> None:
        self._paths, self._grace = paths, grace
        self._process: subprocess.Popen[str] | None = None
        self._handler: Any = None
        self._fired = False

    @contextlib.contextmanager
    def within(self, key: str, seconds: float, event: Event) -> Iterator[None]:
        """RunStopped with the event when what runs inside takes longer; the process is killed when even that hangs."""
        self._start()
        self._fired = False
        self._order(
            seconds=seconds, grace=self._grace, event=asdict(event), key=key, root=str(self._paths.root.resolve()),
            run_id=self._paths.run_id,
        )  # fmt: skip
        try:
            try:
                yield
            finally:
                self._order()  # answered: from here on no signal comes
        except KeyboardInterrupt:
            if self._fired:
                self._order()  # the signal may have cut the one above short
                raise RunStopped(event) from None
            raise

    def close(self) -> None:
        """End the watchdog. May be called twice."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.communicate()  # closes its input, on which it ends
        signal.signal(signal.SIGUSR1, self._handler)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._handler = signal.signal(signal.SIGUSR1, self._stop)
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(  # own session: Ctrl-C is for the run, not for what watches it
            [sys.executable, "-P", "-m", "flows.watchdog"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip

    def _order(self, **order: Any) -> None:
        """Send an order (nothing: the stage is over) and wait for the answer."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # killed by somebody: the next stage starts another
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            self._process.stdout.readline()

    def _stop(self, *_: object) -> None:
        self._fired = True
        raise KeyboardInterrupt  # passes every `except Exception` on its way out
