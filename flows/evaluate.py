"""The scheduled report: checkpoints without an evaluation get one, every report and the index of all runs are rebuilt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.console import Display
from flows.devices import devices_held
from flows.execute import build_report, logged, prepare_libraries
from flows.runs import read_recipe, run_ids
from flows.workflow import Execute, Observer, Workflow, plainly
from pipeline.config import Recipe
from pipeline.events import RunStopped
from pipeline.rundir import RunPaths, locked, read_result

logger = logging.getLogger(__name__)


def report_all(
    root: Path,
    *,
    execute_stage: Execute = plainly,
    observers: tuple[Observer, ...] = (),
    say: Callable[[str], Any] = print,
) -> tuple[Path, list[str]]:
    """Returns the index and one line a run. Safe to call at any time: what is evaluated is never evaluated again.

    A run that cannot be read does not keep the others from their reports: ValueError names such runs at the end.
    """
    from eval.index import build_index

    lines, troubled = [], []
    for run_id in run_ids(root):
        paths = RunPaths(root, run_id)
        try:
            with locked(paths), logged(paths):
                done = evaluate_missing(read_recipe(paths), paths, execute_stage, observers)
                build_report(paths)
        except BlockingIOError:
            line = f"{run_id}: at work, left alone"
        except RunStopped as stop:  # its recipe allows no more, which is no trouble
            line = f"{run_id}: {stop}"
        except (ValueError, FileNotFoundError) as error:
            line = f"{run_id}: {error}"
            troubled.append(run_id)
        else:
            line = f"{run_id}: {'evaluated ' + ', '.join(done) if done else 'nothing new'}"
        say(line)
        lines.append(line)
    index = build_index(root)
    if troubled:
        raise ValueError(f"no report of {', '.join(troubled)} (see above); {index} and the other runs' are made")
    return index, lines


def evaluate_missing(
    recipe: Recipe, paths: RunPaths, execute_stage: Execute = plainly, observers: tuple[Observer, ...] = ()
) -> list[str]:
    """Evaluate the named checkpoints of a run that are on disk and have no complete evaluation; returns their names."""
    names = ["warm-start", *(f"round-{r:02d}" for r in range(1, recipe.grpo.rounds + 1)), "final"]
    missing = [n for n in names if read_result(paths, f"evaluate/{n}") is None and is_made(paths, n)]
    if not missing:
        return []
    from flows.engines import Engines
    from flows.recipe import evaluate_policy
    from stages.select import load_problems

    prepare_libraries(recipe)
    heldout = [problem for problem in load_problems(paths) if problem.split == "heldout"]
    flow = Workflow(recipe, paths, Display(len(missing), quiet=True), execute_stage, observers)
    with (
        devices_held(recipe, f"report of {paths.run_id}", wait=False),
        flow,
        Engines(recipe, paths, flow.progress) as engines,
    ):
        for name in missing:
            evaluate_policy(flow, engines, heldout, name)
    return missing


def is_made(paths: RunPaths, name: str) -> bool:
    """Whether the stage that writes this checkpoint is complete."""
    stage = {"warm-start": "sft", "final": "regenerate"}.get(name, f"{name}/refresh")
    return read_result(paths, stage) is not None
