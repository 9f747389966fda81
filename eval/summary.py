"""Scored samples of an evaluation become measures with intervals: the rows of the ``evaluations`` table.

Unscored samples (a timeout, a crashed scorer) leave every accuracy and are counted in ``unscored_share``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.intervals import bootstrap_table, wilson
from eval.metrics import (
    EXACT_SAMPLES,
    answer_entropy,
    best_of_k,
    maj_at_k,
    maj_curve,
    pass_curve,
    weighted_vote_at_k,
)
from pipeline.config import EvaluateConfig
from pipeline.types import UNSCORED, Problem

CURVE_POINTS = 64
VOTES = ("pass@k", "maj@k", "self_consistency_rm", "best_of_k_rm", "self_consistency_prm", "best_of_k_prm")
ACCURACIES = frozenset({*VOTES, "greedy"})
"""Metrics whose per-problem value is an accuracy; where each is 0 or 1 the interval is Wilson's."""

TITLES = {
    "self_consistency_rm": "weighted@k", "best_of_k_rm": "best@k", "self_consistency_prm": "step-weighted@k",
    "best_of_k_prm": "step-best@k", "mean_length": "length",
}  # fmt: skip
"""Metrics that a table calls otherwise: votes weighted by a reward model, and the best by it; "step" is the process one's."""


def metric_title(metric: str, k: int | None = None) -> str:
    """What a table calls a metric: "pass@8", "weighted@8", "truncated"."""
    title = TITLES.get(metric, metric.removesuffix("_share")).replace("_", " ")
    return title if k is None else title.replace("@k", f"@{k}")


@dataclass(frozen=True, slots=True)
class Sampled:
    """One scored completion of an evaluation, as far as metrics look at it.

    ``answer`` is the verifier's canonical answer, ``reward_model_score`` the outcome reward model's logit,
    ``process_model_score`` that of the lowest step score.
    """

    problem_id: str
    sample_index: int
    answer: str | None
    correct: bool | None
    status: str = "correct"
    finish_reason: str = "stop"
    n_tokens: int = 0
    reward_model_score: float | None = None
    process_model_score: float | None = None
    greedy: bool = False

    @property
    def scored(self) -> bool:
        """Whether a verdict exists."""
        return self.correct is not None and self.status not in UNSCORED


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric over the problems of one slice, with its 95 % interval over problems.

    ``metric``: pass@k, maj@k, greedy, self_consistency_rm, best_of_k_rm, and the latter two of ``_prm``, the process
    model (accuracies), mean_length (tokens), truncated_share, no_answer_share, unscored_share, answer_entropy (nats).
    ``slice``: "all", "level=3", "subject=…", "source=…", "contaminated=yes". ``method`` says how the interval was made,
    and the standard error of drawn votes.
    """

    metric: str
    k: int | None
    slice: str
    value: float
    low: float
    high: float
    n_problems: int
    n_samples: int
    method: str


Key = tuple[str, int | None]


@dataclass(slots=True)
class ProblemValues:
    """The metrics of one problem, how many samples stand behind them, and the drawn votes' standard errors."""

    values: dict[Key, float]
    samples: dict[Key, int]
    errors: dict[Key, float]


def summarise(
    problems: Mapping[str, Problem], rows: Sequence[Sampled], config: EvaluateConfig, seed: int
) -> list[Measure]:
    """Every measure of an evaluation, over all problems and by level, subject and source.

    A problem with fewer scored samples than k is left out of that k and of ``n_problems``. A slice of fewer than two
    problems has no interval and is left out. ValueError names rows of unknown problems and k above the samples drawn.
    """
    by_problem = _by_problem(problems, rows)
    if len(by_problem) < 2:
        raise ValueError(f"an interval over problems needs at least 2 evaluated problems, got {len(by_problem)}")
    drawn = max(sum(not row.greedy for row in group) for group in by_problem.values())
    if drawn and max(config.ks) > drawn:
        raise ValueError(
            f"evaluate.ks has {max(config.ks)} but there are {drawn} samples a problem: lower it to {drawn}"
        )
    all_ks = sorted({*config.ks, *curve_ks(drawn)}) if config.curves else sorted(set(config.ks))
    table = {
        problem_id: problem_values(group, all_ks, reward_model_ks=config.ks, seed=seed)
        for problem_id, group in by_problem.items()
    }
    sliced_ks = {None, *config.ks}
    measures: list[Measure] = []
    for name, members in slices(problems, list(by_problem)).items():
        if len(members) < 2:
            continue
        values = [table[problem_id] for problem_id in members]
        keys = dict.fromkeys(key for entry in values for key in entry.values)
        wanted = [key for key in keys if name == "all" or key[1] in sliced_ks]
        measures += _measures(name, values, wanted, resamples=config.resamples, seed=seed)
    return measures


def curve_ks(n: int, points: int = CURVE_POINTS) -> list[int]:
    """Every k of 1..n, or ``points`` of them evenly spread in log k."""
    if n <= points:
        return list(range(1, n + 1))
    return sorted({round(math.exp(x)) for x in np.linspace(0.0, math.log(n), points)})


