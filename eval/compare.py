"""Two policies on the same problems: the paired difference, how sure it is, and what it means in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.gather import Evaluation, RunFacts, gather
from eval.intervals import resampled_means
from eval.metrics import maj_at_k, pass_at_k
from eval.summary import Sampled
from pipeline.rundir import RunPaths

RESAMPLES = 10_000
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean over common problems of (second - first), in the metric's own unit.

    ``low`` and ``high``: paired percentile bootstrap over problems, 95 %. ``p_value``: sign-flip permutation of the
    per-problem differences, or McNemar's exact test for one verdict a problem (``test`` says which).
    """

    metric: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    test: str
    n_problems: int


def paired_difference(
    metric: str, first: Mapping[str, float], second: Mapping[str, float], *, seed: int = 0
) -> Difference:
    """Compare per-problem values of two policies on the problems that both have. ValueError with fewer than two."""
    common = sorted(first.keys() & second.keys())
    if len(common) < 2:
        raise ValueError(f"comparing {metric}: {len(common)} common problems; expected at least 2 evaluated by both")
    a, b = (np.array([values[problem] for problem in common], dtype=np.float64) for values in (first, second))
    change = b - a
    means = resampled_means(change, resamples=RESAMPLES, seed=seed)
    low, high = np.quantile(means, [0.025, 0.975])
    if metric == "greedy":
        p_value, test = mcnemar(int((change < 0).sum()), int((change > 0).sum())), "McNemar, exact"
    else:
        p_value, test = permutation_p(change, seed=seed), "sign-flip permutation"
    return Difference(
        metric,
        float(a.mean()),
        float(b.mean()),
        float(change.mean()),
        float(low),
        float(high),
        p_value,
        test,
        len(common),
    )


def permutation_p(change: Sequence[float] | np.ndarray, *, draws: int = RESAMPLES, seed: int = 0) -> float:
    """Two-sided p of the mean of paired differences when each sign is a coin's throw.

    Counted over all sign patterns for up to 12 differing problems, else (hits + 1) / (draws + 1) of random ones
    (Phipson and Smyth 2010, which never gives 0). Problems without a difference cannot change sign and are left out.
    """
    values = np.asarray(change, dtype=np.float64)
    values = values[np.abs(values) > 1e-12]
    if not len(values):
        return 1.0
    target = abs(values.sum()) * (1 - 1e-9)
    if len(values) <= 12:
        patterns = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1
        return float((np.abs((2 * patterns - 1) @ values) >= target).mean())
    rng = np.random.default_rng(seed)
    block = max(1, 4_000_000 // len(values))
    hits = 0
    for start in range(0, draws, block):
        signs = 2 * rng.integers(0, 2, size=(min(block, draws - start), len(values)), dtype=np.int8) - 1
        hits += int((np.abs(signs @ values) >= target).sum())
    return (hits + 1) / (draws + 1)


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided McNemar p: ``lost`` problems right only before, ``gained`` right only after.

    2 * P(X <= min(lost, gained)) for X binomial with lost + gained throws of a fair coin, at most 1.
    """
    n = lost + gained
    tail = sum(math.comb(n, i) for i in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**n)


def problem_accuracies(rows: Sequence[Sampled], *, ks: Sequence[int] = ()) -> dict[str, dict[str, float]]:
    """Metric to problem to value: "pass@1", "maj@k" and "pass@k" for the ks that a problem has samples for, "greedy"."""
    groups: dict[str, list[Sampled]] = {}
    for row in rows:
        if row.scored:
            groups.setdefault(row.problem_id, []).append(row)
    table: dict[str, dict[str, float]] = {}
    for problem_id, members in groups.items():
        drawn = [row for row in members if not row.greedy]
        greedy = [row for row in members if row.greedy]
        if drawn:
            table.setdefault("pass@1", {})[problem_id] = sum(bool(r.correct) for r in drawn) / len(drawn)
            answers, verdicts = [row.answer for row in drawn], [row.correct for row in drawn]
            for k in ks:
                if 1 < k <= len(drawn):
                    table.setdefault(f"maj@{k}", {})[problem_id] = maj_at_k(answers, verdicts, k)
                    table.setdefault(f"pass@{k}", {})[problem_id] = pass_at_k(len(drawn), sum(map(bool, verdicts)), k)
        if greedy:
            table.setdefault("greedy", {})[problem_id] = float(bool(greedy[0].correct))
    return table


def sentence(found: Difference, first: str, second: str) -> str:
    """The comparison in plain words, and what the interval leaves open."""
    sure = found.p_value <= SIGNIFICANT and found.difference != 0
    swapped = sure and found.difference < 0
    better, worse = (first, second) if swapped else (second, first)
    points, low, high = (100 * value for value in (found.difference, found.low, found.high))
    if swapped:  # the interval is of the difference that the sentence speaks of
        points, low, high = -points, -high, -low
    figures = f"95 % interval {low:+.1f} to {high:+.1f}, {format_p(found.p_value)}, {found.n_problems} common problems"
    if sure:
        return (
            f"{better} is {points:.1f} points better than {worse} in {found.metric} ({figures}), "
            f"more than chance among problems and completions gives."
        )
    return (
        f"{second} and {first} cannot be told apart in {found.metric}: the difference is {points:+.1f} points ({figures}); "
        f"anything inside the interval is possible. More problems narrow it."
    )


def format_p(p_value: float) -> str:
    """ "p = 0.013", "p < 0.001"."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}" if p_value < 0.1 else f"p = {p_value:.2f}"


def compare_evaluations(first: tuple[RunFacts, Evaluation], second: tuple[RunFacts, Evaluation]) -> list[Difference]:
    """pass@1, maj@k and pass@k at the largest common k, and greedy where both have it."""
    ks = sorted(set(first[1].ks("maj@k")) & set(second[1].ks("maj@k")))[-1:]
    tables = [problem_accuracies(run.samples(evaluation), ks=ks) for run, evaluation in (first, second)]
    shared = [
        metric
        for metric in ("pass@1", *(f"{name}@{k}" for k in ks if k > 1 for name in ("maj", "pass")), "greedy")
        if all(metric in t for t in tables)
    ]
    return [paired_difference(metric, tables[0][metric], tables[1][metric]) for metric in shared]


def compare_runs(run_a: RunPaths, run_b: RunPaths, *, checkpoint: str = "final") -> list[str]:
    """Lines for people: for each common benchmark what differs between two runs' checkpoints of one name."""
    runs = [gather(run_a), gather(run_b)]
    for run in runs:
        if run.evaluation(checkpoint) is None:
            known = ", ".join(dict.fromkeys(e.checkpoint for e in run.evaluations)) or "none yet"
            raise ValueError(
                f"run {run.run_id!r} has no evaluation of checkpoint {checkpoint!r}; evaluated are: {known}. "
                f"Choose one with --checkpoint"
            )
    lines = []
    for benchmark in runs[0].benchmarks:
        pair = [(run, evaluation) for run in runs if (evaluation := run.evaluation(checkpoint, benchmark))]
        if len(pair) == 2:
            lines.append(f"{benchmark}, {checkpoint}: {run_a.run_id} against {run_b.run_id}")
            lines += [f"  {sentence(d, run_a.run_id, run_b.run_id)}" for d in compare_evaluations(pair[0], pair[1])]
    if not lines:
        raise ValueError(
            f"runs {run_a.run_id!r} ({', '.join(runs[0].benchmarks)}) and {run_b.run_id!r} "
            f"({', '.join(runs[1].benchmarks)}) have no benchmark in common: evaluate both on one"
        )
    return [*lines, "One training seed a run: how much another seed would change is not in these intervals."]
