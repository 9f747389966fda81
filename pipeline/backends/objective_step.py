"""One optimizer step's worth of loss and gradient, whatever backend holds the weights: what to run, count and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipeline.batching import Layout, TokenBatch, micro_batches, pack, preference_pairs
from pipeline.config import ObjectiveConfig
from pipeline.losses import LossInputs, loss_count
from pipeline.losses_unified import objective_loss
from pipeline.types import TrainSequence

Forward = Callable[[TokenBatch, float], tuple[Tensor, Tensor]]
"""(logprobs [N], entropy [N]) of a micro-batch at a temperature."""
ARRAYS = ("advantages", "sampling_logprobs", "old_logprobs", "ref_logprobs")
PER_TOKEN = ("kl", "entropy", "ratio_mean", "clip_low", "clip_high")


@dataclass(slots=True)
class StepSums:
    """Sums and maxima over micro-batches, kept as tensors so that a GPU is never waited for."""

    loss: Tensor | float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    input_tokens: int = 0

    def add(self, loss: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor], input_tokens: int) -> None:
        self.loss = self.loss + loss
        self.input_tokens += input_tokens
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def join(self, other: StepSums) -> None:
        self.add(torch.as_tensor(other.loss), other.sums, other.maxima, other.input_tokens)

    def plain(self) -> PlainSums:
        """The same as numbers."""
        return PlainSums(
            float(self.loss),
            {name: float(value) for name, value in self.sums.items()},
            {name: float(value) for name, value in self.maxima.items()},
            self.input_tokens,
        )


@dataclass(frozen=True, slots=True)
class PlainSums:
    """``StepSums`` as numbers, which can travel between processes and be joined."""

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]
    input_tokens: int


def join_sums(parts: Sequence[PlainSums]) -> PlainSums:
    """The sums of a step whose micro-batches were run in several processes."""
    names = sorted({name for part in parts for name in part.sums})
    largest = sorted({name for part in parts for name in part.maxima})
    return PlainSums(
        sum(part.loss for part in parts),
        {name: sum(part.sums.get(name, 0.0) for part in parts) for name in names},
        {name: max(part.maxima[name] for part in parts if name in part.maxima) for name in largest},
        sum(part.input_tokens for part in parts),
    )


def step_count(sequences: Sequence[TrainSequence], objective: ObjectiveConfig) -> float:
    """What the summed loss of the whole optimizer step is divided by: see ``loss_count``; pairs for DPO."""
    if objective.algorithm == "dpo":
        kept = [i for i, s in enumerate(sequences) if not (s.truncated and objective.mask_truncated)]
        return float(max(1, len(preference_pairs(sequences, kept))))
    lengths = [len(s.completion_token_ids) for s in sequences]
    return loss_count(lengths, [s.truncated for s in sequences], objective)


def active_members(sequences: Sequence[TrainSequence], objective: ObjectiveConfig) -> list[int]:
    """Indices of the sequences that can change the gradient; the others are counted but never run.

    Left out: empty completions, truncated ones under ``mask_truncated``, and those with no advantage anywhere when no
    other term (the KL) needs them. Their loss and gradient are exactly 0.
    """
    silent = objective.algorithm in {"rft", "online_rft", "dpo"} or (
        objective.algorithm == "grpo" and objective.kl_coefficient == 0
    )
    members = []
    for i, s in enumerate(sequences):
        masked = s.truncated and objective.mask_truncated
        if len(s.completion_token_ids) and not masked and not (silent and not np.any(s.advantages)):
            members.append(i)
    return members


def plan_batches(
    sequences: Sequence[TrainSequence], members: Sequence[int], objective: ObjectiveConfig, layout: Layout, budget: int
) -> list[list[int]]:
    """The step's micro-batches, as indices into ``sequences``; DPO's pairs stay together."""
    return micro_batches(sequences, members, budget, layout=layout, by_group=objective.algorithm == "dpo")


def accumulate(
    forward: Forward,
    backward: Callable[[Tensor], None],
    sequences: Sequence[TrainSequence],
    batches: Sequence[Sequence[int]],
    objective: ObjectiveConfig,
    *,
    count: float,
    layout: Layout,
    device: torch.device,
) -> StepSums:
    """Run the micro-batches; ``backward`` is given each one's share of the step's loss."""
    total = StepSums()
    for members in batches:
        batch = pack(sequences, members, layout=layout)
        logprobs, entropy = forward(batch, objective.temperature)
        result = objective_loss(loss_inputs(sequences, batch, logprobs, entropy, objective, device), objective)
        backward(result.loss / count)
        total.add(result.loss.detach(), result.sums, result.maxima, batch.input_ids.size)
    return total


def loss_inputs(
    sequences: Sequence[TrainSequence],
    batch: TokenBatch,
    logprobs: Tensor,
    entropy: Tensor,
    objective: ObjectiveConfig,
    device: torch.device,
) -> LossInputs:
    """``LossInputs`` of a micro-batch: the sequences' arrays laid end to end, in the logprobs' dtype."""
    chosen = [sequences[i] for i in batch.members]

    def flat(name: str) -> Tensor | None:
        values = [getattr(s, name) for s in chosen]
        if any(value is None for value in values):
            return None
        return torch.as_tensor(np.concatenate(values), device=device).to(logprobs.dtype)

    advantages = flat("advantages")
    if advantages is None:  # SFT
        advantages = torch.ones_like(logprobs)
    dpo = objective.algorithm == "dpo"
    return LossInputs(
        logprobs=logprobs,
        advantages=advantages,
        sequence=torch.as_tensor(batch.sequence, device=device),
        lengths=torch.as_tensor(batch.lengths, device=device),
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        entropy=entropy,
        old_logprobs=flat("old_logprobs"),
        ref_logprobs=flat("ref_logprobs"),
        sampling_logprobs=flat("sampling_logprobs"),
        pairs=torch.as_tensor(preference_pairs(sequences, batch.members.tolist()), device=device) if dpo else None,
    )


def check_arrays(sequences: Sequence[TrainSequence], objective: ObjectiveConfig) -> None:
    """ValueError for a sequence that lacks an array the objective needs, or has one of another length than its tokens."""
    needed = set() if objective.algorithm == "sft" else {"advantages"}
    if objective.needs_reference:
        needed.add("ref_logprobs")
    if objective.algorithm == "grpo" and objective.mismatch != "none":
        needed.add("sampling_logprobs")
    for sequence in sequences:
        for name in ARRAYS:
            value = getattr(sequence, name)
            if value is None and name in needed:
                raise ValueError(
                    f"sequence {sequence.sequence_id!r} has no {name}, which the objective "
                    f"(algorithm {objective.algorithm!r}) needs: fill TrainSequence.{name} in first"
                )
            if value is not None and len(value) != len(sequence.completion_token_ids):
                raise ValueError(
                    f"sequence {sequence.sequence_id!r}: {len(value)} {name} for "
                    f"{len(sequence.completion_token_ids)} completion tokens: expected one a token"
                )


def step_metrics(
    total: PlainSums,
    sequences: Sequence[TrainSequence],
    members: Sequence[int],
    objective: ObjectiveConfig,
    count: float,
) -> dict[str, float]:
    """The step's metrics as plain numbers; averages are over the tokens that were run, the loss over all that count."""
    used = [s for s in sequences if not (s.truncated and objective.mask_truncated)]
    sums = total.sums
    run = sums.get("tokens", 0.0)
    metrics = {
        "loss": total.loss / count,
        "policy_loss": sums.get("policy_loss", 0.0) / count,
        "tokens": float(sum(len(s.completion_token_ids) for s in used)),
        "sequences": float(len(used)),
        "truncated_share": sum(s.truncated for s in sequences) / max(1, len(sequences)),
        "input_tokens": float(total.input_tokens),
        "skipped_sequences": float(len(used) - len(members)),
    }
    metrics |= {name: sums[name] / run for name in PER_TOKEN if name in sums and run}
    if "gap" in sums and run:
        metrics["logprob_gap_mean"] = sums["gap"] / run
        metrics["ess"] = sums["weight"] ** 2 / (run * sums["weight_square"]) if sums["weight_square"] else 0.0
    for name in ("dpo_margin", "dpo_accuracy"):
        if name in sums:
            metrics[name] = sums[name] / count
    return metrics | total.maxima
