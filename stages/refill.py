"""Rollout with dynamic sampling (DAPO, arXiv 2503.14476 §3.2): further problems until enough groups have a signal."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from data.curriculum import refill_count, refill_problems
from pipeline.protocols import Sampler
from pipeline.rundir import StageContext
from pipeline.types import Problem, Rollout, StageResult
from rewards.scoring import Scorer
from stages.rollout import SHARD, rollout_metrics, sample_problems, training_params

logger = logging.getLogger(__name__)


def run(
    context: StageContext,
    sampler: Sampler,
    tokenizer: Any,
    scorer: Scorer,
    problems: Sequence[Problem],
    train: Sequence[Problem],
    round_: int,
    step: int,
) -> StageResult:
    """Sample the step's problems, then others of ``train``, until ``grpo.problems_per_step`` groups are mixed.

    A group is mixed when the verifier finds both correct and other completions in it. At most
    ``data.curriculum.refill_budget`` times ``grpo.problems_per_step`` problems are sampled. Groups without a signal stay
    recorded; their advantage is 0. What a crash left behind is read again, so a resumed step draws the same problems.
    """
    recipe = context.recipe
    wanted, samples = recipe.grpo.problems_per_step, recipe.grpo.group_size
    drawn: list[Problem] = []
    rollouts: list[Rollout] = []
    more, part, mixed = list(problems), 0, 0
    while more:
        rollouts = sample_problems(
            context, sampler, tokenizer, more, samples=samples, purpose="train", params=training_params(context),
            round_=round_, step=step, first_part=part,
        )  # fmt: skip
        drawn += more
        part += -(-len(more) // max(1, SHARD // samples))
        new = {problem.problem_id for problem in more}
        mixed += count_mixed(scorer, drawn, [r for r in rollouts if r.problem_id in new])
        budget = recipe.data.curriculum.refill_budget
        count = refill_count(wanted=wanted, mixed=mixed, drawn=len(drawn), budget=budget)
        ids = [problem.problem_id for problem in drawn]
        more = refill_problems(train, seed=recipe.seed, round_=round_, step=step, drawn=ids, count=count)
    logger.info("dynamic sampling: %d of %d groups are mixed, %d were wanted", mixed, len(drawn), wanted)
    return StageResult(context.key, metrics={**rollout_metrics(rollouts), "groups": len(drawn), "mixed": mixed})


def count_mixed(scorer: Scorer, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> int:
    """How many groups hold both correct and other completions; unscored ones say neither."""
    verdicts = scorer.verify({p.problem_id: p for p in problems}, rollouts)
    seen: dict[str, set[bool]] = defaultdict(set)
    for rollout, verdict in zip(rollouts, verdicts, strict=True):
        if verdict.correct is not None:
            seen[rollout.group_id].add(verdict.correct)
    return sum(len(values) == 2 for values in seen.values())
