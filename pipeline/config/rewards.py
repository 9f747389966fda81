"""What a completion is paid for, and the reward model."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.section import Section


class RewardConfig(Section):
    """The reward is the weighted sum of named components; each is stored unweighted."""

    weights: dict[str, float] = Field(default_factory=lambda: {"verifier": 1.0, "format": 0.1, "reward_model": 0.2})
    """Component to weight. Built in: verifier, format, reward_model, length, repetition, code …"""
    functions: dict[str, str] = Field(default_factory=dict)
    """Your own components: name to "module:function", called with (problem, completion_text)."""
    workers: int = Field(default=1, ge=1)
    """Verifier processes."""
    timeout: float = Field(default=5.0, gt=0.0)
    """Seconds for one verdict; then the worker is killed and the completion is unscored."""
    memory_mb: int = Field(default=2048, ge=256)
    """Address space of a worker, in MiB."""
    max_unscored: float = Field(default=0.5, ge=0.0, le=1.0)
    """Stop when more than this share of a step's rollouts is unscored."""


class RewardModelConfig(Section):
    """The outcome reward model: a scalar head on the policy's backbone, trained on verifier labels."""

    problems: int = Field(default=200, ge=2)
    """Training problems whose rollouts, labelled by the verifier, train the first model."""
    samples: int = Field(default=8, ge=1)
    """Completions a problem."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the labelled rollouts."""
    batch_size: int = Field(default=64, ge=1)
    """Rollouts in an optimizer step."""
    lr: float = Field(default=3e-4, gt=0.0)
    """Learning rate (the paper: 2e-5 at 7B)."""
    replay: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of earlier rollouts mixed into each refresh (the paper: 10 %)."""
    heldout_share: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of problems whose rollouts are kept out of training, to measure the model."""
