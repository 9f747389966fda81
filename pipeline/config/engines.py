"""The engines: what samples and what learns, and on how many devices."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.section import Section


class VLLMConfig(Section):
    """vLLM; read only when ``sampler.engine`` is "vllm"."""

    engines: int = Field(default=1, ge=1)
    """Engines side by side, each with all weights in a process of its own; prompts are shared out by load. On GPUs each
    takes ``tensor_parallel`` of the visible ones."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs over which one engine's weights are split."""
    urls: tuple[str, ...] = ()
    """Engines that run elsewhere (``vllm serve``), used instead of starting ``engines`` here; one that dies leaves its
    requests to the others. How to start them stands in ``pipeline/backends/vllm_remote.py``."""
    shared_folder: str | None = None
    """Folder that the engines at ``urls`` see under the same name: policies are handed over in it. None is for engines
    on this machine: memory-backed storage."""
    request_timeout: float = Field(default=1800.0, gt=0.0)
    """Seconds that an engine at ``urls`` may take for one completion or one load of weights before it counts as gone."""
    memory_share: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that an engine takes; lower it where the learner lives on the same GPU."""
    cpu_cache_gib: int = Field(default=1, ge=1)
    """Key/value cache of an engine on the CPU, in GiB."""
    max_length: int | None = Field(default=None, ge=16)
    """Longest prompt plus completion, in tokens; None is the model's context. Shorter starts with less memory."""
    max_sequences: int = Field(default=256, ge=1)
    """Completions that an engine runs side by side."""
    compilation: Literal["auto", "on", "off"] = "auto"
    """Compile the model and capture CUDA graphs: a slower start, faster tokens; "auto" does it on GPUs only."""
    prefix_caching: bool = True
    """Compute a prompt once for all its completions."""
    sleep: bool = False
    """Give an engine's GPU memory back after each call and take it again before the next: for a learner that lives on
    the same GPU, at the price of moving the weights twice. GPUs only."""
    start_timeout: float = Field(default=600.0, gt=0.0)
    """Seconds that an engine may take to start."""
    weight_sync: Literal["checkpoint", "ipc"] = "checkpoint"
    """How new weights reach the engine: "checkpoint" writes them to memory-backed storage, which works everywhere; "ipc"
    is vLLM's own transfer within the memory of a GPU that one engine shares with a learner in this process."""

    @model_validator(mode="after")
    def _check_transfer(self) -> VLLMConfig:
        if self.weight_sync == "ipc" and (self.urls or self.engines > 1 or self.tensor_parallel > 1):
            raise ValueError(
                f"sampler.vllm.weight_sync is 'ipc', which reaches one engine on the learner's own GPU, but engines is "
                f"{self.engines}, tensor_parallel {self.tensor_parallel} and urls {list(self.urls)}: set weight_sync to "
                f"'checkpoint', or use one engine here (engines 1, tensor_parallel 1, no urls)"
            )
        return self


class SamplerConfig(Section):
    """Generation of completions."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """"transformers" shares the learner's weights in one process; "vllm" runs in child processes."""
    temperature: float = Field(default=1.0, gt=0.0, le=5.0)
    """Of training rollouts; logits are divided by it before the softmax, in sampler, learner and reference alike."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus share of training rollouts; only 1 is accepted, since the learner's logprobs are over all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest tokens; only 0 (off) is accepted, as for ``top_p``."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Drop tokens less likely than this share of the likeliest one; only 0 (off) is accepted, as for ``top_p``."""
    max_tokens: int = Field(default=128, ge=1)
    """Longest completion, in tokens; longer ones are truncated and say so."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    cache_tokens: int = Field(default=65536, ge=64)
    """Token slots of the transformers sampler's key/value cache: bounds how many completions run side by side."""
    sync_tolerance: float = Field(default=1e-3, gt=0.0)
    """Largest |sampler - learner| logprob of the probe prompt after a weight sync, in nats; above it the run stops."""
    vllm: VLLMConfig = VLLMConfig()
    """How vLLM runs."""

    @model_validator(mode="after")
    def _check_support(self) -> SamplerConfig:
        """The learner's logprobs are over the whole vocabulary: ratios to a cut distribution would be wrong."""
        for field, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, field) != off:
                raise ValueError(
                    f"sampler.{field} is {getattr(self, field)}: training needs the full distribution, since the "
                    f"learner's logprobs are over the whole vocabulary; set it to {off} and use sampler.temperature "
                    f"(evaluate.top_p may be lower)"
                )
        return self


class LearnerConfig(Section):
    """Gradient steps."""

    backend: Literal["torch", "deepspeed"] = "torch"
    """"torch" is one process; "deepspeed" runs ``ranks`` child processes."""
    ranks: int = Field(default=1, ge=1)
    """Processes of the DeepSpeed backend, one a GPU."""
    nodes: int = Field(default=1, ge=1)
    """Machines over which the DeepSpeed backend's ranks are spread evenly, this one first. The others run
    ``grpoflow join HOST:PORT``; all see the run's folder under the same name."""
    rendezvous: str | None = None
    """HOST:PORT of this machine as the others reach it; needed when there are several ``nodes``."""
    zero_stage: Literal[1, 2, 3] = 2
    """What DeepSpeed's ranks share out among them: 1 the optimizer's state, 2 gradients too, 3 the weights too."""
    offload_optimizer: bool = False
    """DeepSpeed: keep master weights and moments in main memory, at the price of moving them once a step."""
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
    lora_rank: int = Field(default=0, ge=0)
    """Train low-rank additions of this rank to the linear layers and leave the weights alone; 0 trains the weights."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA: the additions are scaled by this over the rank."""

    @model_validator(mode="after")
    def _check_nodes(self) -> LearnerConfig:
        if self.nodes == 1:
            return self
        if self.backend != "deepspeed" or self.rendezvous is None:
            raise ValueError(
                f"learner.nodes is {self.nodes}, which needs learner.backend = 'deepspeed' (it is {self.backend!r}) and "
                f"learner.rendezvous = 'HOST:PORT' of this machine (it is {self.rendezvous!r})"
            )
        if not re.fullmatch(r".+:\d+", self.rendezvous):
            raise ValueError(f"learner.rendezvous is {self.rendezvous!r}: expected HOST:PORT of this run's machine")
        if self.ranks % self.nodes:
            raise ValueError(
                f"learner.ranks is {self.ranks} and learner.nodes {self.nodes}: each machine has equally many ranks; make "
                f"learner.ranks a multiple of learner.nodes"
            )
        return self


class RuntimeConfig(Section):
    """The machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes a GPU where there is one."""
    threads: int = Field(default=2, ge=1)
    """torch's threads in the main process. The results of a run are the same bit for bit only at equal threads."""
    exclusive: Literal["auto", "on", "off"] = "auto"
    """One run at a time on each GPU that it sees, others on this machine wait for their turn: "auto" and "on". Without a
    GPU "on" counts the processor as one device. "off" shares."""
