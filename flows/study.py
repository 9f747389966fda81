"""A study: one recipe trained by several methods from one warm start a seed, and one report over all of them.

The first method's run of a seed has the warm start; the others branch off it where the first round begins, so they share
problems, warm start and its evaluation. Stopped at any time, the same command continues with what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.claims import claims, method
from eval.gather import gather
from eval.report import build_report
from flows.execute import execute
from flows.runs import open_run, run_ids
from pipeline.rundir import RunPaths, step_key

BRANCH = f"{step_key(1, 1)}/rollout"


@dataclass(frozen=True, slots=True)
class Study:
    """``methods``: name (as ``eval.claims.method`` says it) to the overrides that make it; the first is branched off."""

    methods: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...]


STUDIES = {
    "figure5": Study(
        {
            "GRPO+PS": ("grpo.advantages.supervision=process",),
            "GRPO+OS": ("grpo.advantages.supervision=outcome",),
            "Online RFT": (
                "grpo.advantages.supervision=outcome", "grpo.objective.algorithm=online_rft",
                "grpo.objective.kl_coefficient=0.0",
            ),
            "RFT": (
                "grpo.advantages.supervision=outcome", "grpo.objective.algorithm=rft",
                "grpo.objective.kl_coefficient=0.0",
            ),
        },
        (0, 1),
    )
}  # fmt: skip


def run_study(
    name: str, overrides: Sequence[str], root: Path, *, run_id: str | None = None, say: Callable[[str], Any] = print
) -> Path:
    """Run what is left of a study and return its report; says each claim's finding. ``run_id`` begins the runs' names."""
    study, prefix = STUDIES[name], run_id or name
    _check_overrides(name, study, overrides)
    runs = [
        paths for seed in study.seeds for paths in _seed(name, study, overrides, root, f"{prefix}-s{seed}", seed, say)
    ]
    report = build_report(runs, RunPaths(root, f"{prefix}-s{study.seeds[0]}").report(name))
    for claim in claims([gather(paths) for paths in runs]):
        say(claim.sentence)
    say(f"report: {report}")
    return report


def _check_overrides(name: str, study: Study, overrides: Sequence[str]) -> None:
    """ValueError for a field that the study itself varies: it would silently be set back."""
    varied = {"seed", *(override.partition("=")[0] for changes in study.methods.values() for override in changes)}
    for override in overrides:
        if (field := override.partition("=")[0].strip()) in varied:
            raise ValueError(
                f"--set {override!r}: {name} varies {field} itself (seeds {', '.join(map(str, study.seeds))}; methods "
                f"{', '.join(study.methods)}): leave it out, or run one such recipe with --recipe mine.toml"
            )


def _seed(
    name: str, study: Study, overrides: Sequence[str], root: Path, run_id: str, seed: int, say: Callable[[str], Any]
) -> list[RunPaths]:
    """The runs of one seed, the one with the warm start first, each finished."""
    first, *others = study.methods
    say(f"{run_id}: {first}")
    recipe, parent = open_run(name, [*overrides, f"seed={seed}", *study.methods[first]], run_id, None, root)
    execute(recipe, parent)
    runs = [parent]
    for label in others:
        child = find_branch(root, run_id, label)
        if child is None:
            recipe, paths = open_run(None, study.methods[label], run_id, BRANCH, root)
        else:
            recipe, paths = open_run(None, [], child, None, root)
        say(f"{paths.run_id}: {label}")
        execute(recipe, paths)
        runs.append(paths)
    return runs


def find_branch(root: Path, parent: str, label: str) -> str | None:
    """The run that branched off a parent to train by this method, when there is one."""
    for run_id in run_ids(root):
        header = RunPaths(root, run_id).header
        if header.get("parent") == parent and header.get("resume_from") == BRANCH and method(header["recipe"]) == label:
            return run_id
    return None
