"""Memory of a GPU by part and by phase, from a recipe and a shape. Pure arithmetic, in bytes.

What is held is what ``pipeline.backends`` holds; ``tests/bench/plan.py`` compares the sums with measurements. Estimates
that nothing here can measure are named as such: ``PROCESS``, and vLLM's share, which is what it is told to take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pipeline.config import Recipe
from pipeline.plan.shapes import Shape

CHUNK_ELEMENTS = 1 << 22
"""Logits that the head holds at a time: ``pipeline.backends.token_logprobs.CHUNK_ELEMENTS`` (a test compares them)."""
BUCKET, LIVE = 500_000_000, 1_000_000_000
"""Elements in DeepSpeed's reduction bucket, and gathered by ZeRO-3 at a time, at most (``pipeline.backends.zero``)."""
PROCESS = 1 << 30
"""Taken by a process's CUDA context and libraries, bytes: an assumption."""
LEAST_BUDGET = 1024
"""Smallest micro-batch that a plan proposes, in tokens."""
PHASES = ("opening", "sampling", "update", "refresh")
"""Opening: weights are read. Sampling: rollouts. Update: gradients. Refresh: the reward model is trained."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """``gpus`` alike, each with ``memory`` bytes, ``node`` of them in a machine."""

    gpus: int
    memory: float
    node: int = 8


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest GPU, which also has the reward model: part → one number a phase of ``PHASES``."""

    parts: dict[str, tuple[float, float, float, float]]
    host: float
    """Main memory of a machine, at its fullest."""
    kv_tokens: float
    """Tokens that an engine's key/value cache holds; below 0 where the weights leave no room."""

    @property
    def totals(self) -> tuple[float, ...]:
        """Bytes by phase."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    @property
    def most(self) -> float:
        """Bytes of the fullest phase."""
        return max(self.totals)


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as the learner lays it out: prompts once, then every completion."""

    tokens: float
    completion_tokens: float
    columns: float
    """Keys that the attention reads, summed over its rows: a completion's row reads its prompt's again."""
    mask: float
    """Elements of the mask of those rows."""


