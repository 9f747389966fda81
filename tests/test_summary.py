"""Scored samples to measures: which samples count, over which problems, in which slices."""

from __future__ import annotations

import math
import random

import pytest

from eval.metrics import maj_at_k, pass_at_k
from eval.summary import Measure, Sampled, curve_ks, summarise
from pipeline.config import EvaluateConfig
from pipeline.types import Problem

PROBLEMS = {
    "p1": Problem("p1", "1+1", "2", level=1, subject="sums", source="embedded"),
    "p2": Problem("p2", "2+3", "5", level=2, subject="sums", source="embedded"),
    "p3": Problem("p3", "2*3", "6", level=2, subject="products", source="embedded"),
}
GOLDS = {name: problem.answer for name, problem in PROBLEMS.items()}


def row(problem_id, index, answer, **changes):
    right = answer == GOLDS[problem_id]
    status = "correct" if right else "incorrect" if answer else "no_answer"
    fields = {"correct": right, "status": status, "n_tokens": 10 + index, **changes}
    return Sampled(problem_id, index, answer, **fields)


def rows():
    return [
        *(row("p1", i, a) for i, a in enumerate(["2", "2", "3", "2"])),
        *(row("p2", i, a) for i, a in enumerate(["5", "4", "4", None])),
        *(row("p3", i, a) for i, a in enumerate(["7", "8", "9", "7"])),
    ]


def config(**changes):
    return EvaluateConfig(**{"samples": 4, "ks": (1, 4), "resamples": 200, **changes})


def find(measures, metric, k=None, slice_="all") -> Measure:
    (found,) = [m for m in measures if (m.metric, m.k, m.slice) == (metric, k, slice_)]
    return found


def test_accuracies_are_means_over_problems():
    measures = summarise(PROBLEMS, rows(), config(), 0)
    # pass@1: (3/4 + 1/4 + 0) / 3 = 1/3; pass@4: (1 + 1 + 0) / 3.
    assert find(measures, "pass@k", 1).value == pytest.approx(1 / 3)
    assert find(measures, "pass@k", 4).value == pytest.approx(2 / 3)
    # maj@4: p1 is 3 against 1, p2 is 1 against 2, p3 none.
    assert find(measures, "maj@k", 4).value == pytest.approx(1 / 3)
    # Lengths 10, 11, 12, 13 everywhere; one of 12 has no answer.
    assert find(measures, "mean_length").value == pytest.approx(11.5)
    assert find(measures, "no_answer_share").value == pytest.approx(1 / 12)


def test_an_unscored_sample_leaves_the_accuracies_and_is_counted():
    given = [*rows()[:-1], row("p3", 3, "6", correct=None, status="timeout")]
    measures = summarise(PROBLEMS, given, config(), 0)
    assert find(measures, "unscored_share").value == pytest.approx(1 / 12)
    # p3 has three scored samples left: it has no pass@4, and pass@1 is still (3/4 + 1/4 + 0) / 3.
    assert find(measures, "pass@k", 4).n_problems == 2
    assert find(measures, "pass@k", 1).value == pytest.approx(1 / 3)
    assert find(measures, "pass@k", 1).n_samples == 11


def test_greedy_completions_stay_out_of_the_samples():
    greedy = [row("p1", 4, "2", greedy=True), row("p2", 4, "5", greedy=True), row("p3", 4, "1", greedy=True)]
    measures = summarise(PROBLEMS, rows() + greedy, config(), 0)
    assert find(measures, "greedy").value == pytest.approx(2 / 3)
    assert find(measures, "greedy").method == "wilson"
    assert find(measures, "pass@k", 1).value == pytest.approx(1 / 3)


def test_reward_model_votes_and_best_of_k_appear_when_there_are_scores():
    assert not [m for m in summarise(PROBLEMS, rows(), config(), 0) if m.metric.endswith("_rm")]
    # The model is sure of every right answer: best of 4 finds one where one exists, and p2's single 5 outvotes two 4s.
    scored = [
        row(r.problem_id, r.sample_index, r.answer, reward_model_score=5.0 if r.correct else -5.0) for r in rows()
    ]
    measures = summarise(PROBLEMS, scored, config(), 0)
    assert find(measures, "best_of_k_rm", 4).value == pytest.approx(2 / 3)
    assert find(measures, "self_consistency_rm", 4).value == pytest.approx(2 / 3)


def test_slices_hold_the_problems_of_their_label_and_single_problems_have_none():
    measures = summarise(PROBLEMS, rows(), config(), 0)
    assert {m.slice for m in measures} == {"all", "level=2", "subject=sums", "source=embedded"}
    assert find(measures, "pass@k", 1, "level=2").value == pytest.approx(1 / 8)
    assert find(measures, "pass@k", 1, "subject=sums").value == pytest.approx(1 / 2)


def test_curves_give_every_k_of_all_problems_only():
    measures = summarise(PROBLEMS, rows(), config(), 0)
    assert [m.k for m in measures if m.metric == "pass@k" and m.slice == "all"] == [1, 2, 3, 4]
    assert [m.k for m in measures if m.metric == "pass@k" and m.slice == "level=2"] == [1, 4]
    assert [m.k for m in summarise(PROBLEMS, rows(), config(curves=False), 0) if m.metric == "maj@k"][:2] == [1, 4]
    assert curve_ks(3) == [1, 2, 3]
    assert curve_ks(1000)[0] == 1
    assert curve_ks(1000)[-1] == 1000
    assert len(curve_ks(1000)) <= 64


def test_the_order_of_recording_changes_nothing():
    shuffled = rows()
    random.Random(1).shuffle(shuffled)
    assert summarise(PROBLEMS, shuffled, config(), 0) == summarise(PROBLEMS, rows(), config(), 0)


def test_summaries_agree_with_the_pure_functions_on_random_samples():
    rng = random.Random(9)
    given = [row(p, i, rng.choice(["2", "5", "6", "7", None])) for p in PROBLEMS for i in range(7)]
    measures = summarise(PROBLEMS, given, config(samples=7, ks=(3,)), 0)
    groups = [[r for r in given if r.problem_id == p] for p in PROBLEMS]
    passes = [pass_at_k(7, sum(bool(r.correct) for r in g), 3) for g in groups]
    votes = [maj_at_k([r.answer for r in g], [r.correct for r in g], 3) for g in groups]
    assert find(measures, "pass@k", 3).value == pytest.approx(math.fsum(passes) / 3)
    assert find(measures, "maj@k", 3).value == pytest.approx(math.fsum(votes) / 3)


def test_values_lie_in_their_intervals():
    for measure in summarise(PROBLEMS, rows(), config(), 0):
        assert measure.low - 1e-12 <= measure.value <= measure.high + 1e-12


def test_what_cannot_be_summarised_is_refused():
    with pytest.raises(ValueError, match="was not evaluated"):
        summarise({}, rows(), config(), 0)
    with pytest.raises(ValueError, match="lower it to 4"):
        summarise(PROBLEMS, rows(), config(samples=8, ks=(8,)), 0)
    with pytest.raises(ValueError, match="at least 2"):
        summarise(PROBLEMS, rows()[:4], config(), 0)
