"""Pictures of a run: SVG that follows the page's colours, and one PNG for a README.

Every ``draw_*`` function fills one matplotlib Axes. In SVG the colours become CSS variables, so one picture serves
screen, dark screen and paper; letters stay letters, so they can be searched and copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from eval.gather import Evaluation, RunFacts
from eval.summary import metric_title

INK, SOFT, GRID = "#1b1d22", "#5a6069", "#d9dce1"
COLOURS = ("#1f66b8", "#c4501b", "#16866a", "#8a4fb0", "#96700a", "#b8325f")
"""Told apart by people who see few colours, and of about equal weight on white."""
VARIABLES = {INK: "ink", SOFT: "soft", GRID: "grid", **{colour: f"c{i}" for i, colour in enumerate(COLOURS, 1)}}
STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "font.family": "sans-serif", "font.size": 9,
    "text.color": INK, "axes.labelcolor": SOFT, "axes.edgecolor": SOFT, "axes.linewidth": 0.7, "axes.grid": True,
    "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelsize": 8,
    "ytick.labelsize": 8, "legend.frameon": False, "legend.fontsize": 8, "lines.linewidth": 1.6,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlecolor": INK,
}  # fmt: skip

CURVES = (
    ("reward", "reward", "mean of scored completions"),
    ("correct", "correct", "share of scored completions"),
    ("kl", "KL to the reference policy", "nats a token"),
    ("entropy", "entropy", "nats a token"),
    ("length", "completion length", "tokens"),
    ("truncated_share", "truncated", "share of completions"),
    ("grad_norm", "gradient norm", "before clipping"),
    ("gap_mean", "sampler–learner gap", "mean |Δ logprob|, nats"),
    ("zero_variance_share", "groups of equal rewards", "share of groups"),
)
"""(column of ``RunFacts.steps``, title, unit) of the learning curves."""


def svg(
    name: str, title: str, draw: Callable[..., None], *arguments: Any, width: float = 4.6, height: float = 2.9
) -> str:
    """What ``draw(axes, *arguments)`` draws as an inline SVG with CSS variables as colours.

    ``name`` makes its ids unique on the page. Width and height in inches give the shape; the page scales it.
    """
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        draw(axes, *arguments)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Names such as figure_1 occur in every picture; only hashed ids are referred to.
    text = re.sub(r' id="[A-Za-z][A-Za-z0-9.]*_\d+"', "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable}, {colour})")
    text = re.sub(
        r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg xmlns="http://www.w3.org/2000/svg" \1 role="img">', text
    )
    return text.replace(">", f"><title>{_escape(title)}</title>", 1)


def percent_axis(axis: Any) -> None:
    """Shares as per cent."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))


def k_axis(axes: Any, largest: int) -> None:
    """k from 1 to ``largest`` in powers of two across, shares upwards."""
    if largest > 1:
        axes.set_xscale("log", base=2)
        axes.set_xlim(2**-0.15, largest * 2**0.15)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    percent_axis(axes.yaxis)
    axes.set_xlabel("k, completions")


def draw_k_curves(axes: Any, metric: str, series: Sequence[tuple[str, Evaluation]]) -> None:
    """pass@k or maj@k over k, log scale, one line an evaluation with its interval as a band."""
    largest = 1
    for number, (label, evaluation) in enumerate(series):
        rows = evaluation.curve(metric)
        ks = [row["k"] for row in rows]
        colour = COLOURS[number % len(COLOURS)]
        axes.fill_between(ks, [r["low"] for r in rows], [r["high"] for r in rows], color=colour, alpha=0.15, lw=0)
        axes.plot(
            ks, [r["value"] for r in rows], color=colour, label=label, marker="o" if len(ks) <= 16 else None, ms=3
        )
        largest = max([largest, *ks])
    k_axis(axes, largest)
    axes.set_title(metric.capitalize().replace("@k", "@K"))
    axes.legend(loc="best")


def draw_learning(axes: Any, column: str, title: str, unit: str, runs: Sequence[RunFacts]) -> None:
    """One column of the training steps, one line a run; thin lines stand at the heads of rounds of a single run."""
    for number, run in enumerate(runs):
        points = [(row["number"], row[column]) for row in run.steps if row.get(column) is not None]
        mark = "o" if len(points) <= 12 else None
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=COLOURS[number % len(COLOURS)], label=run.run_id,
            marker=mark, ms=3,
        )  # fmt: skip
    if len(runs) == 1:
        for row in runs[0].steps:
            if row["step"] == 1 and row["number"] > 1:
                axes.axvline(row["number"] - 0.5, color=SOFT, lw=0.7, ls=(0, (3, 3)))
    if column in ("correct", "truncated_share", "zero_variance_share"):
        percent_axis(axes.yaxis)
    if column in ("truncated_share", "grad_norm", "gap_mean"):
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel("step")


