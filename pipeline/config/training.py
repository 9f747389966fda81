"""Supervised fine-tuning, the GRPO rounds and their objective, rejection sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.section import Section


class SFTConfig(Section):
    """Supervised fine-tuning on prompt and solution pairs, loss on the solution only."""

    steps: int = Field(default=700, ge=0)
    """Optimizer steps; 0 leaves the policy as it is."""
    batch_size: int = Field(default=64, ge=1)
    """Pairs in an optimizer step."""
    lr: float = Field(default=1e-3, gt=0.0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=20, ge=0)
    """Linear warmup from 0."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """After the warmup: stay, or fall to a tenth along a cosine."""
    checkpoint_every: int = Field(default=200, ge=1)
    """Steps between checkpoints inside the stage, from which it goes on when it is cut off; they go when it ends."""


class ObjectiveConfig(Section):
    """The loss of a GRPO-family update, each choice its own field."""

    algorithm: Literal["grpo", "rft", "online_rft", "dpo", "sft"] = "grpo"
    """Row of the unified paradigm (arXiv 2402.03300, Table 10)."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio a token (GRPO) or a sequence (GSPO, arXiv 2507.18071: exp of the mean log ratio)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """"clip" takes the smaller of the plain and the clipped term; "cispo" (arXiv 2506.13585) weighs logprobs with the
    ratio, capped at 1 + clip_high and without gradient, so that no token loses its gradient."""
    clip_low: float = Field(default=0.2, gt=0.0)
    """Ratios below 1 - clip_low get no further push down."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """Ratios above 1 + clip_high get no further push up (DAPO's clip-higher: 0.28)."""
    delta: float | None = Field(default=None, gt=1.0)
    """Second bound: ratios count as at most this where the advantage is negative (INTELLECT-2); None is off."""
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Mean over a sequence's tokens then over sequences (the paper), over all tokens of the step (DAPO), or over
    sequences of the sum divided by the configured maximum length (Dr. GRPO)."""
    kl_coefficient: float = Field(default=0.04, ge=0.0)
    """Weight of KL(policy || reference) in the loss; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The paper's is k3 (eq. 4): e^d - d - 1 with d = ref - logprob; k1 is -d; k2 is d^2 / 2."""
    kl_weighted: bool = False
    """Multiply the KL estimate by the importance ratio, which keeps it right off-policy (TRL's default)."""
    mismatch: Literal["none", "token_truncate", "token_mask", "sequence_mask"] = "none"
    """Correction for a sampler whose logprobs differ from the learner's, by w = exp(old - sampling): weigh tokens with
    min(w, mismatch_max) (TIS), with w inside [mismatch_min, mismatch_max] and 0 outside, or drop whole completions
    whose w, of the mean log difference, is outside."""
    mismatch_max: float = Field(default=2.0, gt=1.0)
    """Upper bound of the mismatch weight."""
    mismatch_min: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Lower bound of the mismatch weight in the two masking forms."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Filled in from ``sampler.temperature``: the learner's logits are divided by it too."""
    max_tokens: int = Field(default=128, ge=1)
    """Filled in from ``sampler.max_tokens``: the divisor of ``aggregation = "constant"``."""
    mask_truncated: bool = False
    """Leave completions that ended by length out of numerator and count alike."""
    dpo_beta: float = Field(default=0.1, gt=0.0)
    """DPO: how sharply a pair is told apart; larger stays closer to the reference."""
    dpo_length_average: bool = True
    """DPO: logprobs averaged over a completion (arXiv 2402.03300, eq. 12), or summed (arXiv 2305.18290)."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference policy's logprobs."""
        return self.algorithm == "dpo" or (self.algorithm == "grpo" and self.kl_coefficient > 0)


class AdvantageConfig(Section):
    """How rewards become advantages."""

    supervision: Literal["outcome", "process"] = "outcome"
    """One reward a completion, or one a step of it (arXiv 2402.03300, 4.1.2 and 4.1.3)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divide by the group's standard deviation (the paper), by the step's, or not at all (Dr. GRPO)."""
    ddof: Literal[0, 1] = 0
    """Degrees of freedom taken off in the standard deviation; 0 is numpy's, 1 is torch's default."""
    epsilon: float = Field(default=1e-6, ge=0.0)
    """Added to the standard deviation."""


class GRPOConfig(Section):
    """I rounds of M steps (arXiv 2402.03300, Algorithm 1)."""

    rounds: int = Field(default=2, ge=1)
    """I: the reference policy and the reward model are refreshed once a round."""
    steps: int = Field(default=20, ge=1)
    """M: explorations in a round."""
    problems_per_step: int = Field(default=32, ge=1)
    """P: problems drawn for a step."""
    group_size: int = Field(default=8, ge=2)
    """G: completions a problem; advantages need at least 2."""
    epochs: int = Field(default=1, ge=1)
    """mu: passes over a step's rollouts."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps a pass; 1 with one epoch is on-policy: the ratio is 1 and nothing is clipped."""
    lr: float = Field(default=1e-4, gt=0.0)
    """Learning rate after the warmup."""
    warmup_steps: int = Field(default=10, ge=0)
    """Linear warmup, counted over all rounds."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warmup, over all rounds."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss. ``grpo.preset``, "paper" or "modern", stands for all its fields and those of grpo.advantages."""
    advantages: AdvantageConfig = AdvantageConfig()
    """Rewards to advantages."""


class RejectConfig(Section):
    """Rejection sampling: the training set of the regeneration."""

    problems: int = Field(default=1000, ge=1)
    """Training problems put to the policy, drawn by seed."""
    samples: int = Field(default=4, ge=1)
    """Completions a problem."""
    keep_per_problem: int = Field(default=2, ge=1)
    """Distinct correct, finished completions kept of a problem."""
    min_kept: int = Field(default=16, ge=1)
    """Fewer kept pairs stop the run: the regenerated policy would be trained on almost nothing."""


class RegenerateConfig(SFTConfig):
    """SFT on the rejection-sampled set."""

    start: Literal["base", "policy"] = "base"
    """From the base checkpoint (DeepSeek-R1) or from the policy that wrote the set."""
