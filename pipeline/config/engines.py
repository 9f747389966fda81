"""The engines: what samples and what learns, and on how many devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.section import Section


class SamplerConfig(Section):
    """Generation of completions."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """"transformers" shares the learner's weights in one process; "vllm" runs in child processes."""
    temperature: float = Field(default=1.0, gt=0.0, le=5.0)
    """Of training rollouts; logits are divided by it before the softmax, in sampler, learner and reference alike."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus share of training rollouts."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Drop tokens less likely than this share of the likeliest one; 0 is off."""
    max_tokens: int = Field(default=128, ge=1)
    """Longest completion, in tokens; longer ones are truncated and say so."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    cache_tokens: int = Field(default=65536, ge=64)
    """Token slots of the transformers sampler's key/value cache: bounds how many completions run side by side."""
    sync_tolerance: float = Field(default=1e-3, gt=0.0)
    """Largest |sampler - learner| logprob of the probe prompt after a weight sync, in nats; above it the run stops."""


class LearnerConfig(Section):
    """Gradient steps."""

    backend: Literal["torch", "deepspeed"] = "torch"
    """"torch" is one process; "deepspeed" runs ``ranks`` child processes."""
    ranks: int = Field(default=1, ge=1)
    """Processes of the DeepSpeed backend, one a GPU."""
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Tokens, prompt and padding included, in one forward and backward pass; changes speed and memory, never the result."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this norm."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""


class RuntimeConfig(Section):
    """The machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes a GPU where there is one."""
    threads: int = Field(default=2, ge=1)
    """torch's threads in the main process. The results of a run are the same bit for bit only at equal threads."""
