"""Carrying a run out in this process: lock, log, engines, the loop, the report."""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flows.console import Display, closing, evaluation_table
from flows.devices import devices_held
from flows.trackers import trackers_of
from flows.workflow import Execute, Observer, Workflow, plainly
from pipeline.config import Recipe
from pipeline.events import RunStopped
from pipeline.rundir import RunPaths, locked, stage_keys

logger = logging.getLogger(__name__)

LEAST_FREE = 256 * 2**20
"""Bytes that must be free where the run is written before it starts."""
OURS = ("pipeline", "data", "rewards", "eval", "stages", "flows")


def execute(
    recipe: Recipe,
    paths: RunPaths,
    *,
    execute_stage: Execute = plainly,
    observers: tuple[Observer, ...] = (),
    display: Display | None = None,
) -> dict[str, Any]:
    """Run what is left of the run and build its report; returns the metrics of every evaluation by checkpoint.

    Raises BlockingIOError when another process works on the run, OSError when the disk is full.
    """
    check_space(paths)
    display = display or Display(len(stage_keys(recipe)))
    with locked(paths), logged(paths), display:
        clear_partials(paths)
        with trackers_of(recipe, paths) as trackers:
            evaluations = _loop(recipe, paths, display, execute_stage, (*observers, *trackers))
        report = build_report(paths)
    display.console.print(evaluation_table(evaluations, recipe.evaluate.ks))
    for line in (*findings(recipe, paths), *closing(paths, report)):
        display.line(line)
    return evaluations


def findings(recipe: Recipe, paths: RunPaths) -> list[str]:
    """What a recipe that is made for one of the paper's claims found."""
    from eval.claims import OF_ONE_RUN, claims
    from eval.gather import gather

    if recipe.name not in OF_ONE_RUN:
        return []
    return [claim.sentence for claim in claims([gather(paths)])]


def _loop(
    recipe: Recipe, paths: RunPaths, display: Display, execute_stage: Execute, observers: tuple[Observer, ...]
) -> dict[str, Any]:
    from flows.engines import Engines
    from flows.recipe import run_recipe

    prepare_libraries(recipe)
    flow = Workflow(recipe, paths, display, execute_stage, observers)
    try:
        with (
            devices_held(recipe, f"run {paths.run_id}", display.line),
            flow,
            Engines(recipe, paths, flow.progress) as engines,
        ):
            return run_recipe(flow, engines)
    except BaseException as error:
        expected = isinstance(error, (KeyboardInterrupt, RunStopped))
        logger.error("run %s stopped: %s", paths.run_id, error, exc_info=not expected)
        raise


def prepare_libraries(recipe: Recipe) -> None:
    """Threads as the recipe says, and one progress bar at a time: ours."""
    import torch
    import transformers

    torch.set_num_threads(recipe.runtime.threads)
    atexit.register(gc.freeze)  # else the interpreter's last collection takes seconds, also after a cancel
    transformers.utils.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess


def build_report(paths: RunPaths) -> Path:
    """The run's HTML report, made again from what is on disk."""
    from eval.report import build_report as build

    return build([paths], paths.report("report"))


def markdown_report(paths: RunPaths) -> str:
    """The run's short report for the Prefect page."""
    from eval.report import build_markdown

    return build_markdown(paths)


def check_space(paths: RunPaths) -> None:
    """Refuse to start on a disk that is nearly full. OSError (ENOSPC) says how much is free."""
    free = shutil.disk_usage(paths.directory).free
    if free < LEAST_FREE:
        raise OSError(
            errno.ENOSPC,
            f"run directory {paths.directory}: {free / 2**20:.0f} MiB free, expected at least {LEAST_FREE / 2**20:.0f}",
        )


def clear_partials(paths: RunPaths) -> None:
    """Delete what a killed process left half-written: hidden names that end in .partial, which nothing ever reads."""
    for path in paths.directory.rglob(".*.partial"):
        logger.info("clearing half-written %s", path.name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class RunLog(logging.FileHandler):
    """``run.log``; on a full disk its lines are lost without a word, for the work itself then says what is wrong."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing; logging itself would print a traceback a line."""

    def close(self) -> None:
        """Close the file, and let go of what it does not take any more."""
        with suppress(OSError):
            super().close()


@contextmanager
def logged(paths: RunPaths) -> Iterator[None]:
    """Everything our packages log at INFO also goes to ``run.log``."""
    handler = RunLog(paths.log_file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in OURS]
    for ours in loggers:
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        for ours in loggers:
            ours.removeHandler(handler)
        handler.close()
