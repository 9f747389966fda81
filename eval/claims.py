"""The paper's claims at laptop scale (arXiv 2402.03300, Figures 5 to 7): what runs of those recipes show, how surely.

Whatever comes out is reported as it is: a claim that is not seen here is neither wrong nor hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from eval import plots
from eval.compare import SIGNIFICANT, Difference, compare_evaluations, format_p, paired_difference, problem_accuracies
from eval.gather import Evaluation, RunFacts
from eval.intervals import resampled_means

METHODS = ("RFT", "Online RFT", "GRPO+OS", "GRPO+PS")
"""Figure 5's order, the weakest first. OS and PS: outcome and process supervision."""
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of the paper beside what was found; ``picture`` is an SVG."""

    title: str
    paper: str
    found: str
    picture: str

    @property
    def sentence(self) -> str:
        """The claim and what was found, for a terminal."""
        return f"{self.title}. {self.found}"


@dataclass(frozen=True, slots=True)
class SeedsDifference:
    """Mean difference of two methods over seeds, with its interval over seeds and problems.

    ``agreeing`` of ``seeds`` training seeds have the sign of the mean.
    """

    difference: float
    low: float
    high: float
    agreeing: int
    seeds: int


def claims(runs: Sequence[RunFacts]) -> list[Claim]:
    """The claims that these runs were made for, by the names of their recipes; others give none."""
    found = []
    compared = [run for run in runs if run.recipe["name"] == "figure5" and run.benchmarks]
    if compared and (claim := figure5(compared)):
        found.append(claim)
    for run in runs:
        judge = OF_ONE_RUN.get(run.recipe["name"])
        if judge is not None and (claim := judge(run)):
            found.append(claim)
    return found


def method(recipe: Mapping[str, Any]) -> str:
    """Which of Figure 5's methods a recipe trains by."""
    algorithm = recipe["grpo"]["objective"]["algorithm"]
    if algorithm == "grpo":
        return "GRPO+PS" if recipe["grpo"]["advantages"]["supervision"] == "process" else "GRPO+OS"
    return {"rft": "RFT", "online_rft": "Online RFT"}.get(algorithm, algorithm)


def figure5(runs: Sequence[RunFacts]) -> Claim | None:
    """RFT, Online RFT, GRPO with outcome and with process supervision: pass@1 after the last round that all reached."""
    benchmark = runs[0].benchmarks[0]
    table: dict[str, dict[int, RunFacts]] = {}
    for run in runs:
        table.setdefault(method(run.recipe), {})[run.recipe["seed"]] = run
    present = [name for name in METHODS if name in table]
    names = [{e.checkpoint for e in run.evaluations if e.checkpoint.startswith("round-")} for run in runs]
    shared = sorted(set.intersection(*names))
    if len(present) < 2 or not shared:
        return None
    values = {name: {s: _accuracies(run, shared[-1], benchmark) for s, run in table[name].items()} for name in present}
    pairs = [(a, b, seeds_difference(values[a], values[b])) for a, b in pairwise(present)]
    lines = plots.svg(
        "claim-figure5", "pass@1 by method and round", draw_methods, table, benchmark, width=5.6, height=3.2
    )
    return Claim(
        "Figure 5: online beats offline, graded beats all-or-nothing, process beats outcome supervision",
        f"The paper's order on GSM8K and MATH: {' < '.join(METHODS)}.",
        ordering_sentence(pairs, shared[-1]), lines,
    )  # fmt: skip


def ordering_sentence(pairs: Sequence[tuple[str, str, SeedsDifference]], checkpoint: str) -> str:
    """Whether the methods stand in the paper's order, and which steps of it are sure."""
    rising, sure = all(d.difference > 0 for _, _, d in pairs), all(d.low > 0 for _, _, d in pairs)
    head = (
        "The paper's order is seen here" if rising and sure
        else "The means stand in the paper's order, but not every step of it is sure" if rising
        else "The paper's order is not seen here"
    )  # fmt: skip
    steps = "; ".join(
        f"{b} over {a}: {100 * d.difference:+.1f} points (95\u00a0% interval {100 * d.low:+.1f} to {100 * d.high:+.1f}, "
        f"the same sign in {d.agreeing} of {d.seeds} seeds)"
        for a, b, d in pairs
    )
    few = " One seed: the interval is over problems alone." if pairs[0][2].seeds == 1 else ""
    return f"{head}, in pass@1 at {checkpoint}. {steps}.{few}"


