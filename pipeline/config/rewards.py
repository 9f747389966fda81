"""What a completion is paid for, and the reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.section import Section


class RewardConfig(Section):
    """The reward is the weighted sum of named components; each is stored unweighted."""

    weights: dict[str, float] = Field(default_factory=lambda: {"verifier": 1.0, "format": 0.1, "reward_model": 0.2})
    """Component to weight. Built in: verifier, format, reward_model, process_model (the lowest of its step scores),
    length, overlong, repetition, language, code; any other name must be in ``functions``. A weight of 0 computes and
    stores the component without paying for it."""
    functions: dict[str, str] = Field(default_factory=dict)
    """Your own components: name to "module:function", called with (problem, completion_text); None is unscored."""
    aggregation: Literal["sum", "gdpo"] = "sum"
    """"sum" adds the weighted components; "gdpo" first brings each component to mean 0 and deviation 1 within its group
    (arXiv 2601.05242), so that no component drowns another: combine it with ``grpo.advantages.scale = "batch"``."""
    reward_model_pays: Literal["mixed_groups", "all_groups"] = "mixed_groups"
    """"mixed_groups" pays by the learnt rewards only where the verifier finds correct and wrong completions in one group.
    Where all are wrong, dividing by the group's deviation turns the learnt reward's noise into full advantages, and a
    policy that is mostly wrong learns to please the model. "all_groups" is the paper's, for a model that can be trusted."""
    workers: int = Field(default=1, ge=1)
    """Verifier processes, and code tests run side by side."""
    timeout: float = Field(default=5.0, gt=0.0)
    """Seconds for one verdict; then the worker is killed and the completion is unscored."""
    memory_mb: int = Field(default=2048, ge=256)
    """Address space of a worker, in MiB."""
    function_timeout: float = Field(default=5.0, gt=0.0)
    """Seconds for one call of a function of yours; then its process is killed and the completion is unscored."""
    max_unscored: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of a step's rollouts that may be unscored before the run says so loudly."""
    unscored_action: Literal["warn", "stop"] = "stop"
    """What happens then: the run stops, or warns each such step and trains on what is scored."""
    equal_steps: int = Field(default=5, ge=0)
    """Training steps in a row with all rewards equal before the run says so loudly (nothing is learnt); 0 is off."""
    equal_action: Literal["warn", "stop"] = "warn"
    """What happens then: a warning each further step, or the run stops."""
    overlong_share: float = Field(default=0.2, gt=0.0, le=1.0)
    """overlong: last share of the longest completion, over which the penalty grows from 0 to -1 (DAPO: 0.2)."""
    length_shape: Literal["linear", "cosine"] = "cosine"
    """length: how the value moves from the first to the second number of the two fields below as completions grow."""
    length_correct: tuple[float, float] = (1.0, 0.0)
    """length: value of a correct completion of 0 tokens and of ``sampler.max_tokens`` tokens."""
    length_wrong: tuple[float, float] = (0.0, 0.0)
    """length: the same of a wrong one; a higher second number pays for trying longer (arXiv 2502.03373: -10, 0)."""
    repetition_ngram: int = Field(default=10, ge=2)
    """repetition: tokens in a row that count as a repeat when they occur again."""
    language: Literal["auto", "en", "zh", "ja", "ko", "ru", "ar", "hi", "th", "el", "he"] = "auto"
    """language: whose script the words of a completion should be written in; "auto" takes the problem's."""
    code_score: Literal["fraction", "all"] = "fraction"
    """code: share of a problem's tests that pass, or 1 only when all do."""
    code_timeout: float = Field(default=4.0, gt=0.0)
    """code: seconds of one test, wall clock and processor alike; a test that takes longer is failed."""
    code_memory_mb: int = Field(default=512, ge=64)
    """code: address space of the process that runs a test, in MiB."""
    code_file_mb: int = Field(default=0, ge=0)
    """code: MiB that a program may write in its empty directory, in one file and in all; 0 refuses to create files."""
    code_weak_sandbox: bool = False
    """code: run model-written code even where the kernel lacks seccomp or Landlock, with resource limits alone: the
    code can then reach the network and this user's files."""


class RewardModelConfig(Section):
    """The learnt rewards: a scalar head on the policy's backbone, trained on verifier labels."""

    problems: int = Field(default=200, ge=2)
    """Training problems whose rollouts, labelled by the verifier, train the first model."""
    samples: int = Field(default=8, ge=1)
    """Completions a problem."""
    objective: Literal["pointwise", "pairwise"] = "pointwise"
    """Binary cross-entropy on each rollout, or Bradley-Terry on (better, worse) pairs of one problem's rollouts."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the labelled rollouts."""
    batch_size: int = Field(default=64, ge=1)
    """Rollouts in an optimizer step."""
    token_budget: int = Field(default=4096, ge=16)
    """Tokens, padding included, in one forward pass; changes speed and memory, never the result."""
    lr: float = Field(default=3e-4, gt=0.0)
    """Learning rate of the backbone after the warmup (the paper: 2e-5 at 7B)."""
    head_lr: float = Field(default=3e-3, gt=0.0)
    """Learning rate of the scalar head, which starts from zeros and has further to go."""
    warmup_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of the optimizer steps over which the learning rate rises from 0."""
    replay: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of earlier rollouts mixed into each refresh, of the size of the new ones (the paper: 10 %)."""
    heldout_share: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of problems whose rollouts are kept out of training, to measure the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward passes, in training and in scoring; weights and moments are float32 in either."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""
    lora_rank: int = Field(default=0, ge=0)
    """Train low-rank additions of this rank to the backbone's linear layers, merged into the weights at the end: gradients
    and moments of the weights themselves, 12 bytes a parameter, are not needed. 0 trains the weights."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA: the additions are scaled by this over the rank."""
    step_delimiter: str = Field(default="\n", min_length=1)
    """Process supervision: text that ends a step; the last step ends with the completion."""
    process_samples: int = Field(default=2, ge=1)
    """Process supervision: completions of each of ``problems`` whose steps are labelled."""
    continuations: int = Field(default=4, ge=1)
    """Process supervision: completions drawn from the end of each step to estimate its label (Math-Shepherd: 8)."""
    step_labels: Literal["soft", "hard"] = "soft"
    """Process supervision: share of the continuations that are correct, or 1 when any is."""