def slices(problems: Mapping[str, Problem], ids: Sequence[str]) -> dict[str, list[str]]:
    """Slice name to problem ids: "all" first, then by level, subject, source and selection's contamination flag."""
    named: dict[str, list[str]] = {"all": list(ids)}
    labelled: dict[str, list[str]] = {}
    for problem_id in ids:
        problem = problems[problem_id]
        flag = problem.meta.get("contaminated")
        labels = [
            None if problem.level is None else f"level={problem.level}",
            f"subject={problem.subject}" if problem.subject else None,
            f"source={problem.source}" if problem.source else None,
            None if flag is None else f"contaminated={'yes' if flag else 'no'}",
        ]
        for label in labels:
            if label is not None:
                labelled.setdefault(label, []).append(problem_id)
    return named | {label: labelled[label] for label in sorted(labelled)}


def problem_values(
    rows: Sequence[Sampled], ks: Sequence[int], *, reward_model_ks: Sequence[int] = (), seed: int = 0
) -> ProblemValues:
    """Every metric of one problem's rows; a k above its scored samples is absent."""
    entry = ProblemValues({}, {}, {})
    sampled = [row for row in rows if not row.greedy]
    scored = [row for row in sampled if row.scored]
    _votes(entry, scored, ks)
    _reward_model_votes(entry, [(r, r.reward_model_score) for r in scored], "rm", reward_model_ks, seed)
    _reward_model_votes(entry, [(r, r.process_model_score) for r in scored], "prm", reward_model_ks, seed)
    greedy = [row for row in rows if row.greedy and row.scored]
    if greedy:
        _put(entry, ("greedy", None), sum(bool(row.correct) for row in greedy) / len(greedy), len(greedy))
    for name, value in _descriptions(sampled or rows).items():
        _put(entry, (name, None), value, len(sampled or rows))
    return entry


def _votes(entry: ProblemValues, scored: Sequence[Sampled], ks: Sequence[int]) -> None:
    n = len(scored)
    answers, correct = [row.answer for row in scored], [row.correct for row in scored]
    passes = pass_curve(n, sum(bool(c) for c in correct))
    votes = maj_curve(answers, correct) if 0 < n <= EXACT_SAMPLES else None
    for k in ks:
        if k <= n:
            _put(entry, ("pass@k", k), float(passes[k - 1]), n)
            _put(entry, ("maj@k", k), maj_at_k(answers, correct, k) if votes is None else float(votes[k - 1]), n)


def _reward_model_votes(
    entry: ProblemValues, rows: Sequence[tuple[Sampled, float | None]], model: str, ks: Sequence[int], seed: int
) -> None:
    judged = [(row, score) for row, score in rows if score is not None]
    answers, correct = [row.answer for row, _ in judged], [row.correct for row, _ in judged]
    scores = [score for _, score in judged]
    for k in ks:
        if k <= len(judged):
            value, error = weighted_vote_at_k(answers, correct, scores, k, seed=seed)
            _put(entry, (f"self_consistency_{model}", k), value, len(judged))
            entry.errors[f"self_consistency_{model}", k] = error
            _put(entry, (f"best_of_k_{model}", k), best_of_k(correct, scores, k), len(judged))


def _descriptions(rows: Sequence[Sampled]) -> dict[str, float]:
    n = len(rows)
    return {
        "mean_length": sum(row.n_tokens for row in rows) / n,
        "truncated_share": sum(row.finish_reason == "length" for row in rows) / n,
        "no_answer_share": sum(row.status == "no_answer" for row in rows) / n,
        "unscored_share": sum(not row.scored for row in rows) / n,
        "answer_entropy": answer_entropy([row.answer for row in rows]),
    }


def _put(entry: ProblemValues, key: Key, value: float, samples: int) -> None:
    entry.values[key] = value
    entry.samples[key] = samples


def _by_problem(problems: Mapping[str, Problem], rows: Sequence[Sampled]) -> dict[str, list[Sampled]]:
    grouped: dict[str, list[Sampled]] = {}
    for row in rows:
        if row.problem_id not in problems:
            raise ValueError(f"sample {row.sample_index} is of problem {row.problem_id!r}, which was not evaluated")
        grouped.setdefault(row.problem_id, []).append(row)
    # In a fixed order, so that the bootstrap does not depend on the order of recording.
    return {problem_id: sorted(grouped[problem_id], key=lambda r: r.sample_index) for problem_id in sorted(grouped)}


def _measures(
    name: str, entries: Sequence[ProblemValues], keys: Sequence[Key], *, resamples: int, seed: int
) -> list[Measure]:
    values = np.array([[entry.values.get(key, math.nan) for key in keys] for entry in entries])  # [P, M]
    lows, highs = bootstrap_table(values, resamples=resamples, seed=seed)
    measures = []
    for column, key in enumerate(keys):
        present = values[np.isfinite(values[:, column]), column]
        samples = sum(entry.samples.get(key, 0) for entry in entries)
        low, high, method = float(lows[column]), float(highs[column]), "bootstrap"
        if key[0] in ACCURACIES and np.isin(present, (0.0, 1.0)).all():
            exact = wilson(float(present.sum()), len(present))
            low, high, method = exact.low, exact.high, exact.method
        error = math.sqrt(sum(entry.errors.get(key, 0.0) ** 2 for entry in entries)) / len(present)
        if error:
            method += f"; votes drawn, standard error {error:.2g}"
        measures.append(Measure(*key, name, float(present.mean()), low, high, len(present), samples, method))
    return measures