def seeds_difference(
    first: Mapping[int, Mapping[str, float]], second: Mapping[int, Mapping[str, float]], *, seed: int = 0
) -> SeedsDifference:
    """Second less first, paired by training seed and problem; the bootstrap draws seeds, then problems of each.

    ValueError without a common seed. With one seed the interval is over its problems alone.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ValueError("two methods have no training seed in common: run both from the same seeds")
    changes = []
    for number in shared:
        common = sorted(first[number].keys() & second[number].keys())
        changes.append(np.array([second[number][p] - first[number][p] for p in common], dtype=np.float64))
    count = len(changes)
    # [S, R, S]: for each seed as many independent resamples as a draw of S seeds can want of it.
    drawn = np.stack([
        resampled_means(change, resamples=RESAMPLES * count, seed=seed + i).reshape(RESAMPLES, count)
        for i, change in enumerate(changes)
    ])  # fmt: skip
    chosen = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    means = np.take_along_axis(drawn, chosen[None], axis=0)[0].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    by_seed = [float(change.mean()) for change in changes]
    mean = sum(by_seed) / count
    agreeing = sum(value * mean > 0 for value in by_seed)
    return SeedsDifference(mean, float(low), float(high), agreeing, count)


def figure6(run: RunFacts) -> Claim | None:
    """Iterative RL: the gain of the first round and of the second, after the reward model was refreshed."""
    benchmark = run.benchmarks[0] if run.benchmarks else None
    evaluations = [run.evaluation(name, benchmark) for name in ("warm-start", "round-01", "round-02")]
    if benchmark is None or None in evaluations:
        return None
    start, one, two = (problem_accuracies(run.samples(e))["pass@1"] for e in evaluations if e)
    first, second = paired_difference("pass@1", start, one), paired_difference("pass@1", one, two)
    shown = [e for e in run.evaluations if e.benchmark == benchmark and e.checkpoint != "final"]
    picture = plots.svg(
        f"claim-{run.run_id}", "accuracy by round", plots.draw_checkpoints, shown, plots.headline_metrics(shown)
    )
    return Claim(
        "Figure 6: a second iteration with a refreshed reward model improves further",
        "The paper: iterative reinforcement learning improves the policy, the first iteration most.",
        iteration_sentence(first, second), picture,
    )  # fmt: skip


def iteration_sentence(first: Difference, second: Difference) -> str:
    """Which of the two rounds is surely a gain, and which gained more."""
    sure = [d.difference > 0 and d.p_value <= SIGNIFICANT for d in (first, second)]
    most = first.difference > second.difference
    head = {
        (True, True): f"Both rounds are sure gains and the first {'gained more' if most else 'did not gain more'}",
        (True, False): "The first round is a sure gain, the second cannot be told from none",
        (False, True): "The second round is a sure gain, the first cannot be told from none",
        (False, False): "Neither round's gain can be told from none",
    }[sure[0], sure[1]]
    seen = "is seen here" if all(sure) and most else "is not seen here in full"
    return (
        f"{head}: {_gain('round 1', first)}, {_gain('round 2', second)}. The paper's picture {seen}; one training seed."
    )


def figure7(run: RunFacts) -> Claim | None:
    """Maj@K and Pass@K before and after reinforcement learning."""
    benchmark = run.benchmarks[0] if run.benchmarks else None
    pair = run.before_and_after(benchmark) if benchmark else None
    if pair is None:
        return None
    found = compare_evaluations((run, pair[0]), (run, pair[1]))
    votes = next((d for d in found if d.metric.startswith("maj@")), None)
    passes = next((d for d in found if d.metric.startswith("pass@") and d.metric != "pass@1"), None)
    if votes is None or passes is None:
        return None
    series = [(e.checkpoint, e) for e in pair]
    picture = plots.svg(f"claim-{run.run_id}", "Maj@K and Pass@K", draw_both, series, width=5.6, height=3.2)
    return Claim(
        "Figure 7: reinforcement learning raises Maj@K but not Pass@K",
        "The paper: the policy's distribution becomes more robust, its reach does not grow.",
        sharpening_sentence(votes, passes), picture,
    )  # fmt: skip


def sharpening_sentence(votes: Difference, passes: Difference) -> str:
    """Whether the vote rose and the reach did not."""
    rose = [d.difference > 0 and d.p_value <= SIGNIFICANT for d in (votes, passes)]
    head = {
        (
            True,
            False,
        ): "The paper's picture is seen here: the vote rose, and a rise of the reach cannot be told from none",
        (True, True): "Half of the paper's picture is seen here: the vote rose, but so did the reach",
        (
            False,
            True,
        ): "The paper's picture is not seen here: the reach rose, and a rise of the vote cannot be told from none",
        (False, False): "The paper's picture is not seen here: no rise of the vote can be told from none",
    }[rose[0], rose[1]]
    return f"{head}: {_gain(votes.metric, votes)}, {_gain(passes.metric, passes)}; one training seed."


def draw_methods(axes: Any, table: Mapping[str, Mapping[int, RunFacts]], benchmark: str) -> None:
    """pass@1 by checkpoint: a thin line a seed, a thick one for the mean of each method."""
    checkpoints: list[str] = []
    for number, name in enumerate(name for name in METHODS if name in table):
        rows = []
        for run in table[name].values():
            shown = [e for e in run.evaluations if e.benchmark == benchmark and e.checkpoint != "final"]
            checkpoints = max(checkpoints, [e.checkpoint for e in shown], key=len)
            rows.append([row["value"] for e in shown if (row := e.get("pass@k", 1))])
            axes.plot(range(len(rows[-1])), rows[-1], color=plots.COLOURS[number], lw=0.7, alpha=0.45)
        length = min(map(len, rows))
        mean = np.mean([row[:length] for row in rows], axis=0)
        axes.plot(range(length), mean, color=plots.COLOURS[number], lw=2.0, marker="o", ms=4, label=name)
    axes.set_xticks(range(len(checkpoints)), checkpoints)
    plots.percent_axis(axes.yaxis)
    axes.set_ylabel("pass@1")
    axes.legend(loc="best")


def draw_both(axes: Any, series: Sequence[tuple[str, Evaluation]]) -> None:
    """Maj@K (full lines) and Pass@K (dashed) on one picture, one colour a checkpoint, as in the paper."""
    for (label, evaluation), colour in zip(series, plots.COLOURS, strict=False):
        for metric, line in (("maj@k", "-"), ("pass@k", "--")):
            rows = evaluation.curve(metric)
            ks = [row["k"] for row in rows]
            axes.fill_between(ks, [r["low"] for r in rows], [r["high"] for r in rows], color=colour, alpha=0.10, lw=0)
            title = f"{metric.capitalize().replace('@k', '@K')}, {label}"
            axes.plot(ks, [r["value"] for r in rows], color=colour, ls=line, label=title)
    plots.k_axis(axes, max(row["k"] for _, e in series for row in e.curve("pass@k")))
    axes.legend(loc="best")


def _accuracies(run: RunFacts, checkpoint: str, benchmark: str) -> dict[str, float]:
    evaluation = run.evaluation(checkpoint, benchmark)
    assert evaluation is not None
    return problem_accuracies(run.samples(evaluation))["pass@1"]


def _gain(name: str, d: Difference) -> str:
    return (
        f"{name} {100 * d.difference:+.1f} points (95\u00a0% interval {100 * d.low:+.1f} to {100 * d.high:+.1f}, "
        f"{format_p(d.p_value)})"
    )


OF_ONE_RUN = {"figure6": figure6, "figure7": figure7}
"""Recipes that make a claim in one run; figure5's takes a run a method."""