def micro_batch(budget: int, prompt: int, completion: int, group: int, most: float) -> Batch:
    """The fullest micro-batch of ``budget`` tokens: as many completions as fit, at most ``most``, at least one.

    Example: a budget of 40 with prompts of 4, completions of 8 and groups of 2 holds four completions, which are
    2 x 4 + 4 x 8 = 40 tokens, and read 2 x 4 + 4 x (4 + 8) = 56 keys through masks of 4 x 8 x 12 = 384 elements.
    """
    alone = (budget - prompt) // completion  # of a single group
    count = max(1.0, min(most, alone if alone < group else budget // (completion + prompt / group)))
    prompts = max(1.0, count / group)
    return Batch(
        tokens=prompts * prompt + count * completion,
        completion_tokens=count * completion,
        columns=prompts * prompt + count * (prompt + completion),
        mask=count * completion * (prompt + completion),
    )


def layer_bytes(shape: Shape, batch: Batch, width: int) -> float:
    """What autograd keeps of one layer for its backward pass; ``width`` is bytes an element (4 or 2).

    Norms: a float32 input and what is multiplied by the weight, and the linear map's input. Attention: queries, keys and
    values of all heads, its output as rows and as tokens, a log-sum a head, the mask as numbers. Feed-forward: gate,
    its activation, the other half, their product.
    """
    norm = (4 + 2 * width) * shape.width
    heads = shape.heads * shape.head_dim
    attention = (3 * heads * width + 4 * shape.heads) * batch.tokens + 2 * heads * width * batch.columns
    if shape.head_norms:
        attention += (4 + width) * shape.head_dim * (shape.heads + shape.kv_heads) * batch.tokens
    feed_forward = 4 * shape.intermediate * width
    return (2 * norm + feed_forward) * batch.tokens + attention + batch.mask * width


def pass_bytes(shape: Shape, batch: Batch, width: int, *, checkpointing: bool) -> tuple[float, float]:
    """(activations, working set) of a forward and backward pass at its peak.

    Under checkpointing a layer keeps its input, and one layer at a time is computed again. The working set is the larger
    of what the head needs (its gradient, the states and their gradient, three chunks of float32 logits) and what a
    layer's backward pass does; the gradient of a tied head waits for the embedding's, to be added to it.
    """
    layer, tokens = layer_bytes(shape, batch, width), batch.tokens
    kept = shape.layers * (tokens * shape.width * width if checkpointing else layer) + (layer if checkpointing else 0)
    gradient = shape.vocabulary * shape.width * width
    inside = tokens * 2 * (shape.intermediate + shape.width) * width + (gradient if shape.tied else 0)
    head = tokens * (4 + 2 * width) * shape.width + 2 * batch.completion_tokens * shape.width * width
    head += (
        3 * 4 * min(CHUNK_ELEMENTS, batch.completion_tokens * shape.vocabulary)
        + gradient
        - (layer if checkpointing else 0)
    )
    return kept, max(inside, head)


def learner_bytes(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """What a rank of the learner holds between passes, and its gradients, by part.

    torch: ``pipeline.backends.masters``. DeepSpeed: ZeRO (arXiv 1910.02054, 3) as ``pipeline.backends.zero`` sets it up,
    with gradients added up in float32; the bucket is theirs on the way to other ranks (float32 under ZeRO-1).
    """
    config, width, whole = recipe.learner, element_bytes(recipe), shape.parameters
    trained = shape.lora_parameters(config.lora_rank) if config.lora_rank else whole
    held = whole + (trained if config.lora_rank else 0)
    if config.backend == "torch":
        masters = 0 if width == 4 else 4 * trained
        merged = width * whole if config.lora_rank else 0  # the copy that samples
        return {"weights": width * held + merged, "float32 masters": masters, "moments": 8 * trained,
                "gradients": 4 * trained, "communication buffers": 0}  # fmt: skip
    share, stage = 1 / config.ranks, config.zero_stage
    on_gpu = 0.0 if config.offload_optimizer else share
    buffers = min(BUCKET, whole) * (4 if stage == 1 else width) + (min(LIVE, whole) * width if stage == 3 else 0)
    return {
        "weights": width * held * (share if stage == 3 else 1),
        "float32 masters": 4 * trained * on_gpu,
        "moments": 8 * trained * on_gpu,
        "gradients": 4 * trained * (1 if stage == 1 else on_gpu),
        "communication buffers": buffers,
    }


def element_bytes(recipe: Recipe) -> int:
    """Bytes of a weight in the forward pass."""
    return 2 if recipe.model.dtype == "bfloat16" else 4


def plan_memory(recipe: Recipe, shape: Shape, cluster: Cluster, prompt: int) -> Memory:
    """Memory of the fullest GPU. ``prompt`` is a usual prompt's length in tokens; completions count at their longest."""
    width, whole, learner = element_bytes(recipe), shape.parameters, learner_bytes(recipe, shape)
    stage3 = recipe.learner.backend == "deepspeed" and recipe.learner.zero_stage == 3
    reference = width * whole if recipe.grpo.objective.needs_reference else 0
    held = reference / recipe.learner.ranks if stage3 else reference
    activations, working = pass_bytes(
        shape, update_batch(recipe, prompt), width, checkpointing=recipe.learner.gradient_checkpointing
    )
    separate = recipe.learner.backend == "torch" and width == 2
    opening = (8.0 if separate else 4.0) * whole
    if (
        stage3
    ):  # read in main memory, shared out a parameter at a time: the part, perhaps in float32 too, and one matrix
        largest = shape.width * max(shape.vocabulary, shape.intermediate)
        opening = 8.0 * whole / recipe.learner.ranks + 4.0 * largest
    sampler, cache, kept, kv_tokens = _sampler(recipe, shape, cluster, prompt)
    scorer, training = _reward_model(recipe, shape, prompt)
    parts = {"opening the weights": (opening, 0.0, 0.0, 0.0)}
    for name in ("weights", "float32 masters", "moments"):
        parts[name] = (0.0, learner[name], learner[name], learner[name])
    for name in ("gradients", "communication buffers"):
        parts[name] = (0.0, 0.0, learner[name], 0.0)
    parts |= {
        "activations": (0.0, 0.0, activations, 0.0),
        "LM head and backward": (0.0, 0.0, working, 0.0),
        "reference": (0.0, held, held, held),
        "sampler: weights": (0.0, sampler, sampler * kept, sampler * kept),
        "sampler: KV cache": (0.0, cache, cache * kept, cache * kept),
        "reward model": (0.0, scorer, scorer, training),
        "processes (assumed)": (PROCESS,) + (PROCESS * _processes(recipe),) * 3,
    }
    return Memory(parts, _host(recipe, shape, cluster), kv_tokens)


def update_batch(recipe: Recipe, prompt: int) -> Batch:
    """The fullest micro-batch of a training step: the longest completions come first."""
    config = recipe.grpo
    of_rank = config.problems_per_step * config.group_size / config.minibatches / learner_ranks(recipe)
    return micro_batch(
        recipe.learner.micro_batch_tokens, prompt, recipe.sampler.max_tokens, config.group_size, most=max(1.0, of_rank)
    )


def learner_ranks(recipe: Recipe) -> int:
    """Processes, and so GPUs, that train."""
    return recipe.learner.ranks if recipe.learner.backend == "deepspeed" else 1


def _sampler(recipe: Recipe, shape: Shape, cluster: Cluster, prompt: int) -> tuple[float, float, float, float]:
    """(weights, cache, share of both that stays outside sampling, tokens in the cache) of an engine on this GPU."""
    width = element_bytes(recipe)
    token = shape.kv_elements * width
    if recipe.sampler.engine == "transformers":
        config = recipe.grpo
        most = config.problems_per_step * config.group_size * (prompt + recipe.sampler.max_tokens)
        slots = min(recipe.sampler.cache_tokens, most)
        own = width * shape.parameters if recipe.learner.backend == "deepspeed" else 0
        return own, slots * token, (1.0 if own else 0.0), slots
    engine = recipe.sampler.vllm
    weights = width * shape.parameters / engine.tensor_parallel
    cache = engine.memory_share * cluster.memory - weights  # below 0: the weights alone are too large for the share
    tokens = cache * engine.tensor_parallel / token
    return (0.0, 0.0, 0.0, tokens) if engine.urls else (weights, max(0.0, cache), float(not engine.sleep), tokens)


def _reward_model(recipe: Recipe, shape: Shape, prompt: int) -> tuple[float, float]:
    """(scoring, training) of the reward model, which are never in memory together.

    float32 weights on one GPU, and AdamW; under bfloat16 autocast keeps a copy of them.
    """
    if not recipe.has_reward_model:
        return 0.0, 0.0
    config = recipe.reward_model
    backbone = shape.parameters - (0 if shape.tied else shape.vocabulary * shape.width)
    # A sequence that is longer than the budget is a pass of its own.
    tokens = max(config.token_budget, prompt + recipe.sampler.max_tokens)
    width = 2 if config.dtype == "bfloat16" else 4
    weights = (4.0 if width == 4 else 6.0) * backbone
    trained = shape.lora_parameters(config.lora_rank) if config.lora_rank else backbone
    layer = layer_bytes(shape, Batch(tokens, 0, tokens, 0), width)
    kept = shape.layers * layer
    if config.gradient_checkpointing:
        kept = shape.layers * tokens * shape.width * width + layer
    training = weights + (12.0 + (4.0 if config.lora_rank else 0.0)) * trained
    return weights, training + kept + tokens * 2 * (shape.intermediate + shape.width) * width


def _processes(recipe: Recipe) -> int:
    """Processes on the fullest GPU: the learner's rank, an engine, and the one with the reward model."""
    own_engine = recipe.sampler.engine == "vllm" and not recipe.sampler.vllm.urls
    apart = recipe.learner.backend == "deepspeed" and recipe.has_reward_model
    return 1 + own_engine + apart


def _host(recipe: Recipe, shape: Shape, cluster: Cluster) -> float:
    """Main memory of a machine: every rank reads the float32 weights, under ZeRO-3 all map one file; offloading keeps 16
    bytes a parameter there."""
    ranks = learner_ranks(recipe)
    here = min(ranks, cluster.node)
    sharded = recipe.learner.backend == "deepspeed"
    mapped = sharded and recipe.learner.zero_stage == 3
    read = element_bytes(recipe) * shape.parameters if mapped else here * 4.0 * shape.parameters
    offloaded = sharded and recipe.learner.offload_optimizer
    return read + (16.0 * shape.parameters * here / ranks if offloaded else 0)


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a recipe, as ``--set`` takes it."""

    key: str
    value: object
    """What the field becomes."""

    @property
    def text(self) -> str:
        """``key=value``, quoted where a shell needs it."""
        if isinstance(self.value, dict):
            return f"'{self.key}={{{', '.join(f'{k} = {v:g}' for k, v in self.value.items())}}}'"
        return f"{self.key}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"


def changed(recipe: Recipe, changes: Sequence[Change]) -> Recipe:
    """The recipe with these changes, later ones over earlier ones."""
    for change in changes:
        *sections, field = change.key.split(".")
        holders: list[Any] = [recipe]
        for section in sections:
            holders.append(getattr(holders[-1], section))
        value = change.value
        for holder, name in zip(reversed(holders), [field, *reversed(sections)], strict=True):
            value = holder.model_copy(update={name: value})
        recipe = cast(Recipe, value)
    return recipe


def smallest_changes(recipe: Recipe, gpus: int, lacking: Callable[[Recipe], float]) -> list[Change] | None:
    """Changes under which nothing is ``lacking`` (bytes), in the order of what they cost; None when none suffice.

    Each that helps is taken until it fits; then each is left out again, or made milder, where it fits without.
    """
    known = ways(recipe, gpus)
    taken: dict[str, Change] = {}

    def left(changes: dict[str, Change]) -> float:
        return lacking(changed(recipe, list(changes.values())))

    for change in known:
        if left(taken) <= 0:
            break
        if left(taken | {change.key: change}) < left(taken):
            taken[change.key] = change
    if left(taken) > 0:
        return None
    for key, last in list(taken.items()):
        without = {k: change for k, change in taken.items() if k != key}
        milder = [without, *(taken | {key: c} for c in known[: known.index(last)] if c.key == key)]
        taken = next((fewer for fewer in milder if left(fewer) <= 0), taken)
    return list(taken.values())


def ways(recipe: Recipe, gpus: int) -> list[Change]:
    """Changes that make a recipe smaller: first those that only take time, last those that change what is paid for."""
    learner, sampler = recipe.learner, recipe.sampler
    sharded, engines = learner.backend == "deepspeed", sampler.engine == "vllm" and not sampler.vllm.urls
    learnt = recipe.has_reward_model
    found = [Change("sampler.vllm.sleep", True)] if engines else []
    found.append(Change("learner.gradient_checkpointing", True))
    if learnt:
        found.append(Change("reward_model.gradient_checkpointing", True))
        found += _halved("reward_model.token_budget", recipe.reward_model.token_budget)
    found += _halved("learner.micro_batch_tokens", learner.micro_batch_tokens)
    if sharded and gpus > 1:
        found += [Change("learner.zero_stage", stage) for stage in (2, 3) if stage > learner.zero_stage]
    if engines:
        splits = [sampler.vllm.tensor_parallel * factor for factor in (2, 4, 8)]
        found += [Change("sampler.vllm.tensor_parallel", split) for split in splits if split <= min(gpus, 8)]
    if sharded:
        found.append(Change("learner.offload_optimizer", True))
    if engines:
        found += [Change("sampler.vllm.memory_share", s) for s in (0.3, 0.2) if s < sampler.vllm.memory_share]
    if learnt:
        found.append(Change("reward_model.lora_rank", recipe.reward_model.lora_rank or 64))
        others = {name: weight for name, weight in recipe.rewards.weights.items() if name != "reward_model"}
        found.append(Change("rewards.weights", others if any(others.values()) else others | {"verifier": 1.0}))
    return found


def _halved(key: str, tokens: int) -> list[Change]:
    """A budget of tokens halved, and again, down to the smallest that a plan proposes."""
    found = []
    while (tokens := tokens // 2) >= LEAST_BUDGET:
        found.append(Change(key, tokens))
    return found
