"""Reward model: the first one, from verifier-labelled rollouts of the warm start, and its refresh after each round."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.events import Event
from pipeline.protocols import Sampler
from pipeline.rundir import StageContext, step_key
from pipeline.seeds import derive_seed
from pipeline.types import Problem, Reward, Rollout, StageResult
from rewards.models import LabelledSequence, OutcomeRewardModel, choose_replay, measure, train_outcome_model
from rewards.scoring import Scorer
from rewards.watch import drift, summarise_learnt
from stages.checkpoint import new_checkpoint
from stages.reward import read_rewards, score_rollouts
from stages.rollout import draw_problems, read_rollouts, sample_problems, training_params

logger = logging.getLogger(__name__)


def run(
    context: StageContext, sampler: Sampler, tokenizer: Any, scorer: Scorer, problems: Sequence[Problem]
) -> StageResult:
    """Sample from the warm start, label by the verifier, train the scalar head on the warm start's backbone."""
    config = context.recipe.reward_model
    chosen = draw_problems(context, problems, config.problems)
    rollouts = sample_problems(
        context, sampler, tokenizer, chosen, samples=config.samples, purpose="reward_model",
        params=training_params(context),
    )  # fmt: skip
    rewards = score_rollouts(context, scorer, chosen, rollouts)
    train, heldout = split(context, labelled(rollouts, rewards))
    metrics = _train(context, "warm-start", train, name="reward-model-00")
    after = _measure(context, "reward-model-00", heldout)
    return StageResult(
        context.key,
        outputs={"checkpoint": "checkpoints/reward-model-00"},
        metrics={**metrics, "train": len(train), **{f"heldout/{k}": v for k, v in after.items()}},
    )


def refresh(context: StageContext, round_: int) -> dict[str, Any]:
    """Continual training on the round's rollouts with a replay of earlier ones (arXiv 2402.03300, Algorithm 1).

    Measured on rollouts of the round whose problems no reward model of this run was ever trained on, before and after.
    """
    steps = range(1, context.recipe.grpo.steps + 1)
    new, heldout = split(context, labelled_round(context, round_, steps))
    earlier: list[LabelledSequence] = labelled_stage(context, "reward_model", "reward_model")
    for past in range(1, round_):
        earlier += labelled_round(context, past, steps)
    earlier, _ = split(context, earlier)
    replay = choose_replay(new, earlier, context.recipe.reward_model.replay, context.seed("replay"))
    old, name = f"reward-model-{round_ - 1:02d}", f"reward-model-{round_:02d}"
    watched = watch(context, round_, steps)
    before = _measure(context, old, heldout)
    metrics = _train(context, old, [*new, *replay], name=name)
    after = _measure(context, name, heldout)
    return {
        **metrics, **watched, "new": len(new), "replayed": len(replay),
        **{f"before/{k}": v for k, v in before.items()}, **{f"after/{k}": v for k, v in after.items()},
    }  # fmt: skip


def watch(context: StageContext, round_: int, steps: Sequence[int]) -> dict[str, Any]:
    """How the model that paid in a round stood to the verifier in the first and the last third of its steps.

    Warns when the model's score rose while correctness fell: the policy then exploits it.
    """
    third = max(1, len(steps) // 3)
    first, last = (
        summarise_learnt([r for step in part for r in read_rewards(context.paths, f"{step_key(round_, step)}/reward")])
        for part in (steps[:third], steps[-third:])
    )
    warning = drift(first, last)
    if warning:
        logger.warning("round %d: %s", round_, warning)
        if context.tell:
            context.tell(Event("drift", "warning", warning))
    found = {f"{when}/{k}": v for when, part in (("first_third", first), ("last_third", last)) for k, v in part.items()}
    return {**found, "drift": warning or ""}


def labelled(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[LabelledSequence]:
    """Rollouts with the verifier's label; unscored ones are left out."""
    verdicts: Mapping[str, bool | None] = {reward.rollout_id: reward.correct for reward in rewards}
    return [
        LabelledSequence(r.prompt_token_ids, r.completion_token_ids, float(label), r.problem_id)
        for r in rollouts
        if (label := verdicts[r.rollout_id]) is not None
    ]


def labelled_stage(context: StageContext, rollout_key: str, reward_key: str) -> list[LabelledSequence]:
    """The labelled rollouts of one stage, from the store."""
    return labelled(read_rollouts(context.paths, rollout_key), read_rewards(context.paths, reward_key))


def labelled_round(context: StageContext, round_: int, steps: range) -> list[LabelledSequence]:
    """The labelled training rollouts of a whole round, from the store."""
    rows: list[LabelledSequence] = []
    for step in steps:
        rows += labelled_stage(context, f"{step_key(round_, step)}/rollout", f"{step_key(round_, step)}/reward")
    return rows


def split(
    context: StageContext, rows: Sequence[LabelledSequence]
) -> tuple[list[LabelledSequence], list[LabelledSequence]]:
    """Training and held-out rows, by a hash of the problem: the same problems are held out in every round."""
    heldout = {row.problem_id: is_heldout(context, row.problem_id) for row in rows}
    return [r for r in rows if not heldout[r.problem_id]], [r for r in rows if heldout[r.problem_id]]


def is_heldout(context: StageContext, problem_id: str) -> bool:
    """Whether rollouts of this problem measure the reward models of the run, and never train one."""
    share = context.recipe.reward_model.heldout_share
    return derive_seed(context.recipe.seed, "rm-heldout", problem_id) < share * 2**63


def _train(context: StageContext, start: str, rows: Sequence[LabelledSequence], *, name: str) -> dict[str, Any]:
    with new_checkpoint(context.paths, name) as partial:
        metrics = train_outcome_model(
            context.paths.find_checkpoint(start), rows, context.recipe.reward_model,
            seed=context.seed("train"), out=partial, progress=context.progress,
        )  # fmt: skip
    return {f"train/{k}": v for k, v in metrics.items()}


def _measure(context: StageContext, name: str, rows: Sequence[LabelledSequence]) -> dict[str, Any]:
    model = OutcomeRewardModel.load(context.paths.find_checkpoint(name))
    scores = model.score([(row.prompt_token_ids, row.completion_token_ids) for row in rows])
    return measure(scores, [row.label for row in rows], [row.problem_id for row in rows])
