"""What differs between two runs of one recipe under one run id: rows, values and weights, timing aside."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.runs import read_recipe
from pipeline import store
from pipeline.rundir import RunPaths

TIMING = {"seconds", "at", "started_at", "finished_at"}
ROW_ID = {
    "problems": ("problem_id",), "rollouts": ("rollout_id",), "rewards": ("rollout_id",), "advantages": ("rollout_id",),
    "updates": ("stage", "round", "step", "epoch", "minibatch"),
    "evaluations": ("stage", "checkpoint", "benchmark", "metric", "k", "slice"),
    "events": ("stage", "kind", "severity", "message"),
}  # fmt: skip


@dataclass
class Difference:
    """All empty means the same."""

    rows_lost: int = 0
    rows_doubled: int = 0
    bits_differ: int = 0
    details: list[str] = field(default_factory=list)


def compare(reference: RunPaths, run: RunPaths) -> Difference:
    """How ``run`` differs from the uninterrupted ``reference``."""
    found = Difference()
    for table, names in ROW_ID.items():
        expected, got = rows(reference, table, names), rows(run, table, names)
        for row_id, values in expected.items():
            if row_id not in got:
                found.rows_lost += 1
                found.details.append(f"{table} {row_id} is missing")
            elif got[row_id][0] != values[0]:
                found.bits_differ += 1
                found.details.append(f"{table} {row_id}: {first_difference(values[0], got[row_id][0])}")
        extra = sum(len(values) for values in got.values()) - len(expected.keys() & got.keys())
        found.rows_doubled += extra
        if extra:
            found.details.append(f"{table} has {extra} rows more")
    for name in checkpoints(reference):
        for file, digest in weights(reference.checkpoint(name)).items():
            if weights(run.checkpoint(name)).get(file) != digest:
                found.bits_differ += 1
                found.details.append(f"checkpoint {name}/{file} differs")
    return found


def rows(paths: RunPaths, table: str, names: tuple[str, ...]) -> dict[tuple, list[dict[str, Any]]]:
    """Row id → its rows (more than one when doubled), without what a clock measured."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for row in store.read(paths, table).to_pylist():
        row = {k: without_timing(v) for k, v in row.items() if k not in TIMING and not k.startswith("seconds_")}
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def without_timing(value: Any) -> Any:
    """The ``extra`` map without seconds; NaN as text, since NaN differs from itself."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return [(k, repr(v)) for k, v in value if not str(k).startswith("seconds")]
    return repr(value) if isinstance(value, float) else value


def first_difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """The first column that differs, with both values."""
    name = next(name for name in expected if expected[name] != got.get(name))
    return f"{name} is {str(got.get(name))[:60]}, expected {str(expected[name])[:60]}"


def checkpoints(paths: RunPaths) -> list[str]:
    """Checkpoints that every complete run has: not those of single steps, which are pruned."""
    recipe = read_recipe(paths)
    rounds = range(1, recipe.grpo.rounds + 1)
    kinds = [("reward-model", recipe.has_reward_model), ("process-model", recipe.has_process_model)]
    models = [f"{kind}-{r:02d}" for kind, there in kinds if there for r in (0, *rounds)]
    return ["base", "warm-start", *(f"round-{r:02d}" for r in rounds), *models, "final"]


def weights(folder: Path) -> dict[str, str]:
    """File → sha256 of everything in a checkpoint but its manifest and its card, which names the recipe's digest."""
    left_out = ("manifest.json", "README.md")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in left_out]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
