"""Stages as Prefect tasks, and what the Prefect page shows of a run: log lines, progress, tables.

Showing never delays or fails the work: artifacts are written by one background thread, and what it cannot keep up with,
or the server refuses, is dropped (the truth is on disk).
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from prefect import runtime, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.states import Completed

from flows.console import Throttle
from pipeline.events import Event
from pipeline.types import StageResult

logger = logging.getLogger(__name__)

STEP_KEY = re.compile(r"round-(\d+)/(?:step-(\d+)/)?(\w+)")
SECONDS_BETWEEN_UPDATES = 5.0
SECONDS_AT_THE_END = 10.0
EVENTS_SHOWN = 50
SECONDS_AFTER_A_FAILURE = 2.0
SECONDS_BETWEEN_LOOKS = 3.0
"""At the run's state, whether it was cancelled."""


@task(name="stage", task_run_name="{key}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def stage_task(key: str, round_: int | None, step: int | None, work: Callable[[], None], reused: bool) -> Any:
    """One stage. Its result is on disk, not in Prefect: what is complete there is shown as Reused."""
    if reused:
        return Completed(name="Reused", message="complete on disk")
    work()
    return Completed(message="complete on disk")


def in_task(key: str, body: Callable[[], StageResult], reused: bool) -> StageResult:
    """Run a stage as a Prefect task, directly in this thread; the counterpart of ``flows.workflow.plainly``."""
    results: list[StageResult] = []
    match = STEP_KEY.fullmatch(key)
    round_ = int(match[1]) if match else None
    step = int(match[2]) if match and match[2] else None

    def work() -> None:
        results.append(body())

    named: Any = stage_task.with_options(name=match[3] if match else key.split("/")[0])
    named(key, round_, step, work, reused)
    return results[0] if results else body()


class PrefectView:
    """An observer of the workflow that writes to the Prefect page."""

    def __init__(self) -> None:
        self._log = get_run_logger()
        self._due = Throttle(SECONDS_BETWEEN_UPDATES)
        self._thread = ThreadPoolExecutor(1, "artifacts")
        self.cancelled, self._over = threading.Event(), threading.Event()
        self._pending: Future[Any] | None = None
        self._progress: tuple[str, Any] | None = None
        self._rows: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._round: int | None = None

    def progress(self, key: str, done: int, total: int, note: str) -> None:
        if self.cancelled.is_set():
            raise KeyboardInterrupt("cancelled in Prefect")
        busy = self._pending is not None and not self._pending.done()
        if total > 0 and not busy and self._due.due():
            self._pending = self._later(self._show_progress, key, 100.0 * done / total, f"{key} {note}")

    def end(self, key: str, result: StageResult, *, reused: bool) -> None:
        funnel = result.metrics.get("funnel")
        if funnel:
            rows = [{name: row[name] for name in ("rule", "came_in", "set_aside", "kept")} for row in funnel]
            self._later(create_table_artifact, rows, "selection", "Problems left by each rule")

    def line(self, text: str) -> None:
        self._log.info(text)

    def step(self, row: dict[str, Any]) -> None:
        if self._round is not None and row["round"] != self._round:
            self._show_round()
        self._round = row["round"]
        self._rows.append({name: finite(value) for name, value in row.items() if name != "steps"})

    def event(self, key: str, event: Event) -> None:
        """A log line, the table of all of them, and an event of Prefect's, on which an automation can notify people."""
        level = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}[event.severity]
        self._log.log(level, "%s: %s", key, event.message)
        self._events.append({"stage": key, **{name: finite(value) for name, value in asdict(event).items()}})
        newest = self._events[-EVENTS_SHOWN:]
        self._later(create_table_artifact, newest, "events", "The newest warnings and stops of this process")
        self._later(self._emit, key, event)

    def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
        self._show_round()
        rows = [
            {"metric": metric, "value": finite(value[0]), "low": finite(value[1]), "high": finite(value[2])}
            for metric, value in metrics.items()
            if isinstance(value, list | tuple) and len(value) == 3
        ]
        self._later(create_table_artifact, rows, artifact_key(f"evaluation-{name}"), f"Evaluation of {name}")

    def report(self, markdown: str) -> None:
        """The closing report, as a Markdown artifact."""
        self._later(create_markdown_artifact, markdown, "report", "What the run did")

    def __enter__(self) -> PrefectView:
        threading.Thread(target=self._look, args=[runtime.flow_run.id], name="cancelled?", daemon=True).start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Give the last artifacts a moment; never wait for a server that is gone, nor long when the run was cancelled."""
        self._over.set()
        last = self._later(lambda: None)
        try:
            last.result(timeout=SECONDS_AT_THE_END if failure is None else SECONDS_AFTER_A_FAILURE)
        except TimeoutError:
            logger.warning("the Prefect server did not take the last artifacts in time")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _look(self, flow_run_id: Any) -> None:
        """Set ``cancelled`` when the run is: no worker watches a run started by hand, nor does one that outlived a server."""
        with get_client(sync_client=True) as client:
            while not (self._over.wait(SECONDS_BETWEEN_LOOKS) or self.cancelled.is_set()):
                with contextlib.suppress(Exception):  # a server that is gone is looked for again
                    state = client.read_flow_run(flow_run_id).state
                    if state is not None and state.is_cancelling():
                        self.cancelled.set()

    def _emit(self, key: str, event: Event) -> None:
        flow_run = {"prefect.resource.id": f"prefect.flow-run.{runtime.flow_run.id}"}
        emit_event(
            f"grpoflow.{event.severity}.{event.kind}", resource=flow_run, payload={"stage": key, **asdict(event)}
        )

    def _show_round(self) -> None:
        if self._rows and self._round is not None:
            rows, self._rows = self._rows, []
            key = artifact_key(f"round-{self._round:02d}")
            self._later(create_table_artifact, rows, key, f"Steps of round {self._round}")

    def _show_progress(self, key: str, percent: float, note: str) -> None:
        if self._progress is not None and self._progress[0] == key:
            update_progress_artifact(self._progress[1], percent, note)
        else:
            self._progress = (key, create_progress_artifact(percent, artifact_key(f"progress-{key}"), note))

    def _later(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        context = contextvars.copy_context()  # Prefect finds the run it belongs to in the context

        def show() -> None:
            try:
                context.run(function, *arguments)
            except Exception as error:  # the page is a view: whatever goes wrong with it must not touch the run
                logger.warning("Prefect artifact not written: %s", error)

        return self._thread.submit(show)


def artifact_key(text: str) -> str:
    """Prefect's keys have lower-case letters, digits and dashes only."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def finite(value: Any) -> Any:
    """A number as JSON can hold it: rounded to six digits, None where it is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