def draw_losses(axes: Any, stage: str, runs: Sequence[RunFacts]) -> None:
    """Loss of a supervised stage by optimizer step, one line a run."""
    for number, run in enumerate(runs):
        rows = run.supervised.get(stage, [])
        axes.plot([r["number"] for r in rows], [r["loss"] for r in rows], color=COLOURS[number % len(COLOURS)], lw=1.0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_title(f"{stage}: loss")
    axes.set_ylabel("nats a token")
    axes.set_xlabel("optimizer step")


def draw_checkpoints(axes: Any, evaluations: Sequence[Evaluation], metrics: Sequence[tuple[str, int | None]]) -> None:
    """Metrics by checkpoint, points with their intervals, beside each other."""
    for number, (metric, k) in enumerate(metrics):
        shift = (number - (len(metrics) - 1) / 2) * 0.13
        places = [(x + shift, row) for x, e in enumerate(evaluations) if (row := e.get(metric, k))]
        xs, ys = [x for x, _ in places], [row["value"] for _, row in places]
        below = [max(0.0, row["value"] - row["low"]) for _, row in places]
        above = [max(0.0, row["high"] - row["value"]) for _, row in places]
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(
            xs,
            ys,
            yerr=[below, above],
            color=colour,
            fmt="o-",
            ms=4,
            lw=1.2,
            capsize=2.5,
            label=metric_title(metric, k),
        )
    axes.set_xticks(range(len(evaluations)), [e.checkpoint for e in evaluations])
    axes.set_xlim(-0.5, len(evaluations) - 0.5)
    axes.grid(axis="x", visible=False)
    percent_axis(axes.yaxis)
    axes.legend(loc="best")


def draw_slices(axes: Any, parts: Sequence[str], series: Sequence[tuple[str, Evaluation]], metric: str, k: int) -> None:
    """A metric by level or subject: points with their intervals, one colour a checkpoint, parts from top to bottom."""
    for number, (label, evaluation) in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * 0.22
        places = [(y + shift, row) for y, part in enumerate(parts) if (row := evaluation.get(metric, k, part))]
        xs = [row["value"] for _, row in places]
        spread = [
            [max(0.0, row["value"] - row["low"]) for _, row in places],
            [max(0.0, row["high"] - row["value"]) for _, row in places],
        ]
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(
            xs, [y for y, _ in places], xerr=spread, color=colour, fmt="o", ms=4, lw=1.2, capsize=2, label=label
        )
    axes.set_yticks(range(len(parts)), [shorten(part.partition("=")[2], 28) for part in parts])
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    percent_axis(axes.xaxis)
    axes.set_xlabel(metric_title(metric, k))
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)


def draw_funnel(axes: Any, funnel: Sequence[dict[str, Any]]) -> None:
    """How many problems each rule of the selection left."""
    kept = [row["kept"] for row in funnel]
    axes.barh(range(len(kept)), kept, color=COLOURS[0], height=0.5)
    for y, row in enumerate(funnel):
        note = f" {row['kept']:,}" + (f"  (−{row['set_aside']:,})" if row["set_aside"] else "")
        axes.text(row["kept"], y, note, va="center", fontsize=8)
    axes.set_yticks(range(len(kept)), [str(row["rule"]) for row in funnel])
    axes.set_ylim(len(kept) - 0.5, -0.5)
    axes.set_xlim(0, max(kept, default=1) * 1.25 or 1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("problems left")


def draw_reward_models(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """AUC of each kind of reward model: as first trained, then on each round's rollouts before and after its refresh."""
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        colour, own = COLOURS[number % len(COLOURS)], [row for row in rows if row["model"] == model and row.get("auc")]
        shift = 0.1 * number
        for row in own:
            axes.plot(
                _round_of(row["stage"]) + shift, row["auc"], "o", ms=6, color=colour,
                mfc="none" if row["when"] == "before" else colour,
                label=f"{model}, {'after' if row['when'] == 'heldout' else row['when']}",
            )  # fmt: skip
        for round_ in {_round_of(row["stage"]) for row in own}:
            pair = [row["auc"] for row in own if _round_of(row["stage"]) == round_]
            axes.plot([round_ + shift] * len(pair), pair, color=colour, lw=1.2)
    last = max(_round_of(row["stage"]) for row in rows)
    axes.set_xticks(range(last + 1), ["first", *(f"round {number}" for number in range(1, last + 1))])
    axes.set_xlim(-0.5, last + 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_title("AUC on rollouts of the newest policy")
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(named.values(), named.keys(), loc="best")


def _round_of(stage: str) -> int:
    """0 for the first training, 2 for ``round-02/refresh``."""
    return int(stage[len("round-") : stage.index("/")]) if "/" in stage else 0


def learning_picture(run: RunFacts, out: Path) -> Path:
    """A PNG of what a run learnt: checkpoints with intervals, beside reward and completion length by step."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained", dpi=160)
        left, middle, right = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.5, 1, 1)})
        benchmark = run.benchmarks[0] if run.benchmarks else ""
        evaluations = [e for e in run.evaluations if e.benchmark == benchmark]
        if evaluations:
            draw_checkpoints(left, evaluations, headline_metrics(evaluations))
        left.set_title(f"{benchmark}: held-out problems, 95 % intervals")
        for axes, (column, title, unit) in ((middle, CURVES[0]), (right, CURVES[4])):
            draw_learning(axes, column, title, unit, [run])
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="png", metadata={"Software": None})
    return out


def headline_metrics(evaluations: Sequence[Evaluation]) -> list[tuple[str, int | None]]:
    """pass@1, maj@K and pass@K at the largest K that all evaluations have."""
    shared = (
        set.intersection(*(set(e.ks("pass@k")) & set(e.ks("maj@k")) for e in evaluations)) if evaluations else set()
    )
    largest = max(shared, default=1)
    wanted: list[tuple[str, int | None]] = [("pass@k", 1)] if 1 in shared else []
    return [*wanted, ("maj@k", largest), ("pass@k", largest)] if largest > 1 else wanted


def shorten(text: str, size: int) -> str:
    """The text, cut with an ellipsis to at most ``size`` characters."""
    return text if len(text) <= size else text[: size - 1] + "…"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
