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


class ObjectiveConfig(Section):
    """The loss of a GRPO-family update, each choice its own field."""

    algorithm: Literal["grpo", "rft", "online_rft", "dpo", "sft"] = "grpo"
    """Row of the unified paradigm (arXiv 2402.03300, Table 10)."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio a token (GRPO) or a sequence (GSPO)."""
    clip_low: float = Field(default=0.2, gt=0.0)
    """Ratios below 1 - clip_low get no further push down."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """Ratios above 1 + clip_high get no further push up (DAPO's clip-higher: 0.28)."""
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Mean over a sequence's tokens then over sequences (the paper), over all tokens of the step (DAPO), or over
    sequences of the sum divided by the configured maximum length (Dr. GRPO)."""
    kl_coefficient: float = Field(default=0.04, ge=0.0)
    """Weight of KL(policy || reference) in the loss; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The paper's is k3 (eq. 4)."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Filled in from ``sampler.temperature``: the learner's logits are divided by it too."""
    max_tokens: int = Field(default=128, ge=1)
    """Filled in from ``sampler.max_tokens``: the divisor of ``aggregation = "constant"``."""
    mask_truncated: bool = False
    """Leave completions that ended by length out of numerator and count alike."""


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
    """The loss."""
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
