"""The plan as people read it, and the table of sizes and clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config import Recipe
from pipeline.plan.memory import (
    PHASES,
    Change,
    Cluster,
    Memory,
    changed,
    learner_ranks,
    plan_memory,
    smallest_changes,
    ways,
)
from pipeline.plan.pace import (
    Lengths,
    Rates,
    checkpoint_bytes,
    day_bytes,
    measured_rates,
    refresh_seconds,
    rollout_bytes,
    step_seconds,
)
from pipeline.plan.shapes import QWEN25_SIZES, Shape, find_shape, qwen25

GIB = 2.0**30
TABLE_GPUS, TABLE_PROMPT = (1, 8, 64, 256, 1024), 256


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe put on a cluster. ``recipe`` has the ranks and engines that the cluster gives it."""

    recipe: Recipe
    shape: Shape
    cluster: Cluster
    rates: Rates
    lengths: Lengths

    def memory(self, recipe: Recipe | None = None) -> Memory:
        """Memory of the plan's recipe, or of another on the same cluster."""
        return plan_memory(recipe or self.recipe, self.shape, self.cluster, round(self.lengths.prompt))

    def lacking(self, recipe: Recipe | None = None) -> float:
        """Bytes by which the phases exceed a GPU, and that the cache lacks for one completion; 0 when it fits."""
        chosen = recipe or self.recipe
        memory = self.memory(chosen)
        over = sum(max(0.0, total - self.cluster.memory) for total in memory.totals)
        missing = max(0.0, self.lengths.prompt + chosen.sampler.max_tokens - memory.kv_tokens)
        return over + missing * self.shape.kv_elements * 2 / chosen.sampler.vllm.tensor_parallel

    def changes(self) -> list[Change] | None:
        """What to change so that it fits; None when nothing that is known here does."""
        return smallest_changes(self.recipe, self.cluster.gpus, self.lacking)

    def least(self) -> tuple[str, float]:
        """The fullest phase, and its bytes, after everything that makes a recipe smaller."""
        memory = self.memory(changed(self.recipe, ways(self.recipe, self.cluster.gpus)))
        return PHASES[memory.totals.index(memory.most)], memory.most


