"""The report: one HTML file that opens offline with its pictures inside, and a short Markdown version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval import plots
from eval.compare import compare_evaluations, sentence
from eval.doubts import doubts
from eval.gather import Evaluation, RunFacts, checkpoint_order, gather, natural
from eval.moved import most_moved, visible
from eval.summary import ACCURACIES, metric_title
from pipeline.rundir import RunPaths, write_atomic

TEMPLATES = Path(__file__).parent / "templates"
DESCRIPTIONS = ("mean_length", "truncated_share", "no_answer_share", "unscored_share", "answer_entropy")
SLICED = ("level", "subject", "source", "contaminated")
MAX_PARTS = 16
"""Parts of a picture by level or subject; the largest ones are drawn."""


def build_report(runs: Sequence[RunPaths], out: Path) -> Path:
    """Write the report of one run, or of several side by side, and return its file.

    The same runs give the same file byte for byte. ValueError names a run whose recipe cannot be read.
    """
    facts = [gather(paths) for paths in runs]
    if not facts:
        raise ValueError("a report needs at least one run; name one that `grpoflow status` lists")
    html = environment().get_template("report.html.j2").render(page(facts))
    write_atomic(out, html)
    return out


def build_markdown(paths: RunPaths) -> str:
    """The short report of a run: what it was, its checkpoints with intervals, what changed, what to doubt."""
    run = gather(paths)
    return environment(autoescape=False).get_template("report.md.j2").render(
        run=run, tables=[checkpoint_table([run], benchmark) for benchmark in run.benchmarks],
        sentences=own_sentences(run), doubts=doubts(run), totals=totals(run),
    )  # fmt: skip


def page(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Everything the template shows, as plain values and finished pictures."""
    benchmarks = list(dict.fromkeys(benchmark for run in runs for benchmark in run.benchmarks))
    return {
        "title": " · ".join(run.run_id for run in runs),
        "runs": runs,
        "sentences": {run.run_id: own_sentences(run) for run in runs},
        "between": between_runs(runs),
        "settings": settings(runs),
        "totals": [totals(run) for run in runs],
        "benchmarks": [benchmark_section(runs, benchmark) for benchmark in benchmarks],
        "learning": learning_pictures(runs),
        "moved": [(run, moved_problems(run)) for run in runs],
        "funnels": [(run, plots.svg(f"funnel-{run.run_id}", f"selection funnel of {run.run_id}", plots.draw_funnel, run.funnel,
                                    height=2.6))
                    for run in runs if run.funnel],
        "doubts": [(run, doubts(run)) for run in runs],
    }  # fmt: skip


def own_sentences(run: RunFacts) -> list[str]:
    """What reinforcement learning changed in a run, by benchmark, paired by problem."""
    lines = []
    for benchmark in run.benchmarks:
        pair = run.before_and_after(benchmark)
        if pair:
            where = f" ({benchmark})" if len(run.benchmarks) > 1 else ""
            names = [evaluation.checkpoint + where for evaluation in pair]
            lines += [sentence(d, *names) for d in compare_evaluations((run, pair[0]), (run, pair[1]))]
    return lines


def between_runs(runs: Sequence[RunFacts]) -> list[str]:
    """Each later run against the first, at the last checkpoint that both have evaluated on a common benchmark."""
    lines = []
    for run in runs[1:]:
        for benchmark in runs[0].benchmarks:
            names = [{e.checkpoint for e in r.evaluations if e.benchmark == benchmark} for r in (runs[0], run)]
            shared = sorted(names[0] & names[1], key=checkpoint_order)
            if shared:
                first, second = (r.evaluation(shared[-1], benchmark) for r in (runs[0], run))
                assert first and second
                label = f"{shared[-1]}, {benchmark}"
                found = compare_evaluations((runs[0], first), (run, second))
                lines += [sentence(d, f"{runs[0].run_id} ({label})", f"{run.run_id} ({label})") for d in found]
    return lines


def settings(runs: Sequence[RunFacts]) -> list[tuple[str, list[str], bool]]:
    """(dotted field, value in each run, whether they differ) of the resolved recipes."""
    flat = [dict(_flatten(run.recipe)) for run in runs]
    rows = []
    for field in dict.fromkeys(field for recipe in flat for field in recipe):
        values = [str(recipe.get(field, "")) for recipe in flat]
        rows.append((field, values, len(set(values)) > 1))
    return rows


def totals(run: RunFacts) -> dict[str, Any]:
    """What the run cost, all stages together."""
    names = ("seconds", "rollouts", "prompt_tokens", "completion_tokens")
    return {"run_id": run.run_id, **{name: sum(row[name] for row in run.cost) for name in names}}


def checkpoint_table(runs: Sequence[RunFacts], benchmark: str) -> dict[str, Any]:
    """Two tables of checkpoints, accuracies and descriptions: each metric's value with its interval."""
    evaluations = [(run, e) for run in runs for e in run.evaluations if e.benchmark == benchmark]
    accuracies, descriptions = _columns([e for _, e in evaluations])
    parts = [
        {
            "columns": [(metric_title(m, k), m in ACCURACIES or "share" in m) for m, k in columns],
            "rows": [{"run": run.run_id, "checkpoint": e.checkpoint, "cells": [e.get(m, k) for m, k in columns]}
                     for run, e in evaluations],
        }
        for columns in (accuracies, descriptions) if columns
    ]  # fmt: skip
    puts = list(dict.fromkeys(run.how_put(e) for run, e in evaluations))
    return {"benchmark": benchmark, "parts": parts, "put": puts, "several": len(runs) > 1}


