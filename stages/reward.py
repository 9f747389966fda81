"""Reward: score recorded rollouts. Grading again never samples again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline import store
from pipeline.rundir import RunPaths, StageContext
from pipeline.types import Problem, Reward, Rollout, StageResult
from rewards.scoring import Scorer
from stages.rollout import read_rollouts


def run(context: StageContext, scorer: Scorer, problems: Sequence[Problem], rollout_key: str) -> StageResult:
    """Score the rollouts of ``rollout_key``."""
    rewards = score_rollouts(context, scorer, problems, read_rollouts(context.paths, rollout_key))
    faults = {f"fault/{name}": count for name, count in scorer.take_faults().items()}
    return StageResult(context.key, metrics={**reward_metrics(rewards), **faults})


def score_rollouts(
    context: StageContext, scorer: Scorer, problems: Sequence[Problem], rollouts: Sequence[Rollout]
) -> list[Reward]:
    """Record and return one reward a rollout, in order, under the stage's key."""
    if not store.has(context.paths, "rewards", context.key):
        scored = scorer.score({p.problem_id: p for p in problems}, rollouts, context.progress)
        for event in scorer.take_events():
            if context.tell:
                context.tell(event)
        store.append(context.paths, "rewards", context.key, scored)
    return read_rewards(context.paths, context.key)


def read_rewards(paths: RunPaths, key: str) -> list[Reward]:
    """The recorded rewards of a stage, in the order of its rollouts."""
    rows = store.read(paths, "rewards", key).to_pylist()
    return [Reward(**{**row, "components": dict(row["components"])}) for row in rows]


def reward_metrics(rewards: Sequence[Reward]) -> dict[str, Any]:
    """Means over scored rollouts, and the counts of those that are not."""
    scored = [r for r in rewards if r.reward is not None]
    judged = [r for r in rewards if r.correct is not None]
    metrics: dict[str, Any] = {
        "reward": _mean([r.reward for r in scored if r.reward is not None]),
        "correct": _mean([float(r.correct) for r in judged if r.correct is not None]),
        "unscored": len(rewards) - len(scored),
    }
    for name in sorted({name for r in rewards for name in r.components}):
        metrics[f"reward/{name}"] = _mean([v for r in rewards if (v := r.components.get(name)) is not None])
    for status in sorted({r.status for r in rewards}):
        metrics[f"status/{status}"] = sum(r.status == status for r in rewards)
    return metrics


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
