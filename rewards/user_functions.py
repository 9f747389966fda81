"""A user's reward function ("module:function") in a process of its own, so that a call that hangs can be killed.

The child is ``python -m rewards.user_functions``: it imports the function, then answers one frame a call.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.types import Problem

START_SECONDS = 120.0
"""Longest import of the user's module (it may load torch)."""
PATIENCE = 3
"""Calls in a row that may hang or end the process before the rest of a step is not tried."""


class UserFunction:
    """``call_many`` gives one outcome an item: ``("value", anything)``, ``("raised", text)``, ``("hung", text)`` or
    ``("died", text)`` and, after ``PATIENCE`` of the last two in a row, ``("given_up", text)`` for the rest of that call.
    The process starts with the object and is started again after it was killed."""

    def __init__(self, name: str, target: str, timeout: float) -> None:
        self.name, self.target, self.timeout = name, target, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        # The child finds the user's module where this process would.
        path = os.pathsep.join(
            [str(Path(__file__).resolve().parents[1]), *(entry or os.getcwd() for entry in sys.path)]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rewards.user_functions", self.target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        kind, detail = self._receive(START_SECONDS)
        if kind != "value":
            self.close()
            raise ValueError(
                f'rewards.functions.{self.name} is {self.target!r}: expected an importable "module:function"; {detail}'
            )

    def call_many(self, items: Sequence[tuple[Problem, str]]) -> list[tuple[str, Any]]:
        """One call an item, in order, each with its own deadline of ``timeout`` seconds."""
        outcomes: list[tuple[str, Any]] = []
        for problem, text in items:
            last = outcomes[-PATIENCE:]
            if len(last) == PATIENCE and all(kind in {"hung", "died", "given_up"} for kind, _ in last):
                outcomes.append(("given_up", f"{PATIENCE} calls in a row hung or ended the process"))
            else:
                outcomes.append(self._call(problem, text))
        return outcomes

    def _call(self, problem: Problem, text: str) -> tuple[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            _write_frame(self._process.stdin, (problem, text))
        except BrokenPipeError:
            outcome: tuple[str, Any] = ("died", "its process ended")
        else:
            outcome = self._receive(self.timeout)
        if outcome[0] in {"hung", "died"}:
            self.close()
        return outcome

    def _receive(self, seconds: float) -> tuple[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        descriptor, received, size = self._process.stdout.fileno(), bytearray(), None
        while size is None or len(received) < size + 8:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return "hung", f"no answer in {seconds:g} s"
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return "died", f"its process ended with status {self._process.wait()}"
            received += chunk
            if size is None and len(received) >= 8:
                size = int.from_bytes(received[:8], "big")
        kind, value = pickle.loads(received[8:])  # the user's own function: trusted as the recipe is
        return kind, value

    def close(self) -> None:
        """Kill the process. May be called twice."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None


def _write_frame(pipe: BinaryIO | Any, value: object) -> None:
    data = pickle.dumps(value)
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _plain(value: object) -> object:
    """Numbers as they are; anything else by name, since it may not pickle."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    try:
        return float(value) if not isinstance(value, (str, bytes)) else value  # type: ignore[arg-type]
    except Exception:  # numpy scalars and 0-d tensors convert; whatever does not is refused by its type's name
        return f"<{type(value).__name__}>"


def serve(target: str) -> None:
    """The child: import ``target``, then answer calls until the pipe closes."""
    # Frames travel over duplicates: what the function prints goes to stderr and cannot break them.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        module, _, attribute = target.partition(":")
        function = getattr(import_module(module), attribute)
        if not callable(function):
            raise TypeError(f"{target} is not callable")
    except BaseException as error:
        _write_frame(answers, ("raised", f"{type(error).__name__}: {error}"))
        return
    _write_frame(answers, ("value", None))
    while header := requests.read(8):
        problem, text = pickle.loads(requests.read(int.from_bytes(header, "big")))
        try:
            _write_frame(answers, ("value", _plain(function(problem, text))))
        except Exception as error:
            _write_frame(answers, ("raised", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    serve(sys.argv[1])
