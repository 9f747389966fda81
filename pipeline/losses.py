"""The GRPO family's loss on flat token tensors: pure, float32 at least, returns sums and counts, never means.

A token tensor is [N]: the completion tokens of B sequences one after the other, so no pad token exists. The learner
divides the sums by ``loss_count`` of the whole optimizer step. SFT, RFT and DPO are in ``losses_unified``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config.training import ObjectiveConfig

LOG_LIMIT = 60.0
"""Log ratios are held inside +-60 nats before exp: e^60 is finite in float32, and its gradient is 0 beyond."""
WEIGHTED_LIMIT = 80.0
"""The same for ratio x KL: e^60 x e^60 is not finite in float32, e^80 is."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Completion tokens of a micro-batch. All [N] but ``lengths`` [B] and ``pairs`` [K, 2].

    ``sequence`` says which of the B sequences a token is of; ``mask`` False leaves it out. ``old_logprobs`` None means
    on-policy: the current ones, detached. ``entropy`` carries no gradient. ``pairs`` (chosen, rejected) is for DPO.
    """

    logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    lengths: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    sampling_logprobs: Tensor | None = None
    pairs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSums:
    """``loss`` (with gradient) is to be divided by ``loss_count`` of the step. ``sums`` and ``maxima`` are metrics."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def loss_count(lengths: Sequence[int], truncated: Sequence[bool], objective: ObjectiveConfig) -> float:
    """What the summed loss of a whole optimizer step is divided by; computed from lengths alone, before any forward.

    sequence_mean: sequences (arXiv 2402.03300, eq. 3: mean over outputs of the mean over tokens); token_mean: tokens
    (DAPO, arXiv 2503.14476, eq. 8); constant: sequences x ``objective.max_tokens`` (Dr. GRPO, arXiv 2503.20783).
    With ``mask_truncated``, truncated sequences are in neither numerator nor count. SFT always counts tokens.
    Example: lengths 2 and 6, max_tokens 8: 2, 8 and 16.
    """
    used = [n for n, cut in zip(lengths, truncated, strict=True) if not (cut and objective.mask_truncated)]
    if objective.algorithm == "sft" or objective.aggregation == "token_mean":
        return float(max(1, sum(used)))
    if objective.aggregation == "sequence_mean":
        return float(max(1, len(used)))
    return float(max(1, len(used) * objective.max_tokens))


def grpo_loss(inputs: LossInputs, objective: ObjectiveConfig) -> LossSums:
    """Sum of  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) w + kl_coefficient KL  over tokens.

    r = exp(logprob - old) a token, or exp of its mean over the sequence; w is the mismatch weight; with ``delta`` the
    plain r is at most delta; with the "cispo" surrogate the first term is -sg(min(r, 1 + clip_high)) A logprob.
    Source: arXiv 2402.03300, eq. 3 and 4. On-policy (r = 1, one update) the gradient of a token is
    -(A + kl_coefficient (pi_ref / pi - 1)) grad logprob (eq. 21).

    Example: one sequence of two tokens, r = (1.5, 0.5), A = 1, clip 0.2, no KL: -min(1.5, 1.2) - min(0.5, 0.8) = -1.7,
    divided by its length 2 under sequence_mean: -0.85.
    """
    logprobs = masked(inputs.logprobs, inputs.mask)
    old = logprobs.detach() if inputs.old_logprobs is None else masked(inputs.old_logprobs, inputs.mask)
    log_ratio = logprobs - old
    if objective.ratio == "sequence":
        log_ratio = sequence_means(log_ratio, inputs)[inputs.sequence]
    ratio = _exp(log_ratio)
    policy = _surrogate(ratio, logprobs, masked(inputs.advantages, inputs.mask), objective)
    weight = mismatch_weights(old.detach(), inputs, objective)
    if weight is not None:
        policy = policy * weight
    total, sums = policy, {"policy_loss": aggregate(policy, inputs, objective).detach()}
    if objective.kl_coefficient > 0:
        reference = masked(required(inputs.ref_logprobs, "ref_logprobs"), inputs.mask)
        kl = kl_estimate(logprobs, reference, objective)
        if objective.kl_weighted:
            room = WEIGHTED_LIMIT - (reference - logprobs).detach().clamp(0, LOG_LIMIT)
            kl = kl * _exp(torch.minimum(log_ratio, room))
        total = policy + objective.kl_coefficient * kl
        sums["kl"] = _sum(kl, inputs.mask)
    loss = aggregate(total, inputs, objective)
    return LossSums(loss, sums | _ratio_sums(ratio, inputs, objective), {"ratio_max": _max(ratio, inputs.mask)})


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, objective: ObjectiveConfig) -> Tensor:
    """[N] estimates of KL(policy || reference), nats (Schulman, http://joschu.net/blog/kl-approx.html).

    With d = ref - logprob: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1 (arXiv 2402.03300, eq. 4). As a loss, k2's gradient
    is that of the true KL on-policy, k3's is its first-order match; k1's is zero on average (it only adds noise) unless
    ``kl_weighted``. Example: d = ln 2: k1 -0.693, k2 0.240, k3 2 - 0.693 - 1 = 0.307.
    """
    difference = ref_logprobs - logprobs
    if objective.kl_estimator == "k1":
        return -difference
    if objective.kl_estimator == "k2":
        return 0.5 * difference.square()
    # expm1: near the reference d^2 / 2 would drown in the rounding of e^d - 1.
    return torch.expm1(difference.clamp(-LOG_LIMIT, LOG_LIMIT)) - difference