def place(recipe: Recipe, gpus: int) -> Recipe:
    """The recipe with one rank a GPU, and engines on the same GPUs. ValueError where the recipe cannot use so many."""
    learner, sampler = recipe.learner, recipe.sampler
    if gpus > 1 and learner.backend == "torch":
        raise ValueError(
            f"--gpus is {gpus}, but learner.backend is 'torch', which trains on one: add --set learner.backend=deepspeed"
        )
    if sampler.vllm.tensor_parallel > gpus and sampler.engine == "vllm" and not sampler.vllm.urls:
        raise ValueError(
            f"sampler.vllm.tensor_parallel is {sampler.vllm.tensor_parallel}, more than --gpus {gpus}: lower it"
        )
    engines = max(1, gpus // sampler.vllm.tensor_parallel)
    return recipe.model_copy(
        update={
            "learner": learner.model_copy(update={"ranks": gpus if learner.backend == "deepspeed" else 1}),
            "sampler": sampler.model_copy(update={"vllm": sampler.vllm.model_copy(update={"engines": engines})}),
        }
    )


def make_plan(recipe: Recipe, *, gpus: int, gib: float, rates: Rates, prompt: float, completion: float | None) -> Plan:
    """The plan of a recipe; completions are half of ``sampler.max_tokens`` long unless told otherwise.

    ValueError for amounts that are not positive, an unknown model, or a recipe that cannot use the GPUs.
    """
    amounts = {"--gpus": gpus, "--gpu-memory": gib, "--prompt-tokens": prompt, "--flops": min(rates.flops, rates.flops_float32),
               "--bandwidth": rates.bandwidth, "--network": rates.network, "--reached": rates.reached}  # fmt: skip
    if completion is not None:
        amounts["--completion-tokens"] = completion
    for name, amount in amounts.items():
        if not amount > 0:
            raise ValueError(f"{name} is {amount:g}: expected more than 0")
    if completion is not None and completion > recipe.sampler.max_tokens:
        raise ValueError(
            f"--completion-tokens is {completion:g}, more than sampler.max_tokens ({recipe.sampler.max_tokens}): lower it"
        )
    lengths = Lengths(prompt, completion or recipe.sampler.max_tokens / 2)
    return Plan(place(recipe, gpus), find_shape(recipe.model), Cluster(gpus, gib * GIB), rates, lengths)


def choose_rates(name: str, given: Mapping[str, float | None], dtype: str) -> Rates:
    """An H100's rates or this machine's, with those that are given in their place; ``flops`` are of the recipe's dtype.

    ValueError for a name that is neither.
    """
    if name not in ("h100", "measured"):
        raise ValueError(f"--rates is {name!r}: expected h100 or measured")
    names = {"flops": "flops" if dtype == "bfloat16" else "flops_float32"}
    known = {names.get(key, key): rate for key, rate in given.items() if rate is not None}
    return replace(measured_rates(dtype) if name == "measured" else Rates(), **known)


def print_plan(
    recipe: Recipe, *, gpus: int, gib: float, prompt: float, completion: float | None, rates: str,
    given: Mapping[str, float | None], table: bool,
) -> None:  # fmt: skip
    """Print the plan of a recipe, or the table of sizes with its settings."""
    chosen = choose_rates(rates, given, recipe.model.dtype)
    if not table:
        planned = make_plan(recipe, gpus=gpus, gib=gib, rates=chosen, prompt=prompt, completion=completion)
        print("\n".join(plan_lines(planned)))
        return
    place(recipe, max(TABLE_GPUS))
    print("\n".join(table_lines(recipe, gib=gib, rates=chosen)))


def plan_lines(plan: Plan) -> list[str]:
    """The whole plan: memory, whether it fits, seconds a step, storage."""
    recipe, count = plan.recipe, plan.cluster.gpus
    lines = [
        f"{recipe.name}: {recipe.model.name}, {plan.shape.parameters:,} parameters, on {count:,} GPU{'s' * (count > 1)} "
        f"of {plan.cluster.memory / GIB:g} GiB; {learner_ranks(recipe):,} learner rank(s) ({recipe.learner.backend}), "
        f"{recipe.sampler.engine} sampler",
        "",
    ]
    return [*lines, *_memory_lines(plan), "", *_pace_lines(plan)]


def _memory_lines(plan: Plan) -> list[str]:
    memory = plan.memory()
    lines = [f"{'GiB on the fullest GPU':<24}" + "".join(f"{phase:>10}" for phase in PHASES)]
    for name, values in memory.parts.items():
        if any(values):
            lines.append(f"{name:<24}" + "".join(f"{v / GIB:>10.2f}" if v else f"{'':>10}" for v in values))
    lines.append(f"{'all':<24}" + "".join(f"{v / GIB:>10.2f}" for v in memory.totals))
    lines.append(f"main memory of a machine of {plan.cluster.node} GPUs: {memory.host / GIB:,.1f} GiB at the opening")
    return [*lines, "", _verdict(plan, memory)]


def _verdict(plan: Plan, memory: Memory) -> str:
    if plan.lacking() <= 0:
        return f"fits: {(plan.cluster.memory - memory.most) / GIB:.1f} GiB to spare"
    needed = plan.lengths.prompt + plan.recipe.sampler.max_tokens
    if memory.most <= plan.cluster.memory:
        room = max(0.0, memory.kv_tokens)
        over = f"DOES NOT FIT: an engine's cache holds {room:,.0f} tokens and a completion with its prompt has {needed:,.0f}"
    else:
        phase = PHASES[memory.totals.index(memory.most)]
        over = f"DOES NOT FIT: {phase} takes {memory.most / GIB:.1f} GiB of {plan.cluster.memory / GIB:g}"
    changes = plan.changes()
    if changes:
        return f"{over}; it fits with " + " ".join(f"--set {change.text}" for change in changes)
    phase, least = plan.least()
    advice = "GPUs with more memory" if phase == "opening" else "more GPUs, or GPUs with more memory"
    return f"{over}; with all that a plan can change {phase} takes {least / GIB:.1f} GiB: take {advice}, or a smaller model"


def _pace_lines(plan: Plan) -> list[str]:
    recipe, shape, lengths = plan.recipe, plan.shape, plan.lengths
    parts = step_seconds(recipe, shape, plan.memory(), plan.rates, lengths)
    step = sum(parts.values())
    lines = [
        f"seconds a step of {recipe.grpo.problems_per_step} x {recipe.grpo.group_size} completions of "
        f"{lengths.completion:,.0f} tokens after prompts of {lengths.prompt:,.0f}:"
    ]
    lines += [f"{name:<24}{seconds:>10.2f}" for name, seconds in parts.items() if seconds]
    lines.append(f"{'all':<24}{step:>10.2f}")
    refresh = refresh_seconds(recipe, shape, plan.rates, lengths)
    if refresh:
        lines.append(f"and {refresh / 3600:,.1f} h a round of {recipe.grpo.steps} steps for the reward model's refresh")
    rollouts, checkpoints = day_bytes(recipe, shape, lengths, step)
    lines += [
        "",
        f"storage a day: {rollouts / 1e9:,.2f} GB of rollouts ({rollout_bytes(lengths):,.0f} bytes each), "
        f"{checkpoints / 1e9:,.1f} GB of rounds' checkpoints ({checkpoint_bytes(recipe, shape) / 1e9:,.2f} GB each)",
    ]
    return lines


def table_lines(base: Recipe, *, gib: float, rates: Rates, gpus: Sequence[int] = TABLE_GPUS) -> list[str]:
    """Markdown: for each size of Qwen2.5 and each number of GPUs the memory and time of a step, changed where it must.

    A cell is "GiB on the fullest GPU, seconds a step, ZeRO stage" with t and the engines' tensor parallelism, and o
    where the optimizer is in main memory; where nothing helps, the GiB that the smallest form needs in its fullest phase.
    """
    lines = ["| parameters |" + "".join(f" {count:,} |" for count in gpus), "| --- |" + " ---: |" * len(gpus)]
    for size in QWEN25_SIZES:
        recipe = base.model_copy(update={"model": base.model.model_copy(update={"name": f"Qwen/Qwen2.5-{size}"})})
        lengths = Lengths(TABLE_PROMPT, recipe.sampler.max_tokens / 2)
        plans = [Plan(place(recipe, n), qwen25(size), Cluster(n, gib * GIB), rates, lengths) for n in gpus]
        lines.append(f"| {size} |" + "".join(f" {_cell(plan)} |" for plan in plans))
    return lines


def _cell(plan: Plan) -> str:
    found = plan.changes()
    if found is None:
        phase, least = plan.least()
        return f"{phase} needs {least / GIB:,.0f} GiB"
    recipe = place(changed(plan.recipe, found), plan.cluster.gpus)
    memory = plan.memory(recipe)
    seconds = sum(step_seconds(recipe, plan.shape, memory, plan.rates, plan.lengths).values())
    split = recipe.sampler.vllm.tensor_parallel
    mark = f"Z{recipe.learner.zero_stage}" + f"t{split}" * (split > 1) + "o" * recipe.learner.offload_optimizer
    return f"{memory.most / GIB:.0f} GiB, {seconds:,.0f} s, {mark}"
