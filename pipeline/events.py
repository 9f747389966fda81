"""What happened in a run beside its work: warnings, stops, policies taken back. Rows of the ``events`` table."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Literal

from pipeline import store
from pipeline.rundir import RunPaths

STEP = re.compile(r"round-(\d+)(?:/step-(\d+))?")


@dataclass(frozen=True, slots=True)
class Event:
    """``kind`` is what was watched, ``message`` one line for people, ``value`` and ``limit`` what was measured and allowed."""

    kind: str
    severity: Literal["info", "warning", "error"]
    message: str
    value: float | None = None
    limit: float | None = None


class RunStopped(RuntimeError):
    """The run was told to stop here. What is complete stays complete, and the same command continues."""

    def __init__(self, event: Event) -> None:
        super().__init__(event.message)
        self.event = event


def record_event(paths: RunPaths, key: str, event: Event) -> bool:
    """Append an event of a stage; False when an attempt before this one has recorded the same."""
    known = store.read(paths, "events", key, ["kind", "severity", "message"]).to_pylist()
    if {"kind": event.kind, "severity": event.severity, "message": event.message} in known:
        return False
    found = STEP.match(key)
    round_, step = (None if number is None else int(number) for number in (found.groups() if found else (None, None)))
    row = {
        "run_id": paths.run_id,
        "stage": key,
        "round": round_,
        "step": step,
        "at": datetime.now(UTC),
        **asdict(event),
    }
    store.append(paths, "events", key, [row], part=len(known))
    return True
