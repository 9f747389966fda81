"""The history of all runs on one page. Reads recipes and evaluation results only, so a thousand runs take seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import plots
from eval.gather import checkpoint_order
from eval.report import environment
from pipeline.rundir import RunPaths, read_result, write_atomic
from pipeline.types import StageResult

POINTS = 60
"""Runs in the picture of the history; the table has all."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run as the index shows it; ``trouble`` says why it cannot be read, and then nothing else is filled.

    ``evaluations``: the results of its evaluations, in the order of the recipe.
    """

    run_id: str
    header: Mapping[str, Any]
    evaluations: Sequence[StageResult]
    steps: int
    report: str | None
    trouble: str | None = None

    @property
    def latest(self) -> StageResult | None:
        return self.evaluations[-1] if self.evaluations else None

    def metric(self, metric: str, when: int) -> list[float] | None:
        """(value, low, high) of a metric such as "pass@1" in the first (0) or last (-1) evaluation; None without."""
        if not self.evaluations:
            return None
        value = self.evaluations[when].metrics.get(metric)
        return value if isinstance(value, list) and len(value) == 3 else None

    @property
    def after_rounds(self) -> list[float] | None:
        """pass@1 (value, low, high) of the last evaluated round of reinforcement learning."""
        names = [str(result.metrics.get("checkpoint", "")) for result in self.evaluations]
        rounds = [number for number, name in enumerate(names) if name.startswith("round-")]
        return self.metric("pass@1", rounds[-1]) if rounds else None

    def largest(self, metric: str, when: int = -1) -> tuple[int, list[float]] | None:
        """(k, (value, low, high)) of pass or maj at the largest k of an evaluation."""
        if not self.evaluations:
            return None
        found = [
            name.removeprefix(f"{metric}@") for name in self.evaluations[when].metrics if name.startswith(f"{metric}@")
        ]
        k = max((int(text) for text in found if text.isdigit()), default=0)
        value = self.metric(f"{metric}@{k}", when)
        return (k, value) if value else None


def build_index(root: Path) -> Path:
    """Write ``<root>/reports/index.html`` from what is on disk, and return it. A damaged run is a line, not an error."""
    entries = [read_entry(root, file) for file in sorted(root.glob("*/recipe.json"))]
    entries.sort(key=lambda entry: (str(entry.header.get("created_at", "")), entry.run_id))
    out = root / "reports" / "index.html"
    shown = [entry for entry in entries if entry.metric("pass@1", -1)][-POINTS:]
    history = None
    if shown:
        history = plots.svg("history", "pass@1 of each run", draw_history, shown, width=7.6, height=2.6)
    html = environment().get_template("index.html.j2").render(entries=entries[::-1], history=history, root=root.name)
    write_atomic(out, html)
    return out


def read_entry(root: Path, recipe_file: Path) -> Entry:
    """One run's line."""
    run_id = recipe_file.parent.name
    try:
        paths = RunPaths(root, run_id)
        header = paths.header
        header["recipe"]["grpo"]["rounds"]
        evaluations = [result for key in _evaluation_keys(paths) if (result := read_result(paths, key))]
    except (ValueError, KeyError, TypeError, OSError, json.JSONDecodeError) as error:
        return Entry(run_id, {}, (), 0, None, trouble=f"cannot be read: {type(error).__name__} {error}")
    evaluations.sort(key=lambda result: checkpoint_order(str(result.metrics.get("checkpoint", result.key))))
    inherited = [key for key in header.get("inherited", ()) if key.endswith("/update")]
    own = [*(paths.directory / "stages").glob("round-*/step-*/update/result.json")]
    report = paths.report("report")
    link = f"../{run_id}/reports/{report.name}" if report.is_file() else None
    return Entry(run_id, header, evaluations, len(inherited) + len(own), link)


def draw_history(axes: Any, entries: Sequence[Entry]) -> None:
    """pass@1 of each run's last evaluated checkpoint with its interval, the oldest run on the left."""
    rows = [entry.metric("pass@1", -1) or [] for entry in entries]
    spread = [[max(0.0, v - low) for v, low, _ in rows], [max(0.0, high - v) for v, _, high in rows]]
    axes.errorbar(
        range(len(rows)), [row[0] for row in rows], yerr=spread, fmt="o", color=plots.COLOURS[0], ms=4, lw=1.2
    )
    labels = [plots.shorten(entry.run_id, 18) for entry in entries]
    axes.set_xticks(
        range(len(rows)), labels, rotation=45 if len(rows) > 4 else 0, ha="right" if len(rows) > 4 else "center"
    )
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x", visible=False)
    plots.percent_axis(axes.yaxis)
    axes.set_title("pass@1 of the last evaluated checkpoint")


def _evaluation_keys(paths: RunPaths) -> list[str]:
    inherited = [key for key in paths.header.get("inherited", ()) if key.startswith("evaluate/")]
    stages = paths.directory / "stages"
    own = [str(file.parent.relative_to(stages)) for file in (stages / "evaluate").rglob("result.json")]
    return list(dict.fromkeys([*inherited, *sorted(own)]))
