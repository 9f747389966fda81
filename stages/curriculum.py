"""Which problems a step is given, from the seed and from what the store says of earlier rounds and runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from data.curriculum import problems_for_step
from data.difficulty import EVERY_ROUND, pass_rates
from pipeline import store
from pipeline.rundir import StageContext
from pipeline.types import Problem


def step_problems(context: StageContext, problems: Sequence[Problem], round_: int, step: int) -> list[Problem]:
    """The problems of a step: a pure function of (seed, round, step) and of the pass rates of earlier rounds."""
    recipe = context.recipe
    history = known_pass_rates(context, round_)
    return problems_for_step(
        problems, seed=recipe.seed, round_=round_, step=step, count=recipe.grpo.problems_per_step, history=history,
        config=recipe.data, steps_before=(round_ - 1) * recipe.grpo.steps,
    )  # fmt: skip


def known_pass_rates(context: StageContext, round_: int) -> dict[str, float] | None:
    """problem_id → pass rate from the rounds before this one or the probe, else from ``data.curriculum.history``.

    None when the recipe does not look at pass rates, or when nothing was rolled out yet.
    """
    config = context.recipe.data.curriculum
    if not config.reads_pass_rates:
        return None
    rates: dict[str, float] = {}
    for run_id in config.history:
        rates |= _rates_of(context.paths.root, run_id, EVERY_ROUND)
    if round_ > 1 or config.probe_samples:
        rates |= _rates_of(context.paths.root, context.paths.run_id, round_)
    return rates or None


@lru_cache(maxsize=8)
def _rates_of(root: Path, run_id: str, before_round: int) -> dict[str, float]:
    # The probe and the rounds before this one are complete and never change, so a round asks once.
    connection = store.connect(run_id, root=root)
    try:
        return pass_rates(connection, before_round)
    finally:
        connection.close()
