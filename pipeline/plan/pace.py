"""Seconds a step, and bytes a day, by a simple model: work over rate, part after part, nothing overlapped.

Work is counted as in arXiv 2001.08361 (2.1): two operations a matrix element and token, twice that again for the
backward pass. Traffic between GPUs is ZeRO's (arXiv 1910.02054, 7). Judging by the verifier runs on CPU cores beside the
GPUs and is not counted. What the model leaves out makes it an orientation, not a promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config import Recipe
from pipeline.plan.memory import Memory, element_bytes, learner_ranks
from pipeline.plan.shapes import Shape

FIXED_BYTES, TOKEN_BYTES, PROMPT_BYTES = 120.0, 5.5, 1.5
"""On disk, a rollout with reward and advantage; each completion token with its logprob and text; each prompt token.
Measured on the store's synthetic million (``python -m tests.bench.store_scale``) and on real completions' texts."""
DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What the hardware does in a second. The defaults are an H100 SXM's (NVIDIA's data sheet: dense operations, HBM3),
    400 Gbit/s a GPU between GPUs, and PCIe 5 to main memory; ``reached`` and ``launch`` are assumptions."""

    flops: float = 989e12
    """bfloat16 operations."""
    flops_float32: float = 67e12
    bandwidth: float = 3.35e12
    """Bytes read from the GPU's memory."""
    network: float = 50e9
    """Bytes that a GPU sends to others."""
    host: float = 50e9
    """Bytes between a GPU and main memory."""
    reached: float = 0.4
    """Share of the operations that a model's layers reach."""
    launch: float = 3e-3
    """Seconds that a decoding step takes whatever it computes."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a prompt and of a completion."""

    prompt: float
    completion: float


def measured_rates(dtype: str, size: int = 2048) -> Rates:
    """The rates of this machine's first GPU, or of its CPU: a matrix product and a copy, the best of five.

    On the CPU everything lies in one memory, so its copy's rate stands for network and main memory too.
    """
    import time

    import torch

    from pipeline.products import multiply

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def best(work: object, amount: float) -> float:
        seconds = []
        for _ in range(6):
            started = time.perf_counter()
            work()  # type: ignore[operator]
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return amount / min(seconds[1:])

    def product(kind: torch.dtype) -> float:
        a, b = (torch.ones(size, size, dtype=kind, device=device) for _ in range(2))
        return best(lambda: multiply(a, b), 2.0 * size**3)

    block = torch.ones(1 << 26, dtype=torch.uint8, device=device)
    copied = best(lambda: block.clone(), 2.0 * block.numel())
    single = product(torch.float32)
    half = product(torch.bfloat16) if dtype == "bfloat16" else single
    if device == "cuda":
        return Rates(flops=half, flops_float32=single, bandwidth=copied)
    return Rates(half, single, copied, network=copied, host=copied, launch=0.0)


def forward_flops(shape: Shape, tokens: float, context: float, scored: float) -> float:
    """Operations of a forward pass: layers and attention of all tokens, the head of those whose logits are wanted."""
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * context
    return tokens * (2.0 * shape.layers * shape.matrix + attention) + scored * 2.0 * shape.vocabulary * shape.width


def step_seconds(recipe: Recipe, shape: Shape, memory: Memory, rates: Rates, lengths: Lengths) -> dict[str, float]:
    """Seconds of each part of one training step, in order; their sum is the step."""
    config, width, ranks = recipe.grpo, element_bytes(recipe), learner_ranks(recipe)
    whole, rate = shape.parameters, (rates.flops if element_bytes(recipe) == 2 else rates.flops_float32) * rates.reached
    count = config.problems_per_step * config.group_size
    written = count * lengths.completion
    tokens = written + config.problems_per_step * lengths.prompt  # a prompt is run once a group
    forward = forward_flops(shape, tokens, lengths.prompt + lengths.completion / 2, written)
    scorings = int(config.objective.needs_reference) + int(config.epochs * config.minibatches > 1)
    passes = (3 + int(recipe.learner.gradient_checkpointing)) * config.epochs
    steps = config.epochs * config.minibatches
    micro = max(steps, math.ceil(tokens / ranks / recipe.learner.micro_batch_tokens) * config.epochs)
    learnt = (scorings + passes) * forward / ranks / rate
    seconds = sampling_seconds(recipe, shape, memory, rates, lengths)
    seconds["reward model"] = _scoring(recipe, shape, rates, lengths)
    seconds["logprobs"] = scorings * forward / ranks / rate
    seconds["update"] = learnt - seconds["logprobs"]
    seconds["between GPUs"] = _traffic(recipe, whole * width, micro, steps, scorings) / rates.network
    # AdamW reads and writes master and two moments, reads the gradient, writes the weight.
    touched = steps * (28.0 + width) * whole / ranks
    offloaded = recipe.learner.backend == "deepspeed" and recipe.learner.offload_optimizer
    seconds["optimizer"] = touched / (rates.host if offloaded else rates.bandwidth)
    return seconds


