"""Which problems a step is given, from the seed and from what the store says of earlier rounds."""

from __future__ import annotations

from collections.abc import Sequence

from data.curriculum import problems_for_step
from pipeline import store
from pipeline.rundir import RunPaths, StageContext, step_key
from pipeline.types import Problem


def step_problems(context: StageContext, problems: Sequence[Problem], round_: int, step: int) -> list[Problem]:
    """The problems of a step: a pure function of (seed, round, step) and of the pass rates of earlier rounds."""
    recipe = context.recipe
    curriculum = recipe.data.curriculum
    uses_history = round_ > 1 and (curriculum.prefer != "any" or curriculum.window != (0.0, 1.0))
    history = pass_rates(context.paths, round_ - 1, recipe.grpo.steps) if uses_history else None
    return problems_for_step(
        problems, seed=recipe.seed, round_=round_, step=step, count=recipe.grpo.problems_per_step, history=history,
        config=recipe.data, steps_before=(round_ - 1) * recipe.grpo.steps,
    )  # fmt: skip


def pass_rates(paths: RunPaths, rounds: int, steps: int) -> dict[str, float]:
    """problem_id → share of its scored training rollouts of rounds 1 to ``rounds`` that were correct."""
    right: dict[str, int] = {}
    tried: dict[str, int] = {}
    for round_ in range(1, rounds + 1):
        for step in range(1, steps + 1):
            key = step_key(round_, step)
            sampled = store.read(paths, "rollouts", f"{key}/rollout", ["rollout_id", "problem_id"]).to_pylist()
            judged = store.read(paths, "rewards", f"{key}/reward", ["rollout_id", "correct"]).to_pylist()
            verdicts = {row["rollout_id"]: row["correct"] for row in judged}
            for row in sampled:
                if (verdict := verdicts[row["rollout_id"]]) is not None:
                    tried[row["problem_id"]] = tried.get(row["problem_id"], 0) + 1
                    right[row["problem_id"]] = right.get(row["problem_id"], 0) + verdict
    return {problem: right[problem] / count for problem, count in tried.items()}
