"""The process that ends a stage at its deadline, even one that hangs in a library's C code: ``python -m flows.watchdog``.

It reads orders, one JSON object a line, and answers each with a line. At a deadline its parent gets SIGUSR1, on which it
unwinds as on Ctrl-C (``flows.deadline``); when it has not come back after a grace, it and all below it are killed, and
the event that it can no longer record is recorded here. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Wait for orders and deadlines until the parent is gone or closes the pipe."""
    parent, order, deadline = os.getppid(), {}, float("inf")
    while os.getppid() == parent:
        wait = max(0.0, min(1.0, deadline - time.monotonic()))
        if select.select([sys.stdin], [], [], wait)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            order = json.loads(line)
            deadline = time.monotonic() + order["seconds"] if order else float("inf")
            print("ok", flush=True)
        elif time.monotonic() >= deadline:
            os.kill(parent, signal.SIGUSR1)
            if not select.select([sys.stdin], [], [], order["grace"])[0]:
                end(parent, order)
                return
            deadline = float("inf")  # it has come back, and says so next


def end(parent: int, order: dict[str, Any]) -> None:
    """Kill the process and everything below it, say why, and record it."""
    family = [parent, *below(parent)]
    for pid in family:
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    print(f"grpoflow: {order['event']['message']} (it hung, and was killed)", file=sys.stderr, flush=True)
    from pipeline.events import Event, record_event
    from pipeline.rundir import RunPaths

    record_event(RunPaths(Path(order["root"]), order["run_id"]), order["key"], Event(**order["event"]))


def below(pid: int) -> list[int]:
    """Children of a process, their children and so on."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append(int(file.parent.name))
    found, todo = [], [pid]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


if __name__ == "__main__":
    main()