def mismatch_weights(old_logprobs: Tensor, inputs: LossInputs, objective: ObjectiveConfig) -> Tensor | None:
    """[N] weights for exp(old - sampling), or None when the correction is off; no gradient.

    token_truncate: min(w, max) (TIS); token_mask: w inside [min, max], else 0; sequence_mask: 1 for completions whose
    exp(mean log w) is inside, else 0 - averaged in log space, so that length alone neither explodes nor hides it.
    """
    if objective.mismatch == "none":
        return None
    sampling = masked(required(inputs.sampling_logprobs, "sampling_logprobs"), inputs.mask)
    difference = old_logprobs - sampling
    if objective.mismatch == "token_truncate":
        return _exp(difference).clamp(max=objective.mismatch_max)
    if objective.mismatch == "sequence_mask":
        weight = _exp(sequence_means(difference, inputs))
        return _inside(weight, objective).to(difference.dtype)[inputs.sequence]
    weight = _exp(difference)
    return torch.where(_inside(weight, objective), weight, torch.zeros_like(weight))


def aggregate(per_token: Tensor, inputs: LossInputs, objective: ObjectiveConfig) -> Tensor:
    """Sum over tokens, each divided by its sequence's length under sequence_mean; masked tokens count nothing."""
    per_token = torch.where(inputs.mask, per_token, torch.zeros_like(per_token))
    if objective.aggregation == "sequence_mean":
        per_token = per_token / inputs.lengths.clamp(min=1)[inputs.sequence].to(per_token.dtype)
    return per_token.sum()


def sequence_sums(per_token: Tensor, inputs: LossInputs) -> Tensor:
    """[B]: sums over each sequence's unmasked tokens."""
    kept = torch.where(inputs.mask, per_token, torch.zeros_like(per_token))
    return torch.zeros(len(inputs.lengths), dtype=kept.dtype, device=kept.device).index_add(0, inputs.sequence, kept)


def sequence_means(per_token: Tensor, inputs: LossInputs) -> Tensor:
    """[B]: means over each sequence's tokens; 0 for an empty one."""
    return sequence_sums(per_token, inputs) / inputs.lengths.clamp(min=1).to(per_token.dtype)


def token_sums(inputs: LossInputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Metrics that every objective has: (sums, maxima) of tokens, entropy, |sampling - learner|, and ESS moments."""
    mask, logprobs = inputs.mask, inputs.logprobs.detach()
    sums = {"tokens": mask.sum().to(logprobs.dtype)}
    if inputs.entropy is not None:
        sums["entropy"] = _sum(inputs.entropy, mask)
    if inputs.sampling_logprobs is None:
        return sums, {}
    difference = masked(logprobs, mask) - masked(inputs.sampling_logprobs, mask)
    weight = torch.where(mask, _exp(difference), torch.zeros_like(difference)).double()
    sums |= {"gap": _sum(difference.abs(), mask), "weight": weight.sum(), "weight_square": weight.square().sum()}
    return sums, {"logprob_gap_max": _max(difference.abs(), mask)}


def _surrogate(ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: ObjectiveConfig) -> Tensor:
    if objective.surrogate == "cispo":
        return -ratio.detach().clamp(max=1 + objective.clip_high) * advantages * logprobs
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    bounded = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    return -torch.minimum(bounded * advantages, clipped * advantages)


def _ratio_sums(ratio: Tensor, inputs: LossInputs, objective: ObjectiveConfig) -> dict[str, Tensor]:
    ratio, advantages = ratio.detach(), inputs.advantages
    low = (ratio < 1 - objective.clip_low) & (advantages < 0) & (objective.surrogate == "clip")
    high = (ratio > 1 + objective.clip_high) & ((advantages > 0) | (objective.surrogate == "cispo"))
    return {
        "ratio_mean": _sum(ratio, inputs.mask),
        "clip_low": (low & inputs.mask).sum().to(ratio.dtype),
        "clip_high": (high & inputs.mask).sum().to(ratio.dtype),
    }


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values with 0 at masked positions, before any exp: 0 x inf would be nan, in the gradient too."""
    return torch.where(mask, values, torch.zeros_like(values))


def _exp(log_values: Tensor) -> Tensor:
    return log_values.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def _inside(weight: Tensor, objective: ObjectiveConfig) -> Tensor:
    return (weight >= objective.mismatch_min) & (weight <= objective.mismatch_max)


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), torch.zeros_like(values)).sum()


def _max(values: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, values.detach(), torch.zeros_like(values))
    return kept.max() if kept.numel() else kept.new_zeros(())


def required(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"the objective needs {name} but the sequences carry none: fill TrainSequence.{name} in first")
    return values
