"""Update: recorded rollouts and rewards become optimizer steps. The same function replays a step after a crash."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline import store
from pipeline.advantages import (
    Advantages,
    correctness_indicator,
    outcome_advantages,
    preference_signs,
    process_advantages,
)
from pipeline.config import GRPOConfig
from pipeline.protocols import Learner, NotFinite
from pipeline.rows import update_row
from pipeline.rundir import StageContext, read_result, step_key
from pipeline.types import Reward, Rollout, StageResult, TrainSequence
from stages.reward import read_rewards
from stages.rollout import read_rollouts


def run(context: StageContext, learner: Learner, round_: int, step: int) -> StageResult:
    """Advantages, then ``epochs`` passes of ``minibatches`` optimizer steps; rows already recorded are kept as they are.

    A pure function of the recorded rows, the learner's state and (seed, round, step): run on the state that the step
    started from, it ends in the same weights bit for bit, which is what makes rollouts the write-ahead log of training.
    Raises NotFinite, with the failed optimizer step recorded too, when a gradient is no number.
    """
    rollouts = read_rollouts(context.paths, f"{step_key(round_, step)}/rollout")
    rewards = read_rewards(context.paths, f"{step_key(round_, step)}/reward")
    if not rollouts or len(rewards) != len(rollouts):
        raise ValueError(
            f"{context.key}: {len(rollouts)} rollouts and {len(rewards)} rewards of its step are recorded, so a file of "
            f"the tables is gone; put it back, or branch off with --resume-from {step_key(round_, step)}/rollout"
        )
    sequences, rows, zero_share = credit(context, rollouts, rewards)
    if not store.has(context.paths, "advantages", context.key):
        store.append(context.paths, "advantages", context.key, rows)
    updates, broken = _optimize(context, learner, sequences, round_, step)
    for update in updates:
        update["zero_variance_share"] = zero_share
    if not store.has(context.paths, "updates", context.key):
        rows = [update_row(context.paths.run_id, context.key, round_, step, update) for update in updates]
        store.append(context.paths, "updates", context.key, rows)
    if broken is not None:
        raise broken
    return StageResult(context.key, metrics=mean_metrics(updates))


def credit(
    context: StageContext, rollouts: Sequence[Rollout], rewards: Sequence[Reward]
) -> tuple[list[TrainSequence], list[dict[str, Any]], float]:
    """Training sequences with their advantages, the rows of the advantages table, and the zero-variance share."""
    config = context.recipe.grpo.advantages
    by_id = {reward.rollout_id: reward for reward in rewards}
    ordered = [by_id[rollout.rollout_id] for rollout in rollouts]
    groups = [rollout.group_id for rollout in rollouts]
    result = weigh(ordered, groups, context.recipe.grpo)
    lengths = [len(r.completion_token_ids) for r in rollouts]
    if config.supervision == "process":
        tokens = process_advantages(
            [r.step_rewards for r in ordered], [r.step_ends for r in ordered], lengths, groups, config
        )
    else:
        tokens = [np.full(n, v, dtype=np.float32) for n, v in zip(lengths, result.values, strict=True)]
    sequences, rows = [], []
    for i, (rollout, advantages) in enumerate(zip(rollouts, tokens, strict=True)):
        process = advantages.tolist() if config.supervision == "process" else None
        rows.append({
            "rollout_id": rollout.rollout_id, "advantage": float(result.values[i]) if result.scored[i] else None,
            "group_mean": float(result.group_mean[i]), "group_std": float(result.group_std[i]),
            "zero_variance": bool(result.zero_variance[i]), "token_advantages": process,
        })  # fmt: skip
        if result.scored[i]:
            sequences.append(_sequence(rollout, advantages))
    flags = {group: bool(zero) for group, zero in zip(groups, result.zero_variance, strict=True)}
    return sequences, rows, sum(flags.values()) / max(1, len(flags))


def weigh(rewards: Sequence[Reward], groups: Sequence[str], config: GRPOConfig) -> Advantages:
    """What each completion's log-likelihood is weighed with, by algorithm (arXiv 2402.03300, Table 10).

    GRPO: the group-relative advantage. RFT and Online RFT: 1 for a correct completion, else 0, whatever its group.
    DPO: +1 for the chosen and -1 for the rejected of each pair.
    """
    result = outcome_advantages([r.reward for r in rewards], groups, config.advantages)
    verdicts = [r.correct for r in rewards]
    if config.objective.algorithm in ("rft", "online_rft"):
        # A group of correct completions has equal rewards and still teaches.
        return replace(
            result, values=correctness_indicator(verdicts), zero_variance=np.zeros(len(verdicts), dtype=bool)
        )
    if config.objective.algorithm == "dpo":
        return replace(result, values=preference_signs(verdicts, groups))
    return result


def grpo_lr(context: StageContext, round_: int, step: int) -> float:
    """The learning rate of a step: linear warmup over all rounds, then constant or cosine to a tenth."""
    config = context.recipe.grpo
    done = (round_ - 1) * config.steps + step - 1
    return scheduled_lr(config.lr, done, config.rounds * config.steps, config.warmup_steps, config.schedule)


def scheduled_lr(peak: float, done: int, total: int, warmup: int, schedule: str) -> float:
    """Learning rate of the step after ``done`` steps: (done + 1)/warmup of the peak, then flat or cosine to 0.1 peak."""
    if done < warmup:
        return peak * (done + 1) / warmup
    if schedule == "constant":
        return peak
    share = (done - warmup) / max(1, total - warmup)
    return peak * (0.1 + 0.45 * (1 + float(np.cos(np.pi * min(1.0, share)))))


def carried(context: StageContext, round_: int, step: int) -> dict[str, Any]:
    """What guards have done up to this step, as the update before it recorded: nothing, or ``lr_scale`` and ``times_back``.

    ``lr_scale`` is the share of the scheduled learning rate that is left.
    """
    steps = context.recipe.grpo.steps
    before = (round_ - 1) * steps + step - 1
    result = read_result(context.paths, update_key(before, steps)) if before else None
    return {name: result.metrics[name] for name in ("lr_scale", "times_back") if result and name in result.metrics}


def update_key(updates: int, steps: int) -> str:
    """Stage key of update number ``updates`` (from 1, over all rounds), in rounds of ``steps``."""
    round_, step = divmod(updates - 1, steps)
    return f"{step_key(round_ + 1, step + 1)}/update"


def mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Each metric's mean over the step's optimizer steps; maxima stay maxima, tokens and seconds add up."""
    merged: dict[str, Any] = {}
    for name in sorted({name for update in updates for name in update}):
        values = [update[name] for update in updates if name in update]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name.startswith("seconds") or name == "tokens":
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def _optimize(
    context: StageContext, learner: Learner, sequences: list[TrainSequence], round_: int, step: int
) -> tuple[list[dict[str, float]], NotFinite | None]:
    """The metrics of every optimizer step, and the error of the one that failed, which is the last one."""
    config = context.recipe.grpo
    objective = config.objective
    lr = grpo_lr(context, round_, step) * carried(context, round_, step).get("lr_scale", 1.0)
    if objective.needs_reference:
        references = learner.reference_logprobs(sequences, objective.temperature)
        sequences = [replace(s, ref_logprobs=r) for s, r in zip(sequences, references, strict=True)]
    if config.epochs * config.minibatches > 1:
        # On-policy with one update the learner takes the detached current logprobs instead: no second forward.
        old = learner.logprobs(sequences, objective.temperature)
        sequences = [replace(s, old_logprobs=o) for s, o in zip(sequences, old, strict=True)]
    updates: list[dict[str, float]] = []
    for epoch in range(config.epochs):
        for number, batch in enumerate(_minibatches(context, sequences, round_, step, epoch)):
            if context.progress:
                context.progress(epoch * config.minibatches + number, config.epochs * config.minibatches, "")
            place = {"epoch": epoch, "minibatch": number}
            try:
                updates.append({**learner.step(batch, objective, lr), **place})
            except NotFinite as error:
                return [*updates, {"grad_norm": error.value, "lr": lr, **place}], error
    return updates, None


def _minibatches(
    context: StageContext, sequences: list[TrainSequence], round_: int, step: int, epoch: int
) -> list[list[TrainSequence]]:
    """Whole groups, dealt out in an order drawn from (seed, round, step, epoch)."""
    count = context.recipe.grpo.minibatches
    groups: dict[str, list[TrainSequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.group_id, []).append(sequence)
    order = list(groups)
    if count > 1:
        random.Random(context.seed("minibatches", round_, step, epoch)).shuffle(order)
    dealt = [[s for group in order[i::count] for s in groups[group]] for i in range(count)]
    return [batch for batch in dealt if batch]


def _sequence(rollout: Rollout, advantages: np.ndarray) -> TrainSequence:
    return TrainSequence(
        sequence_id=rollout.rollout_id,
        group_id=rollout.group_id,
        prompt_token_ids=rollout.prompt_token_ids,
        completion_token_ids=rollout.completion_token_ids,
        advantages=advantages,
        sampling_logprobs=np.asarray(rollout.sampling_logprobs, dtype=np.float32),
        truncated=rollout.finish_reason == "length",
    )
