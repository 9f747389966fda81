"""pass@k, maj@k and the reward model's votes, against hand-worked sums and brute-force enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from eval.metrics import (
    answer_class,
    answer_entropy,
    best_of_k,
    maj_at_k,
    maj_at_k_estimate,
    maj_curve,
    pass_at_k,
    pass_curve,
    weighted_vote_at_k,
)


def enumerate_majority(answers, correct, k, weights=None):
    """Mean accuracy of the vote over every k-subset, ties shared; answers are already classes."""
    weights = weights or [1.0] * len(answers)
    right = {a for a, c in zip(answers, correct, strict=True) if c}
    wins = []
    for subset in itertools.combinations(range(len(answers)), k):
        tally = Counter()
        for i in subset:
            if answers[i]:
                tally["right" if answers[i] in right else answers[i]] += weights[i]
        top = max(tally.values(), default=0.0)
        winners = [a for a, votes in tally.items() if math.isclose(votes, top)]
        wins.append(winners.count("right") / len(winners) if winners else 0.0)
    return sum(wins) / len(wins)


def random_samples(rng, n):
    pool = ["a", "b", "c", "d", "e", None, ""]
    answers = [rng.choice(pool) for _ in range(n)]
    return answers, [a == "a" for a in answers]


def test_pass_at_k_of_one_correct_in_four():
    # k=1: 1/4; k=2: 1 - C(3,2)/C(4,2) = 1 - 3/6; k=4: certainly drawn.
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 4) == 1.0


def test_pass_at_one_is_the_mean():
    assert all(pass_at_k(n, c, 1) == c / n for n in (1, 7, 64, 3000) for c in (0, 1, n // 2, n))


def test_pass_at_k_equals_the_share_of_subsets_with_a_correct_one():
    for n, c, k in [(6, 2, 3), (7, 3, 2), (5, 0, 5), (8, 1, 7)]:
        subsets = list(itertools.combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets), abs=1e-15)


def test_pass_at_k_is_stable_for_thousands_of_samples():
    # 1 - prod_{j<1000} (5000-3-j)/(5000-j) = 1 - (4000*3999*3998)/(5000*4999*4998).
    assert pass_at_k(5000, 3, 1000) == pytest.approx(1 - 4000 * 3999 * 3998 / (5000 * 4999 * 4998), rel=1e-14)
    assert 0 < pass_at_k(10_000, 1, 1) < pass_at_k(10_000, 1, 2) < 1


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 2), (4, -1, 2), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_does_not_exist(n, c, k):
    with pytest.raises(ValueError, match=r"scored samples|correct of"):
        pass_at_k(n, c, k)


def test_pass_curve_is_pass_at_k_for_every_k():
    for n, c in [(1, 0), (1, 1), (9, 4), (64, 1), (2000, 3)]:
        ks = range(1, n + 1, max(1, n // 20))
        np.testing.assert_allclose(pass_curve(n, c)[[k - 1 for k in ks]], [pass_at_k(n, c, k) for k in ks], atol=1e-12)


def test_maj_at_k_equals_enumeration_on_random_samples():
    rng = random.Random(0)
    for _ in range(150):
        n = rng.randint(1, 9)
        answers, correct = random_samples(rng, n)
        for k in range(1, n + 1):
            assert maj_at_k(answers, correct, k) == pytest.approx(enumerate_majority(answers, correct, k), abs=1e-12)


def test_maj_at_k_shares_a_tie():
    # {7,7} wins 1, {7,8} twice 1/2: (1 + 1/2 + 1/2) / 3.
    assert maj_at_k(["7", "7", "8"], [True, True, False], 2) == pytest.approx(2 / 3)
    assert maj_at_k(["7", "8", "9"], [True, False, False], 3) == pytest.approx(1 / 3)


def test_an_empty_answer_does_not_vote():
    assert maj_at_k(["7", None, "", " "], [True, False, False, False], 4) == 1.0
    assert maj_at_k([None, None], [False, False], 2) == 0.0


def test_equal_values_vote_together():
    # Right: 1/2 and 0.5 are two votes against one; wrong: 1/4, 0.25 and \frac{1}{4} outvote two 3s.
    assert maj_at_k(["1/2", "0.5", "3"], [True, True, False], 3) == 1.0
    assert maj_at_k(["3", "3", "1/4", "0.25", r"\frac{1}{4}"], [True, True, False, False, False], 5) == 0.0


def test_answers_equal_to_the_gold_are_one_class():
    assert maj_at_k(["x+1", "1+x", "9", "8"], [True, True, False, False], 4) == 1.0


def test_an_unscored_answer_takes_its_class_s_verdict_or_is_left_out():
    assert maj_at_k(["7", "7", "8"], [True, None, False], 3) == 1.0
    assert maj_at_k(["7", "8", "9"], [True, None, None], 1) == 1.0
    with pytest.raises(ValueError, match="has 1 scored"):
        maj_at_k(["7", "8", "9"], [True, None, None], 2)


def test_maj_at_k_refuses_k_above_n():
    with pytest.raises(ValueError, match="k is 3"):
        maj_at_k(["1", "2"], [True, False], 3)


def test_maj_at_one_is_the_mean_and_the_curve_is_maj_at_k():
    answers, correct = random_samples(random.Random(3), 40)
    curve = maj_curve(answers, correct)
    assert curve[0] == pytest.approx(sum(correct) / 40, abs=1e-12)
    assert curve[12] == maj_at_k(answers, correct, 13)
    assert curve[-1] in (0.0, 0.5, 1.0, pytest.approx(1 / 3))


def test_the_monte_carlo_estimate_agrees_within_its_stated_error():
    answers, correct = random_samples(random.Random(5), 30)
    value, error = maj_at_k_estimate(answers, correct, 9, draws=4000, seed=1)
    assert 0 < error < 0.01
    assert abs(value - maj_at_k(answers, correct, 9)) < 4 * error
    assert maj_at_k_estimate(answers, correct, 9, draws=4000, seed=1) == (value, error)


def test_maj_at_k_of_a_thousand_samples_is_exact_and_beyond_is_estimated():
    # Two classes, k odd: the vote is right when more than half are; the hypergeometric tail, summed in integers.
    n, c, k = 1000, 520, 101
    tail = sum(math.comb(c, t) * math.comb(n - c, k - t) for t in range(51, k + 1)) / math.comb(n, k)
    assert maj_at_k(["1"] * c + ["2"] * (n - c), [True] * c + [False] * (n - c), k) == pytest.approx(tail, abs=1e-10)
    many = maj_at_k(["1"] * 1560 + ["2"] * 1440, [True] * 1560 + [False] * 1440, 101)
    assert abs(many - tail) < 0.05


def test_weighted_votes_equal_enumeration_and_can_overturn_the_majority():
    rng = random.Random(2)
    for _ in range(60):
        n = rng.randint(1, 7)
        answers, correct = random_samples(rng, n)
        scores = [rng.uniform(-3, 3) for _ in range(n)]
        weights = [1 / (1 + math.exp(-s)) for s in scores]
        k = rng.randint(1, n)
        value, error = weighted_vote_at_k(answers, correct, scores, k)
        assert value == pytest.approx(enumerate_majority(answers, correct, k, weights), abs=1e-9)
        assert error == 0.0
    # Two votes of sigmoid(-2) = 0.12 lose to one of sigmoid(2) = 0.88.
    assert weighted_vote_at_k(["8", "8", "7"], [False, False, True], [-2.0, -2.0, 2.0], 3)[0] == 1.0


def test_best_of_k_equals_enumeration():
    rng = random.Random(4)
    for _ in range(60):
        n = rng.randint(1, 8)
        correct = [rng.random() < 0.4 for _ in range(n)]
        scores = [rng.choice([0.0, 1.0, 2.0, 3.5]) for _ in range(n)]
        k = rng.randint(1, n)
        values = []
        for subset in itertools.combinations(range(n), k):
            top = max(scores[i] for i in subset)
            best = [correct[i] for i in subset if scores[i] == top]
            values.append(sum(best) / len(best))
        assert best_of_k(correct, scores, k) == pytest.approx(sum(values) / len(values), abs=1e-12)


def test_answer_entropy_in_nats_without_empty_answers():
    # Shares 2/4, 1/4, 1/4: ln 2 / 2 + 2 * ln 4 / 4 = 1.5 ln 2.
    assert answer_entropy(["1", "1.0", "2", "3", None]) == pytest.approx(1.5 * math.log(2))
    assert answer_entropy([None, ""]) == 0.0


def test_answer_class_reads_numbers_and_leaves_the_rest():
    assert answer_class("-0.50") == answer_class("-1/2") == answer_class(r"-\dfrac{1}{2}") == "-1/2"
    assert answer_class("1/0") == "1/0"
    assert answer_class("(1, 2)") == "(1,2)"
    assert answer_class("  ") is None
