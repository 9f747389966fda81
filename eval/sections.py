"""What stands on the page of a report: plain values, sentences and finished pictures, section by section."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval import plots
from eval.claims import claims
from eval.compare import compare_evaluations, sentence
from eval.doubts import doubts
from eval.gather import Evaluation, RunFacts, checkpoint_order, natural
from eval.moved import most_moved
from eval.summary import ACCURACIES, VOTES, metric_title

DESCRIPTIONS = ("mean_length", "truncated_share", "no_answer_share", "unscored_share", "answer_entropy")
SLICED = ("level", "subject", "source", "contaminated")
MAX_PARTS = 16
"""Parts of a picture by level or subject; the largest ones are drawn."""


def page(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Everything the template shows, as plain values and finished pictures."""
    benchmarks = list(dict.fromkeys(benchmark for run in runs for benchmark in run.benchmarks))
    return {
        "title": " · ".join(run.run_id for run in runs),
        "runs": runs,
        "claims": claims(runs),
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
        "reward_models": [(run, plots.svg(f"reward-models-{run.run_id}", f"AUC of the reward models of {run.run_id}",
                                          plots.draw_reward_models, run.reward_models))
                          for run in runs if run.reward_models],
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
            checkpoint = last_shared([runs[0], run], benchmark)
            if checkpoint is None:
                continue
            pair = [(r, e) for r in (runs[0], run) if (e := r.evaluation(checkpoint, benchmark))]
            names = [f"{r.run_id} ({checkpoint}, {benchmark})" for r, _ in pair]
            if len(set.intersection(*({row.problem_id for row in r.samples(e)} for r, e in pair))) < 2:
                lines.append(f"{' and '.join(names)} were evaluated on different problems: they cannot be paired.")
                continue
            lines += [sentence(d, *names) for d in compare_evaluations(*pair)]
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
    """The tables and pictures of one benchmark; of several runs also their curves on one picture."""
    pictures = []
    for run in runs:
        pair = run.before_and_after(benchmark)
        series = [(e.checkpoint, e) for e in pair] if pair else _any_series(run, benchmark)
        if series:
            slug = f"{run.run_id}-{benchmark}"
            shown = {"run": run, "series": series, "curves": k_curves(series, slug), "slices": _slices(series, slug)}
            pictures.append(shown)
    overview, together = None, None
    if len(runs) == 1:
        chosen = [e for _, e in _any_series(runs[0], benchmark)]
        overview = plots.svg(
            f"checkpoints-{benchmark}", f"checkpoints on {benchmark}", plots.draw_checkpoints, chosen,
            plots.headline_metrics(chosen),
        )  # fmt: skip
    elif checkpoint := last_shared(runs, benchmark):
        evaluated = [(run.run_id, e) for run in runs if (e := run.evaluation(checkpoint, benchmark))]
        together = {"checkpoint": checkpoint, "curves": k_curves(evaluated, f"together-{benchmark}")}
    return {
        "table": checkpoint_table(runs, benchmark), "pictures": pictures, "overview": overview, "together": together,
    }  # fmt: skip


def k_curves(series: Sequence[tuple[str, Evaluation]], slug: str) -> list[str]:
    """Maj@K and Pass@K pictures of labelled evaluations."""
    return [
        plots.svg(f"{metric}-{slug}", f"{metric}: {slug}", plots.draw_k_curves, metric, series)
        for metric in ("maj@k", "pass@k")
        if any(e.curve(metric) for _, e in series)
    ]


def last_shared(runs: Sequence[RunFacts], benchmark: str) -> str | None:
    """The last checkpoint that all runs with this benchmark have evaluated on it, when there are at least two."""
    names = [{e.checkpoint for e in run.evaluations if e.benchmark == benchmark} for run in runs]
    names = [found for found in names if found]
    shared = sorted(set.intersection(*names), key=checkpoint_order) if len(names) > 1 else []
    return shared[-1] if shared else None


def learning_pictures(runs: Sequence[RunFacts]) -> list[str]:
    """The learning curves that any of the runs has: figures of the steps, reward components, losses of SFT stages."""
    components = dict.fromkeys(name for run in runs for name in run.components)
    curves = [*plots.CURVES, *((c, c.replace("_", ": ", 1).replace("_", " "), "mean, unweighted") for c in components)]
    drawn = [
        plots.svg(
            f"learning-{column}", title, plots.draw_learning, column, title, unit, runs, width=3.1, height=2.05
        )
        for column, title, unit in curves
        if any(row.get(column) is not None for run in runs for row in run.steps)
    ]  # fmt: skip
    stages = dict.fromkeys(stage for run in runs for stage in run.supervised)
    return drawn + [
        plots.svg(f"loss-{stage}", f"loss of {stage}", plots.draw_losses, stage, runs, width=3.1, height=2.05)
        for stage in stages
    ]


def moved_problems(run: RunFacts) -> list[dict[str, Any]]:
    """By benchmark: the problems that moved most between warm start and last round."""
    found = []
    for benchmark in run.benchmarks:
        pair = run.before_and_after(benchmark)
        if pair:
            risen, fallen = most_moved(run, *pair)
            found.append({"benchmark": benchmark, "pair": pair, "sides": [("risen", risen), ("fallen", fallen)]})
    return found


Columns = list[tuple[str, int | None]]


def _columns(evaluations: Sequence[Evaluation]) -> tuple[Columns, Columns]:
    """Accuracies (greedy, and the others at the k that are sliced too: the recipe's own), and the descriptions."""
    present = {(m, k) for e in evaluations for m, k, part in e.measures if part == "all"}
    sliced = {(m, k) for e in evaluations for m, k, part in e.measures if part != "all"}
    wanted: Columns = [("greedy", None)]
    for metric in VOTES:
        ks = sorted({k for m, k in (sliced or present) if m == metric and k is not None})
        wanted += [(metric, k) for k in ks if metric == "pass@k" or k > 1]
    described: Columns = [(metric, None) for metric in DESCRIPTIONS]
    return [c for c in wanted if c in present], [c for c in described if c in present]


def _any_series(run: RunFacts, benchmark: str) -> list[tuple[str, Evaluation]]:
    return [(e.checkpoint, e) for e in run.evaluations if e.benchmark == benchmark]


def _slices(series: Sequence[tuple[str, Evaluation]], slug: str) -> list[dict[str, Any]]:
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
