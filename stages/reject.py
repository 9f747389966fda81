"""Rejection sampling: the policy writes its own SFT set; what is correct, finished and distinct is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeline.protocols import Sampler
from pipeline.rundir import RunPaths, StageContext, write_atomic
from pipeline.types import Problem, Reward, Rollout, StageResult, TrainSequence
from rewards.scoring import Scorer
from stages.reward import reward_metrics, score_rollouts
from stages.rollout import draw_problems, read_rollouts, rollout_metrics, sample_problems, training_params


def run(
    context: StageContext, sampler: Sampler, tokenizer: Any, scorer: Scorer, problems: Sequence[Problem]
) -> StageResult:
    """Sample training problems, score, and name the kept rollouts in ``stages/reject/kept.json``."""
    config = context.recipe.reject
    chosen = draw_problems(context, problems, config.problems)
    rollouts = sample_problems(
        context, sampler, tokenizer, chosen, samples=config.samples, purpose="reject", params=training_params(context)
    )
    rewards = score_rollouts(context, scorer, chosen, rollouts)
    kept = keep(rollouts, rewards, config.keep_per_problem)
    if len(kept) < config.min_kept:
        raise ValueError(
            f"reject: {len(kept)} of {len(rollouts)} completions were correct, finished and distinct, expected at least "
            f"reject.min_kept = {config.min_kept}; raise reject.problems or reject.samples, train longer, or lower it"
        )
    write_atomic(context.paths.stage(context.key) / "kept.json", json.dumps([r.rollout_id for r in kept]))
    problems_kept = len({r.problem_id for r in kept})
    return StageResult(
        context.key,
        outputs={"kept": f"stages/{context.key}/kept.json"},
        metrics={
            **rollout_metrics(rollouts), **reward_metrics(rewards), "kept": len(kept), "problems_kept": problems_kept,
        },
    )  # fmt: skip


def keep(rollouts: Sequence[Rollout], rewards: Sequence[Reward], per_problem: int) -> list[Rollout]:
    """Correct completions that ended by themselves, each text of a problem once, at most ``per_problem`` of a problem."""
    correct = {reward.rollout_id for reward in rewards if reward.correct}
    seen: dict[str, set[str]] = {}
    kept = []
    for rollout in rollouts:
        texts = seen.setdefault(rollout.problem_id, set())
        fresh = rollout.text not in texts and len(texts) < per_problem
        if rollout.rollout_id in correct and rollout.finish_reason == "stop" and fresh:
            texts.add(rollout.text)
            kept.append(rollout)
    return kept


def kept_pairs(paths: RunPaths) -> list[TrainSequence]:
    """The kept rollouts as SFT pairs, token for token as they were sampled."""
    owner = paths.owner("reject")
    if owner is None:
        raise FileNotFoundError(f"run {paths.run_id}: stage reject has not been completed")
    ids = set(json.loads((owner.stage("reject") / "kept.json").read_text(encoding="utf-8")))
    return [
        TrainSequence(r.rollout_id, r.group_id, r.prompt_token_ids, r.completion_token_ids)
        for r in read_rollouts(paths, "reject")
        if r.rollout_id in ids
    ]