def benchmark_section(runs: Sequence[RunFacts], benchmark: str) -> dict[str, Any]:
    """The table and pictures of one benchmark."""
    pictures = []
    for run in runs:
        pair = run.before_and_after(benchmark)
        series = [(e.checkpoint, e) for e in pair] if pair else _any_series(run, benchmark)
        if not series:
            continue
        slug = f"{run.run_id}-{benchmark}"
        curves = [
            plots.svg(f"{metric}-{slug}", f"{metric} of {run.run_id} on {benchmark}", plots.draw_k_curves, metric, series)
            for metric in ("maj@k", "pass@k") if series[-1][1].curve(metric)
        ]  # fmt: skip
        pictures.append({"run": run, "curves": curves, "series": series, "slices": _slices(run, series, slug)})
    chosen = [e for run in runs for e in run.evaluations if e.benchmark == benchmark]
    overview = None
    if len(runs) == 1 and plots.headline_metrics(chosen):
        overview = plots.svg(
            f"checkpoints-{benchmark}", f"checkpoints on {benchmark}", plots.draw_checkpoints, chosen,
            plots.headline_metrics(chosen),
        )  # fmt: skip
    return {"table": checkpoint_table(runs, benchmark), "pictures": pictures, "overview": overview}


def learning_pictures(runs: Sequence[RunFacts]) -> list[str]:
    """The learning curves that any of the runs has."""
    return [
        plots.svg(
            f"learning-{column}", title, plots.draw_learning, column, title, unit, runs, width=3.1, height=2.05
        )
        for column, title, unit in plots.CURVES
        if any(row[column] is not None for run in runs for row in run.steps)
    ]  # fmt: skip


def moved_problems(run: RunFacts) -> list[dict[str, Any]]:
    """By benchmark: the problems that moved most between warm start and last round."""
    found = []
    for benchmark in run.benchmarks:
        pair = run.before_and_after(benchmark)
        if pair:
            risen, fallen = most_moved(run, *pair)
            found.append({"benchmark": benchmark, "pair": pair, "sides": [("risen", risen), ("fallen", fallen)]})
    return found


def environment(*, autoescape: bool = True) -> Environment:
    """Templates with the filters they use; whatever a completion contains is escaped."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=autoescape, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters.update(
        number=number, measure=measure, svg=Markup, visible=visible, duration=duration, cell=markdown_cell
    )
    return found


def number(value: Any, digits: int = 3) -> str:
    """A figure for a table: thousands separated, floats to ``digits`` significant digits, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    return str(value)


def measure(row: dict[str, Any] | None, percent: bool = True) -> str:
    """ "62.5 [55.0, 69.9]": the value with its interval, in per cent for shares."""
    if row is None or row["value"] is None:
        return "–"
    scale, digits = (100, 1) if percent else (1, 2 if abs(row["value"]) < 10 else 1)
    value, low, high = (f"{scale * row[part]:.{digits}f}" for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def duration(seconds: float) -> str:
    """ "2 h 05 min", "3 min 20 s", "4.2 s"."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s" if seconds >= 60 else f"{seconds:.1f} s"


def markdown_cell(text: Any) -> str:
    """Text that stays inside one cell of a Markdown table and starts no markup."""
    flat = " ".join(str(text).split())
    for mark in "\\`*_[]<>|#":
        flat = flat.replace(mark, "\\" + mark)
    return flat


Columns = list[tuple[str, int | None]]


def _columns(evaluations: Sequence[Evaluation]) -> tuple[Columns, Columns]:
    """Accuracies (greedy, and the others at the k that are sliced too: the recipe's own), and the descriptions."""
    present = {(m, k) for e in evaluations for m, k, part in e.measures if part == "all"}
    sliced = {(m, k) for e in evaluations for m, k, part in e.measures if part != "all"}
    wanted: Columns = [("greedy", None)]
    for metric in ("pass@k", "maj@k", "self_consistency_rm", "best_of_k_rm"):
        ks = sorted({k for m, k in (sliced or present) if m == metric and k is not None})
        wanted += [(metric, k) for k in ks if metric == "pass@k" or k > 1]
    described: Columns = [(metric, None) for metric in DESCRIPTIONS]
    return [c for c in wanted if c in present], [c for c in described if c in present]


def _any_series(run: RunFacts, benchmark: str) -> list[tuple[str, Evaluation]]:
    return [(e.checkpoint, e) for e in run.evaluations if e.benchmark == benchmark]


def _slices(run: RunFacts, series: Sequence[tuple[str, Evaluation]], slug: str) -> list[dict[str, Any]]:
    """Picture and rows for each way of slicing that has at least two parts."""
    found = []
    for kind in SLICED:
        names = {part for _, e in series for part in e.slices() if part.startswith(f"{kind}=")}
        sized = sorted(names, key=lambda part: -max(_size(e, part) for _, e in series))[:MAX_PARTS]
        parts = sorted(sized, key=natural)
        if len(parts) < 2:
            continue
        picture = plots.svg(
            f"slices-{kind}-{slug}", f"pass@1 by {kind}", plots.draw_slices, parts, series, "pass@k", 1,
            height=1.1 + 0.32 * len(parts),
        )  # fmt: skip
        rows = [(part.partition("=")[2], [e.get("pass@k", 1, part) for _, e in series]) for part in parts]
        found.append({"kind": kind, "picture": picture, "rows": rows, "left_out": len(names) - len(parts)})
    return found


def _size(evaluation: Evaluation, part: str) -> int:
    row = evaluation.get("pass@k", 1, part)
    return row["n_problems"] if row else 0


def _flatten(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, item in value.items():
        if isinstance(item, dict) and item:
            rows += _flatten(item, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, item))
    return rows
