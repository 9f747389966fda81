"""Paired comparisons: hand-computed p-values, intervals that pairing narrows, sentences that say what is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eval.compare import (
    Difference,
    compare_runs,
    mcnemar,
    paired_difference,
    permutation_p,
    problem_accuracies,
    sentence,
)
from eval.summary import Sampled
from tests.synthetic_run import synthetic_run


def test_mcnemar_counts_the_binomial_tail():
    # 1 lost, 5 gained: 2 * (C(6,0) + C(6,1)) / 2**6 = 14/64
    assert mcnemar(1, 5) == 14 / 64
    # 0 lost, 8 gained: 2 * 1 / 2**8
    assert mcnemar(0, 8) == 2 / 256
    assert mcnemar(3, 3) == 1.0 and mcnemar(0, 0) == 1.0
    assert mcnemar(5, 1) == mcnemar(1, 5)


def test_the_permutation_p_of_few_problems_is_counted_over_all_signs():
    # |sum| of (1, 1, 1) is 3: reached by +++ and --- of 8 patterns
    assert permutation_p([1.0, 1.0, 1.0]) == 2 / 8
    # (0.5, 0.25, -0.25): |sum| 0.5; sums over the 8 patterns: ±1, ±0.5 (4 times), ±0; hits 2 + 4 = 6
    assert permutation_p([0.5, 0.25, -0.25]) == 6 / 8
    assert permutation_p([0.0, 0.0]) == 1.0


def test_problems_without_a_difference_change_no_p_value():
    assert permutation_p([0.5, 0.25, 0.125, 0.0, 0.0]) == permutation_p([0.5, 0.25, 0.125])


def test_the_drawn_permutation_p_agrees_with_all_patterns():
    change = np.random.default_rng(5).normal(0.25, 1.0, size=14)
    sums = [abs(np.dot(signs, change)) for signs in itertools.product((-1, 1), repeat=14)]
    exact = np.mean(np.array(sums) >= abs(change.sum()) - 1e-9)
    # 10,000 draws: standard error at most 0.005
    assert permutation_p(change) == pytest.approx(exact, abs=0.02)
    assert permutation_p(change) == permutation_p(change) > 0


def test_a_p_value_is_uniform_when_nothing_differs():
    rng = np.random.default_rng(0)
    values = [permutation_p(rng.choice([-0.5, 0.0, 0.5], size=30), draws=400, seed=i) for i in range(300)]
    # 300 draws at level 0.1: standard error 0.017
    assert np.mean(np.array(values) <= 0.1) == pytest.approx(0.1, abs=0.06)


def test_the_difference_is_paired_by_problem():
    rng = np.random.default_rng(1)
    hard = rng.random(200)
    first = {f"p{i}": h for i, h in enumerate(hard)}
    second = {f"p{i}": min(1.0, h + 0.05) for i, h in enumerate(hard)}
    found = paired_difference("pass@1", first, {**second, "only here": 1.0})
    assert found.n_problems == 200
    assert 0.0 < found.low <= found.difference <= found.high < 0.06
    # unpaired the standard error alone would be sqrt(2) * 0.29 / sqrt(200) = 0.029
    assert found.high - found.low < 0.01
    assert found.p_value < 0.001 and found.test == "sign-flip permutation"


def test_greedy_is_tested_by_mcnemar():
    first = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}
    second = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}
    found = paired_difference("greedy", first, second)
    # 0 lost, 2 gained: 2 * 1 / 2**2
    assert found.p_value == 0.5 and found.test == "McNemar, exact" and found.difference == 0.5


def test_one_common_problem_is_refused():
    with pytest.raises(ValueError, match="1 common problems; expected at least 2"):
        paired_difference("pass@1", {"a": 1.0}, {"a": 0.0, "b": 1.0})


def test_unscored_samples_count_nowhere_and_greedy_is_apart():
    rows = [
        Sampled("a", 0, "1", True),
        Sampled("a", 1, "2", False, "incorrect"),
        Sampled("a", 2, None, None, "timeout"),
        Sampled("a", 3, "1", True, greedy=True),
        Sampled("b", 0, None, None, "error"),
    ]
    table = problem_accuracies(rows, ks=[1, 2, 3])
    # maj@2 of answers 1 (right) and 2: a tie, shared: 1/2
    assert table == {"pass@1": {"a": 0.5}, "maj@2": {"a": 0.5}, "pass@2": {"a": 1.0}, "greedy": {"a": 1.0}}


def test_the_sentence_names_the_better_one_only_when_chance_is_unlikely():
    sure = Difference("pass@1", 0.3, 0.4, 0.1, 0.05, 0.15, 0.0004, "sign-flip permutation", 200)
    assert sentence(sure, "A", "B").startswith("B is 10.0 points better than A in pass@1")
    assert "p < 0.001" in sentence(sure, "A", "B")
    worse = Difference("pass@1", 0.4, 0.3, -0.1, -0.15, -0.05, 0.01, "sign-flip permutation", 200)
    assert sentence(worse, "A", "B").startswith("A is 10.0 points better than B")
    assert "+5.0 to +15.0" in sentence(worse, "A", "B")
    unsure = Difference("pass@1", 0.3, 0.31, 0.01, -0.05, 0.07, 0.7, "sign-flip permutation", 200)
    assert "cannot be told apart" in sentence(unsure, "A", "B") and "-5.0 to +7.0" in sentence(unsure, "A", "B")


def test_two_runs_are_compared_on_what_both_evaluated(tmp_path):
    worse, better = synthetic_run(tmp_path, "worse"), synthetic_run(tmp_path, "better", lift=0.3)
    lines = compare_runs(worse, better)
    assert lines[0] == "embedded, final: worse against better"
    assert lines[1].strip().startswith("better is ") and "24 common problems" in lines[1]
    assert "seed" in lines[-1]


def test_a_run_compared_with_itself_differs_by_nothing(tmp_path):
    run = synthetic_run(tmp_path, "same")
    assert all("+0.0 points" in line and "p = 1.00" in line for line in compare_runs(run, run)[1:-1])


def test_a_checkpoint_that_was_not_evaluated_is_named_with_those_that_were(tmp_path):
    run = synthetic_run(tmp_path, "run")
    with pytest.raises(
        ValueError, match=r"no evaluation of checkpoint 'round-09'; evaluated are: warm-start, round-01"
    ):
        compare_runs(run, run, checkpoint="round-09")
