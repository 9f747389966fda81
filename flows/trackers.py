"""Experiment trackers: a run's steps and evaluations, also to TensorBoard, Weights & Biases or trackio where asked.

Off unless the recipe names some in ``trackers``. A tracker is a view: the truth is on disk, and one that fails while the
run works is left with a warning. Every start of a run tells its observers of all steps, those on disk too, so that a
tracker named later, or after a crash, has the whole run: TensorBoard's file is written anew at each start, the others
have a list of what they were given beside the run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.config import Recipe
from pipeline.events import Event
from pipeline.rundir import RunPaths
from pipeline.types import StageResult

logger = logging.getLogger(__name__)

Log = Callable[[dict[str, float], int, str], None]
"""``log(values, step, time)``: the time is ISO 8601, of the stage that made the values."""


@dataclass
class Sink:
    """One open tracker. ``given`` lists what it was given in earlier lives; None: it keeps nothing from them."""

    name: str
    log: Log
    close: Callable[[], None]
    given: Path | None = None


class Trackers:
    """An observer of the workflow that passes steps and evaluations on; its x-axis is the step, counted over all rounds."""

    def __init__(self, sinks: list[Sink], rounds: int, steps: int) -> None:
        self._sinks, self._rounds, self._steps = sinks, rounds, steps
        self._given = {sink.name: given_before(sink.given) for sink in sinks}
        self._time = datetime.now(UTC).isoformat()

    def progress(self, key: str, done: int, total: int, note: str) -> None:
        """Trackers show what is finished."""

    def end(self, key: str, result: StageResult, *, reused: bool) -> None:
        self._time = result.finished_at or self._time

    def step(self, row: dict[str, Any]) -> None:
        number = (row["round"] - 1) * self._steps + row["step"]
        values = {f"train/{name}": value for name, value in row.items() if name not in ("round", "step", "steps")}
        self._pass_on(f"step {number}", values, number)

    def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
        round_ = int(name.removeprefix("round-")) if name.startswith("round-") else 0
        prefix = "evaluation"
        if name == "final":  # trained again from the base: no further point of the policy's curve
            prefix, round_ = "final", self._rounds
        measures = {f"{prefix}/{m}": v[0] for m, v in metrics.items() if isinstance(v, list | tuple) and len(v) == 3}
        self._pass_on(f"evaluation {name}", measures, round_ * self._steps)

    def event(self, key: str, event: Event) -> None:
        """Trackers show figures; warnings are in the store."""

    def close(self) -> None:
        for sink in self._sinks:
            self._safely(sink, sink.close)

    def _pass_on(self, key: str, values: dict[str, Any], step: int) -> None:
        numbers = {n: float(v) for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
        for sink in list(self._sinks):
            if key not in self._given[sink.name]:
                self._safely(sink, lambda sink=sink: self._give(sink, key, numbers, step))  # type: ignore[misc]

    def _give(self, sink: Sink, key: str, numbers: dict[str, float], step: int) -> None:
        self._given[sink.name].add(key)
        if sink.given is not None:  # before it is given: a crash between the two loses a point rather than doubling it
            with sink.given.open("a", encoding="utf-8") as file:
                file.write(key + "\n")
        sink.log(numbers, step, self._time)

    def _safely(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever goes wrong with a view must not touch the run
            logger.warning(
                "tracker %s is left for the rest of this run: %s: %s", sink.name, type(error).__name__, error
            )
            self._sinks = [other for other in self._sinks if other is not sink]


@contextmanager
def trackers_of(recipe: Recipe, paths: RunPaths) -> Iterator[tuple[Trackers, ...]]:
    """The observer of the recipe's trackers, or none when it names none. ValueError when one cannot be opened."""
    if not recipe.trackers:
        yield ()
        return
    trackers = Trackers([_open(name, recipe, paths) for name in recipe.trackers], recipe.grpo.rounds, recipe.grpo.steps)
    try:
        yield (trackers,)
    finally:
        trackers.close()


def check_installed(recipe: Recipe) -> None:
    """ValueError in one line for a tracker whose package is not there; loads none of them."""
    for name in recipe.trackers:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"trackers has {name!r}, which is not installed: pip install {name}, or leave it out")


def given_before(file: Path | None) -> set[str]:
    """What a tracker was given in earlier lives of the run. A line that a crash cut off is ended, and not counted."""
    if file is None or not file.is_file():
        return set()
    *whole, cut = file.read_text(encoding="utf-8").split("\n")
    if cut:
        file.write_text("".join(line + "\n" for line in whole), encoding="utf-8")
    return set(whole)


def _open(name: str, recipe: Recipe, paths: RunPaths) -> Sink:
    folder = paths.tracker(name)
    openers = {"tensorboard": _open_tensorboard, "wandb": _open_wandb, "trackio": _open_trackio}
    try:
        return openers[name](recipe, paths, folder)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"trackers: {name} cannot be opened ({type(error).__name__}: {reason}); or leave it out"
        ) from None


def _open_tensorboard(recipe: Recipe, paths: RunPaths, folder: Path) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    writer: Any = SummaryWriter(str(folder))

    def log(values: dict[str, float], step: int, time: str) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step, walltime=datetime.fromisoformat(time).timestamp())
        writer.flush()

    return Sink("tensorboard", log, writer.close)


def _open_wandb(recipe: Recipe, paths: RunPaths, folder: Path) -> Sink:
    """Where it sends to is Weights & Biases' own environment: WANDB_MODE=offline keeps it all in the run's folder."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "grpoflow"), id=_unique(paths), name=paths.run_id, resume="allow",
        dir=str(folder), config=recipe.model_dump(mode="json"),
        # The metrics and the recipe, and nothing else: no code, no terminal output, no figures of the machine.
        settings=wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True,
            x_save_requirements=False,
        ),
    )  # fmt: skip
    return Sink("wandb", lambda values, step, _: run.log(values, step=step), run.finish, folder / "given.txt")


def _open_trackio(recipe: Recipe, paths: RunPaths, folder: Path) -> Sink:
    """trackio keeps runs in a folder of its own on this machine, which ``trackio show`` reads."""
    import trackio

    folder.mkdir(parents=True, exist_ok=True)
    trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", "grpoflow"), name=f"{paths.run_id}-{_unique(paths)[:6]}",
        resume="allow", config=recipe.model_dump(mode="json"), embed=False,
        auto_log_gpu=False, auto_log_cpu=False,
    )  # fmt: skip
    return Sink("trackio", lambda values, step, _: trackio.log(values, step=step), trackio.finish, folder / "given.txt")


def _unique(paths: RunPaths) -> str:
    """An id that no run of the same name elsewhere has."""
    return hashlib.sha256(f"{paths.run_id} {paths.header['created_at']}".encode()).hexdigest()[:16]