def sampling_seconds(recipe: Recipe, shape: Shape, memory: Memory, rates: Rates, lengths: Lengths) -> dict[str, float]:
    """Seconds of prefilling, decoding, and bringing new weights to the engines.

    A decoding step reads the weights and the running completions' keys and values, or is bound by operations; steps are
    the tokens over the running completions, and at least as many as the longest completion has.
    """
    width, vllm = element_bytes(recipe), recipe.sampler.engine == "vllm"
    engines = (len(recipe.sampler.vllm.urls) or recipe.sampler.vllm.engines) if vllm else 1
    split = recipe.sampler.vllm.tensor_parallel if vllm else 1
    rate = (rates.flops if width == 2 else rates.flops_float32) * rates.reached * split
    count = recipe.grpo.problems_per_step * recipe.grpo.group_size / engines
    room = memory.kv_tokens / (lengths.completion + lengths.prompt / recipe.grpo.group_size)
    running = max(1.0, min(count, room, recipe.sampler.vllm.max_sequences if vllm else count))
    context = lengths.prompt + lengths.completion / 2
    read = (width * shape.parameters + running * context * shape.kv_elements * width) / (rates.bandwidth * split)
    step = max(read, forward_flops(shape, running, context, running) / rate) + rates.launch
    steps = max(count * lengths.completion / running, recipe.sampler.max_tokens)
    prompts = recipe.grpo.problems_per_step / engines * lengths.prompt
    shares = recipe.learner.backend == "torch" and not vllm
    return {
        "new weights to sampler": 0.0 if shares else 2 * width * shape.parameters / rates.host,
        "prefill": forward_flops(shape, prompts, lengths.prompt / 2, 0) / rate,
        "decoding": steps * step,
    }


def refresh_seconds(recipe: Recipe, shape: Shape, rates: Rates, lengths: Lengths) -> float:
    """Seconds in which the reward model learns a round's rollouts, at its end: on one GPU."""
    if not recipe.has_reward_model:
        return 0.0
    config = recipe.grpo
    rows = config.steps * config.problems_per_step * config.group_size * (1 + recipe.reward_model.replay)
    tokens = rows * (lengths.prompt + lengths.completion) * recipe.reward_model.epochs
    passes = 3 + int(recipe.reward_model.gradient_checkpointing)
    return passes * forward_flops(shape, tokens, lengths.completion / 2, 0) / _reward_model_rate(recipe, rates)


def _scoring(recipe: Recipe, shape: Shape, rates: Rates, lengths: Lengths) -> float:
    if not recipe.has_reward_model:
        return 0.0
    tokens = recipe.grpo.problems_per_step * recipe.grpo.group_size * (lengths.prompt + lengths.completion)
    return forward_flops(shape, tokens, lengths.completion / 2, 0) / _reward_model_rate(recipe, rates)


def _reward_model_rate(recipe: Recipe, rates: Rates) -> float:
    return (rates.flops if recipe.reward_model.dtype == "bfloat16" else rates.flops_float32) * rates.reached


def _traffic(recipe: Recipe, weights: float, micro: int, steps: int, scorings: int) -> float:
    """Bytes that a rank sends in a step, of a model of ``weights`` bytes.

    ZeRO-1 reduces float32 gradients once an optimizer step, ZeRO-2 and 3 each micro-batch's; then the weights are
    gathered: after the step, or under ZeRO-3 for every forward and backward pass.
    """
    ranks, stage = learner_ranks(recipe), recipe.learner.zero_stage
    if ranks == 1:
        return 0.0
    gradients = 4.0 / element_bytes(recipe) * steps if stage == 1 else micro
    gathers = 2 * micro + scorings * micro if stage == 3 else steps
    return (ranks - 1) / ranks * weights * (gradients + gathers)


def rollout_bytes(lengths: Lengths) -> float:
    """Bytes that one training rollout takes on disk, with its reward and advantage."""
    return FIXED_BYTES + TOKEN_BYTES * lengths.completion + PROMPT_BYTES * lengths.prompt


def checkpoint_bytes(recipe: Recipe, shape: Shape) -> float:
    """A checkpoint with its optimizer: weights, both moments, and the masters where the weights do not hold them."""
    width = element_bytes(recipe)
    trained = shape.lora_parameters(recipe.learner.lora_rank) if recipe.learner.lora_rank else shape.parameters
    masters = 4 if width == 2 or recipe.learner.lora_rank else 0
    return width * shape.parameters + (8 + masters) * trained


def day_bytes(recipe: Recipe, shape: Shape, lengths: Lengths, step: float) -> tuple[float, float]:
    """(rollouts, checkpoints of rounds) that a day of steps of ``step`` seconds leaves on disk, bytes."""
    steps = DAY / step
    rollouts = steps * recipe.grpo.problems_per_step * recipe.grpo.group_size * rollout_bytes(lengths)
    return rollouts, steps / recipe.grpo.steps * checkpoint_bytes(recipe, shape)
