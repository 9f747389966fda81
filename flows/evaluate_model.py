"""``grpoflow evaluate --model``: any model on any benchmark, as a small run of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.console import Display, evaluation_table
from flows.devices import devices_held
from flows.execute import logged, prepare_libraries
from flows.runs import claim_run, read_recipe
from flows.workflow import Workflow
from pipeline.config import Recipe
from pipeline.config.recipe import apply_overrides, validate_recipe
from pipeline.rundir import RunPaths, locked
from stages.checkpoint import is_intact

STAGES = ["select", "evaluate/base"]


def evaluate_model(
    model: str,
    benchmark: str,
    *,
    samples: int,
    limit: int | None,
    path: str | None,
    overrides: Sequence[str],
    root: Path,
) -> RunPaths:
    """Sample, score and summarise; every rollout is stored. The same call again continues a killed one.

    A checkpoint of a run is put to the test the way that run put its problems; any other model with the default prompt
    and room for 1,024 tokens, unless ``overrides`` say otherwise.
    """
    recipe = evaluation_recipe(model, benchmark, samples, limit, path, overrides)
    run_id = f"evaluate-{Path(model).name}-{benchmark}-{recipe.digest[:8]}".replace("/", "-")
    paths = RunPaths(root, run_id)
    claim_run(recipe, paths, stages=STAGES)
    check_unchanged(model, paths)
    display = Display(len(STAGES))
    with locked(paths), logged(paths), display:
        metrics = _evaluate(recipe, paths, display, benchmark)
    display.console.print(evaluation_table({Path(model).name: metrics}, recipe.evaluate.ks))
    display.line(f"run      {paths.directory}")
    return paths


def check_unchanged(model: str, paths: RunPaths) -> None:
    """ValueError when the model's files are no longer those that this run began to evaluate: its results are not theirs."""
    base = paths.checkpoint("base")
    if base.is_dir() and not is_intact(base):
        raise ValueError(
            f"{model} is not what run {paths.run_id} began to evaluate (its files have changed since): move "
            f"{paths.directory} away, or name another --root"
        )


def evaluation_recipe(
    model: str, benchmark: str, samples: int, limit: int | None, path: str | None, overrides: Sequence[str]
) -> Recipe:
    """The recipe of an evaluation: the model as the base policy, the benchmark as the only problem set."""
    from eval.benchmarks import find_benchmark

    own = Path(model).resolve().parent.parent
    base = read_recipe(RunPaths(own.parent, own.name)) if (own / "recipe.json").is_file() else None
    source = find_benchmark(benchmark, base, path)
    data: dict[str, Any] = base.model_dump(mode="json") if base else {"sampler": {"max_tokens": 1024}}
    data.get("grpo", {}).pop("objective", None)
    data["name"] = f"evaluate {benchmark}"
    data["model"] = {**data.get("model", {}), "name": model}
    data["data"] = {**data.get("data", {}), "sources": [source.model_dump(mode="json")], "benchmarks": []}
    ks = sorted({k for k in (1, 4, 8, 16, 32, 64) if k < samples} | {samples})
    data["evaluate"] = {**data.get("evaluate", {}), "samples": samples, "ks": ks, "problems": limit}
    data["rewards"] = {"weights": {"verifier": 1.0}}
    return validate_recipe(apply_overrides(data, overrides), f"of evaluating {model}")


def _evaluate(recipe: Recipe, paths: RunPaths, display: Display, benchmark: str) -> dict[str, Any]:
    from flows.engines import Engines
    from stages import base, evaluate, select

    prepare_libraries(recipe)
    flow = Workflow(recipe, paths, display)
    with (
        devices_held(recipe, f"run {paths.run_id}", display.line),
        flow,
        Engines(recipe, paths, flow.progress) as engines,
    ):
        flow.stage("select", lambda c: select.run(c, base.prepare(c), base.gold_check(recipe.rewards)))
        problems = select.load_problems(paths)
        if benchmark == "embedded":  # the generator makes both splits; every other benchmark is held out as a whole
            problems = [problem for problem in problems if problem.split == "heldout"]
        result = flow.stage(
            "evaluate/base",
            lambda c: evaluate.run(
                c, engines.sampler("base"), engines.tokenizer, engines.scorer(None), problems, checkpoint="base"
            ),
        )
    return dict(result.metrics)
