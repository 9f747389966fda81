"""Stage execution: what is complete is reused, what is not runs and is marked complete last. Knows no Prefect."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from flows.console import Display, Throttle
from flows.deadline import Deadline
from pipeline import store
from pipeline.config import Recipe
from pipeline.costs import Meter
from pipeline.events import Event, RunStopped, record_event
from pipeline.protocols import EngineDied
from pipeline.rundir import RunPaths, StageContext, read_result, stage_kind, write_result
from pipeline.types import StageResult

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0
"""Between two lines of progress in ``run.log``, for who looks at a run without a terminal."""

Body = Callable[[StageContext], StageResult]
Execute = Callable[[str, Callable[[], StageResult], bool], StageResult]
"""``execute(key, body, reused)`` calls the body, in a Prefect task or plainly."""


class Observer(Protocol):
    """Who is told what happens; flows.tasks shows it in Prefect, flows.console in the terminal."""

    def progress(self, key: str, done: int, total: int, note: str) -> None: ...
    def end(self, key: str, result: StageResult, *, reused: bool) -> None: ...
    def step(self, row: dict[str, Any]) -> None: ...
    def evaluated(self, name: str, metrics: dict[str, Any]) -> None: ...
    def event(self, key: str, event: Event) -> None: ...


def plainly(key: str, body: Callable[[], StageResult], reused: bool) -> StageResult:
    """Run a stage without Prefect."""
    return body()


class Workflow:
    """One run's stages, in order, each at most once. A context manager: leaving it ends what watches their deadlines."""

    def __init__(
        self, recipe: Recipe, paths: RunPaths, display: Display, execute: Execute = plainly,
        observers: tuple[Observer, ...] = (),
    ) -> None:  # fmt: skip
        self.recipe, self.paths, self.display = recipe, paths, display
        self._execute, self._observers = execute, (display, *observers)
        self._key = ""
        self._meter, self._deadline = Meter(recipe.costs, paths), Deadline(paths)
        self._log_due = Throttle(LOG_SECONDS)
        self.evaluations: dict[str, Any] = {}

    def __enter__(self) -> Workflow:
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline.close()

    def stage(self, key: str, body: Body) -> StageResult:
        """The stage's result: from disk when it is complete, else by running the body and marking it complete."""
        self._key = key
        existing = read_result(self.paths, key)
        if existing is not None:
            result = self._execute(key, lambda: existing, True)
        else:
            self.display.begin(key)
            result = self._execute(key, lambda: self._run(key, body), False)
        if existing is None or self.paths.result_file(key).is_file():  # an inherited stage is not this run's cost
            self._meter.complete(result, new=existing is None)
        for observer in self._observers:
            observer.end(key, result, reused=existing is not None)
        return result

    def merge_tables(self, round_: int | None = None) -> None:
        """Merge the small files of a finished round (of the other finished stages) that this run wrote itself."""
        if round_ is None or self.paths.result_file(f"round-{round_:02d}/refresh").is_file():
            store.compact(self.paths, round_)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Progress of the stage that is running."""
        if self._log_due.due():
            logger.info("stage %s: %d of %d %s", self._key, done, total, note)
        for observer in self._observers:
            observer.progress(self._key, done, total, note)

    def tell(self, event: Event) -> None:
        """Record what happened in the stage that is running, and tell every observer what is new."""
        if record_event(self.paths, self._key, event):
            for observer in self._observers:
                observer.event(self._key, event)

    def evaluated(self, name: str, result: StageResult) -> None:
        """Keep an evaluation's metrics for the table at the end, and tell every observer."""
        self.evaluations[name] = result.metrics
        for observer in self._observers:
            observer.evaluated(name, dict(result.metrics))

    def step_done(
        self, round_: int, step: int, sampled: StageResult, rewarded: StageResult, updated: StageResult
    ) -> None:
        """Tell every observer one step's figures."""
        seconds = sampled.seconds + rewarded.seconds + updated.seconds
        tokens = sampled.metrics["completion_tokens"]
        row = {
            "round": round_, "step": step, "reward": rewarded.metrics["reward"], "correct": rewarded.metrics["correct"],
            "kl": updated.metrics.get("kl"), "entropy": updated.metrics.get("entropy"),
            "length": sampled.metrics["completion_length"], "tokens_per_second": tokens / max(1e-9, seconds),
            "seconds": seconds, "steps": self.recipe.grpo.steps,
        }  # fmt: skip
        for observer in self._observers:
            observer.step(row)

    def _run(self, key: str, body: Body) -> StageResult:
        started, clock = datetime.now(UTC), time.monotonic()
        logger.info("stage %s begins", key)
        context = StageContext(self.recipe, self.paths, key, self.progress, self.tell, self._meter)
        try:
            self._meter.check(key)
            with self._within_time(key):
                result = self._attempt(context, body)
        except RunStopped as stop:
            self.tell(stop.event)
            raise
        seconds = time.monotonic() - clock
        result = replace(
            result, seconds=seconds, started_at=started.isoformat(timespec="milliseconds"),
            finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )  # fmt: skip
        write_result(self.paths, result)
        logger.info("stage %s done in %.1f s", key, seconds)
        return result

    def _attempt(self, context: StageContext, body: Body) -> StageResult:
        try:
            return body(context)
        except EngineDied as death:
            # What the stage has recorded is read, not sampled again; a second death is the run's.
            logger.warning("stage %s: %s; once more with a fresh engine", context.key, death)
            return body(context)

    def _within_time(self, key: str) -> AbstractContextManager[None]:
        """The deadline of a stage: that of its kind, or the end of the run's seconds where that comes first."""
        kind, left = stage_kind(key), self._meter.seconds_left()
        field, limit = f"timeouts.{kind}", self.recipe.timeouts.get(kind)  # type: ignore[call-overload]
        seconds = limit
        if left is not None and (seconds is None or left < seconds):
            field, limit, seconds = "costs.seconds", self.recipe.costs.seconds, left
        if seconds is None:
            return nullcontext()
        event = Event(field, "error", (
            f"{field} = {limit:g}: stage {key} was ended after {seconds:.4g} s; what it has recorded stays, and the same "
            f"command continues, with more seconds where it needs them"
        ), seconds, limit)  # fmt: skip
        return self._deadline.within(key, seconds, event)
