"""The Prefect flows behind the deployments; ``grpoflow run`` calls the same ones in its own process.

Parameters are flat, so that one can be given alone, and are resolved in the first second. Importing this module loads
neither torch nor a stage.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.states import Cancelled, Completed, State

from flows.console import Display
from flows.runs import open_run
from flows.service import started_at
from pipeline.rundir import stage_keys


def run_name() -> str:
    """``smoke mine``: what was given, until the run is opened and its own names are known."""
    given = runtime.flow_run.parameters
    parts = [given["recipe"] and Path(given["recipe"]).stem, given["run_id"], given["resume_from"]]
    return " ".join(part for part in parts if part)


@flow(name="recipe", flow_run_name=run_name, log_prints=False, persist_result=False)
def recipe(
    recipe: str | None = "embedded",
    overrides: list[str] | None = None,
    run_id: str | None = None,
    resume_from: str | None = None,
    root: str = "runs",
) -> State[Any]:
    """Run the whole recipe, or what is left of it.

    Args:
        recipe: name of a recipe that comes with grpoflow (embedded, smoke, paper, …) or path of a .toml file; null takes
            the recipe that run_id was started with
        overrides: changes of single fields, each "section.field=value", for example "grpo.group_size=16"
        run_id: folder of the run under root; null derives one from the recipe, so that the same call continues it
        resume_from: stage key of run_id from which a child run branches off, for example round-01/step-0003/rollout
        root: folder of all runs
    """
    from flows.execute import execute, markdown_report
    from flows.tasks import PrefectView, in_task

    resolved, paths = open_run(recipe, overrides or [], run_id, resume_from, Path(root))
    sign(f"{resolved.name} {paths.run_id}")
    with PrefectView() as view:
        display = Display(len(stage_keys(resolved)), also=view.line)
        try:
            execute(resolved, paths, execute_stage=in_task, observers=(view,), display=display)
        except KeyboardInterrupt:
            if not view.cancelled.is_set():
                raise
            return Cancelled(message=f"run {paths.run_id}: the same parameters continue it")
        view.report(f"Page: `{paths.report('report').resolve()}`\n\n{markdown_report(paths)}")
    return Completed(message=f"run {paths.run_id} in {paths.directory}")


@flow(name="evaluate", flow_run_name="report", persist_result=False)
def report(root: str = "runs", late_minutes: int = 30) -> State[Any]:
    """Evaluate every checkpoint that has no evaluation yet, and rebuild the reports and their index.

    Args:
        root: folder of all runs
        late_minutes: a schedule that comes later than this (the worker was down) is skipped, for the next one does it all
    """
    from datetime import UTC, datetime

    from flows.evaluate import report_all
    from flows.tasks import PrefectView, in_task

    sign("report")
    scheduled = runtime.flow_run.scheduled_start_time
    late = (datetime.now(UTC) - scheduled).total_seconds() / 60 if scheduled else 0.0
    if late > late_minutes:
        return Completed(name="SkippedLate", message=f"{late:.0f} minutes late")
    with PrefectView() as view:
        index, lines = report_all(Path(root), execute_stage=in_task, observers=(view,), say=view.line)
        view.report("\n\n".join([f"Index: {index}", *lines]))
    return Completed(message=str(index))


def sign(name: str) -> None:
    """Name the flow run, and tag it with this process: ``up`` and ``down`` then know whether it lives, as no bare pid says."""
    pid, run_id = os.getpid(), runtime.flow_run.id
    mine = f"process:{socket.gethostname()}:{pid}:{started_at(pid)}"
    kept = [tag for tag in runtime.flow_run.tags if not tag.startswith("process:")]
    with get_client(sync_client=True) as client:
        client.update_flow_run(run_id, name=name, tags=[*kept, mine])
