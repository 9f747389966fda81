"""The model card of a checkpoint: the README.md with which a model leaves for the Hub, filled in from its run.

It lies beside the weights and is no part of the checkpoint's checksums, so that people can write in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.benchmarks import how_put
from eval.report import environment, measure, number
from eval.summary import ACCURACIES, metric_title
from pipeline import store
from pipeline.config import Recipe
from pipeline.rundir import RunPaths, checkpoint_maker, read_result, write_atomic

CARD = "README.md"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_NAMES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Where a model that the recipe calls otherwise comes from."""
SHOWN = (
    "model.dtype", "data.template", "warm_start.steps", "warm_start.lr", "rewards.weights", "grpo.rounds", "grpo.steps",
    "grpo.problems_per_step", "grpo.group_size", "grpo.epochs", "grpo.lr", "grpo.objective.algorithm",
    "grpo.objective.aggregation", "grpo.objective.kl_coefficient", "grpo.objective.clip_low",
    "grpo.objective.clip_high", "sampler.temperature", "sampler.max_tokens", "learner.lora_rank", "regenerate.start",
    "regenerate.steps", "regenerate.lr",
)  # fmt: skip
"""Fields of the recipe that say most about the policy. Paths are not among them: a card goes to other people."""


def write_card(recipe: Recipe, paths: RunPaths, checkpoint: str, datasets: Sequence[str] = ()) -> Path | None:
    """Write the card of a checkpoint whose evaluation is complete; returns its file, None where there is nothing to do.

    A card that is there stays: its licence and its words may be its owner's by now. So does an ancestor's checkpoint.
    ``datasets`` are Hub names of the training data. The same run gives the same card byte for byte.
    """
    folder = paths.checkpoint(checkpoint)
    if not folder.is_dir() or (folder / CARD).exists():
        return None
    write_atomic(folder / CARD, card_text(recipe, paths, checkpoint, datasets))
    return folder / CARD


def card_text(recipe: Recipe, paths: RunPaths, checkpoint: str, datasets: Sequence[str] = ()) -> str:
    """The card: metadata that the Hub reads, then Markdown."""
    from huggingface_hub import ModelCardData

    recorded = store.read(paths, "evaluations", f"evaluate/{checkpoint}").to_pylist()
    rows = [r for r in recorded if r["slice"] == "all" and r["k"] in {None, *recipe.evaluate.ks}]
    base, name = base_model(recipe.model.name), f"{paths.run_id}-{checkpoint}"
    data = ModelCardData(
        base_model=base if HUB_NAME.fullmatch(base) else None, datasets=sorted(datasets) or None, model_name=name,
        library_name="transformers", pipeline_tag="text-generation", tags=["grpo", "grpoflow", "reasoning"],
        eval_results=[_hub_result(row) for row in rows if row["metric"] in ACCURACIES],
    )  # fmt: skip
    fields = recipe.model_dump(mode="json")
    body = environment(autoescape=False).get_template("card.md.j2").render(
        name=name, base=base, recipe=recipe, paths=paths, checkpoint=checkpoint, origin=origin(recipe, paths, checkpoint),
        parent=paths.header.get("parent"), versions=paths.header.get("versions") or {},
        settings=[(key, _field(fields, key)) for key in SHOWN],
        sources=_sources(paths), put=_put(recipe, rows),
        evaluation=[(metric_title(r["metric"], r["k"]), _figure(r), r["n_problems"], r["n_samples"]) for r in rows],
    )  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n\n{body}"


def base_model(name: str) -> str:
    """The base policy's Hub name, or what else to call it: of a local folder the last word alone."""
    if name == "embedded":
        return "random weights (the embedded policy)"
    known = HUB_NAMES.get(name, name)
    return known if HUB_NAME.fullmatch(known) and not Path(known).exists() else Path(known).name


def origin(recipe: Recipe, paths: RunPaths, checkpoint: str) -> str:
    """How the checkpoint came about, in one sentence."""
    result = read_result(paths, checkpoint_maker(checkpoint))
    metrics = result.metrics if result is not None else {}
    learnt = f"{number(metrics.get('steps'))} optimizer steps of SFT on {number(metrics.get('pairs'))}"
    if checkpoint == "warm-start":
        return f"The base policy after {learnt} worked solutions."
    if checkpoint == "final":
        start = "the base policy" if recipe.regenerate.start == "base" else "the policy that wrote them"
        return f"{learnt} correct completions, which the policy of the last round wrote; it started from {start}."
    config, round_ = recipe.grpo, int(checkpoint.removeprefix("round-"))
    return (
        f"The warm start after round {round_} of {config.rounds} of reinforcement learning ({config.objective.algorithm}): "
        f"{config.steps} steps a round, {config.problems_per_step} problems x {config.group_size} completions a step."
    )


def _hub_result(row: dict[str, Any]) -> Any:
    from huggingface_hub import EvalResult

    title = metric_title(row["metric"], row["k"])
    return EvalResult(
        task_type="text-generation", dataset_type=row["benchmark"], dataset_name=row["benchmark"], metric_type=title,
        metric_name=f"{title}, 95% interval [{row['low']:.4f}, {row['high']:.4f}]", metric_value=round(row["value"], 6),
    )  # fmt: skip


def _put(recipe: Recipe, rows: Sequence[dict[str, Any]]) -> str:
    """How the held-out problems were put to the policy."""
    config = recipe.evaluate
    return how_put(
        problems=rows[0]["n_problems"], samples=config.samples, temperature=config.temperature, top_p=config.top_p,
        max_tokens=config.max_tokens or recipe.sampler.max_tokens, greedy=config.greedy, engine=recipe.sampler.engine,
    )  # fmt: skip


def _figure(row: dict[str, Any]) -> str:
    share = row["metric"] in ACCURACIES or row["metric"].endswith("_share")
    return measure(row, share) + (" %" if share else "")


def _field(fields: dict[str, Any], key: str) -> str:
    value: Any = fields
    for word in key.split("."):
        value = value[word]
    return ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _sources(paths: RunPaths) -> list[tuple[str, int, int]]:
    """(source, training problems, held-out problems) of what was selected."""
    counts: dict[str, list[int]] = {}
    for row in store.read(paths, "problems", "select", ["source", "split"]).to_pylist():
        counts.setdefault(row["source"], [0, 0])[row["split"] != "train"] += 1
    return [(source, train, heldout) for source, (train, heldout) in sorted(counts.items())]
