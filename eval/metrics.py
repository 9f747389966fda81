"""pass@k, maj@k, votes weighted by a reward model, best-of-k: pure functions of one problem's samples.

Nothing here reads a store, draws from a global random stream or knows what a verifier is: correctness and canonical
answers are given. None as correctness means unscored, which is not wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

EXACT_SAMPLES = 1000
"""maj@k is counted exactly up to this many samples a problem (scaled binomials stay in float64's range up to there)."""
EXACT_SUBSETS = 5_000
"""Weighted votes enumerate the k-subsets when there are at most this many, else they draw subsets."""
DRAWS = 2_000
"""Random k-subsets behind a Monte Carlo value; its standard error is at most 0.5 / sqrt(DRAWS) = 0.011."""

_NUMBER = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(?:\s*/\s*(\d+))?")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the c correct ones: 1 - C(n-c,k)/C(n,k).

    The unbiased estimator of arXiv 2107.03374, section 2.1, in integers and rounded once, so exact for any n.
    ValueError when k is not in 1..n or c not in 0..n: with fewer than k samples the estimate does not exist.
    """
    _check_k(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"pass@k: {c} correct of {n} samples; expected 0 to {n}")
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


def pass_curve(n: int, c: int) -> np.ndarray:
    """float64 [n]: ``pass_at_k(n, c, k)`` for k = 1..n, by the stable product over k."""
    if not 0 <= c <= n:
        raise ValueError(f"pass@k: {c} correct of {n} samples; expected 0 to {n}")
    # C(n-c,k)/C(n,k) = prod over j < k of (n-c-j)/(n-j); it reaches 0 as soon as k > n - c.
    j = np.arange(n)
    return 1.0 - np.cumprod(np.maximum(n - c - j, 0) / (n - j)) if n else np.zeros(0)


def answer_class(answer: str | None) -> str | None:
    """The voting class of a canonical answer, None when it is empty.

    Number literals vote by value ("1/2", "0.50" and "\\frac{1}{2}" together), everything else by its text without
    blanks: deeper equivalence is the verifier's work, which gives the canonical answer.
    """
    if answer is None:
        return None
    text = "".join(unicodedata.normalize("NFKC", answer).split())
    text = text.replace("−", "-").replace("⁄", "/")
    if not text:
        return None
    match = _FRACTION.fullmatch(text) or _NUMBER.fullmatch(text)
    if match is None or len(text) > 200:
        return text
    sign, numerator, denominator = match.groups()
    if denominator is not None and int(denominator) == 0:
        return text
    return str(Fraction(numerator) / int(denominator or 1) * (-1 if sign == "-" else 1))


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool | None], k: int) -> float:
    """Expected accuracy of the majority vote over a random k-subset of the samples.

    Samples vote by ``answer_class``; correct answers are one class, for what equals the gold equals one another. Empty
    answers hold a place in the subset and do not vote; a subset without votes is wrong. Ties share the win. A class
    without a verdict is unscored and left out. Exact up to ``EXACT_SAMPLES`` samples, beyond that
    ``maj_at_k_estimate`` with seed 0. ValueError when k > n.

    Example: answers 7, 7, 8 with 7 right and k = 2: subsets {7,7} 1, {7,8} 1/2, {7,8} 1/2, so 2/3.
    """
    votes = count_votes(answers, correct)
    _check_k(votes.n, k)
    if votes.n > EXACT_SAMPLES:
        return maj_at_k_estimate(answers, correct, k)[0]
    return float(_maj_exact(votes)[k - 1])


def maj_curve(answers: Sequence[str | None], correct: Sequence[bool | None]) -> np.ndarray:
    """float64 [n]: ``maj_at_k`` for k = 1..n, for little more than the price of one k."""
    votes = count_votes(answers, correct)
    if votes.n > EXACT_SAMPLES:
        return np.array([maj_at_k_estimate(answers, correct, k)[0] for k in range(1, votes.n + 1)])
    return _maj_exact(votes)


def maj_at_k_estimate(
    answers: Sequence[str | None], correct: Sequence[bool | None], k: int, *, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """(value, standard error) of ``maj_at_k`` from ``draws`` random k-subsets; the same for the same seed."""
    votes = count_votes(answers, correct)
    _check_k(votes.n, k)
    # Rows of class counts in a random k-subset: a multivariate hypergeometric draw, empty answers last.
    rng = np.random.default_rng(seed)
    drawn = rng.multivariate_hypergeometric([*votes.counts, votes.empty], k, size=draws, method="marginals")[:, :-1]
    if not votes.counts:
        return 0.0, 0.0
    top = drawn.max(axis=1, keepdims=True)
    winners = (drawn == top) & (top > 0)
    wins = winners @ np.array(votes.values) / np.maximum(winners.sum(axis=1), 1)
    return float(wins.mean()), float(wins.std(ddof=1) / math.sqrt(draws))


def weighted_vote_at_k(
    answers: Sequence[str | None],
    correct: Sequence[bool | None],
    scores: Sequence[float],
    k: int,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[float, float]:
    """(value, standard error) of self-consistency weighted by the reward model over random k-subsets.

    Each sample votes with sigmoid(score), the probability of being right that an outcome reward model's logit states;
    otherwise as ``maj_at_k``. Exact (standard error 0) while there are at most ``EXACT_SUBSETS`` subsets.
    """
    votes = count_votes(answers, correct)
    kept = [float(score) for score, member in zip(scores, votes.members, strict=True) if member is not None]
    _check_k(votes.n, k)
    weights = 1.0 / (1.0 + np.exp(-np.array(kept)))  # [n]
    classes = np.array([member for member in votes.members if member is not None])  # [n], -1 is an empty answer
    exact = math.comb(votes.n, k) <= EXACT_SUBSETS
    if exact:
        subsets = np.array(list(itertools.combinations(range(votes.n), k)))
    else:
        rng = np.random.default_rng(seed)
        subsets = np.argsort(rng.random((draws, votes.n)), axis=1)[:, :k]
    if not votes.counts:
        return 0.0, 0.0
    one_hot = (classes[:, None] == np.arange(len(votes.counts))) * weights[:, None]  # [n, classes]
    totals = one_hot[subsets].sum(axis=1)  # [subsets, classes]
    top = totals.max(axis=1, keepdims=True)
    winners = (totals >= top - 1e-12 * np.maximum(top, 1.0)) & (top > 0)
    wins = winners @ np.array(votes.values) / np.maximum(winners.sum(axis=1), 1)
    error = 0.0 if exact else float(wins.std(ddof=1) / math.sqrt(len(wins)))
    return float(wins.mean()), error


def best_of_k(correct: Sequence[bool | None], scores: Sequence[float], k: int) -> float:
    """Expected correctness of the highest-scored of k samples drawn without replacement; equal scores share. Exact.

    Unscored samples (None) are left out. ValueError when k exceeds what remains.
    """
    judged = [(float(s), bool(c)) for s, c in zip(scores, correct, strict=True) if c is not None]
    n = len(judged)
    _check_k(n, k)
    judged.sort(key=lambda pair: -pair[0])
    total, value, before = math.comb(n, k), 0.0, 0
    for _, members in itertools.groupby(judged, key=lambda pair: pair[0]):
        group = [c for _, c in members]
        after = before + len(group)
        # The best lies in this group when no draw lies above it and not all lie below it.
        chance = (math.comb(n - before, k) - math.comb(n - after, k)) / total
        value += chance * sum(group) / len(group)
        before = after
    return value


def answer_entropy(answers: Sequence[str | None]) -> float:
    """Entropy in nats of the classes of the given answers (plug-in estimate); empty answers are left out."""
    counts = Counter(c for c in map(answer_class, answers) if c is not None)
    total = sum(counts.values())
    return -sum(m / total * math.log(m / total) for m in counts.values()) if total else 0.0


class Votes:
    """Samples counted by class: ``counts`` and ``values`` (share of right verdicts) a class, ``empty`` answers.

    ``members[i]`` is the class of sample i, -1 for an empty answer, None for one that is left out as unscored.
    """

    def __init__(self, members: list[int | None], values: list[float]) -> None:
        self.members = members
        self.values = values
        tally = Counter(m for m in members if m is not None)
        self.counts = [tally[j] for j in range(len(values))]
        self.empty = tally[-1]
        self.n = sum(self.counts) + self.empty


def count_votes(answers: Sequence[str | None], correct: Sequence[bool | None]) -> Votes:
    """The samples' classes. Any class with a correct member merges with the other such classes (equal to the gold)."""
    names = [answer_class(answer) for answer in answers]
    verdicts: dict[str, list[bool]] = {}
    for name, verdict in zip(names, correct, strict=True):
        if name is not None:
            verdicts.setdefault(name, []).extend([] if verdict is None else [bool(verdict)])
    # A class is right when most of its verdicts are: verdicts on one canonical answer only differ by a verifier's slip.
    right = {name for name, given in verdicts.items() if given and 2 * sum(given) > len(given)}
    order: dict[str, int] = {}
    members: list[int | None] = []
    for name in names:
        if name is None:
            members.append(-1)
        elif not verdicts[name]:
            members.append(None)
        else:
            members.append(order.setdefault("" if name in right else name, len(order)))
    return Votes(members, [1.0 if name == "" else 0.0 for name in order])


def _maj_exact(votes: Votes) -> np.ndarray:
    """float64 [n]: maj@k for every k, by counting subsets.

    For the right class with m samples: sum over t of C(m,t) * W(k-t, s) / (s+1), where W counts the ways to fill the
    other k-t places so that no other class has more than t votes and exactly s have t. Every binomial carries a factor
    2**-count, so that nothing overflows.
    """
    n = votes.n
    wins = np.zeros(n + 1)
    for right, value in enumerate(votes.values):
        if not value:
            continue
        others = [count for j, count in enumerate(votes.counts) if j != right]
        own = _binomials(votes.counts[right])
        for t in range(1, votes.counts[right] + 1):
            ways = _capped_ways(others, votes.empty, t)  # [size, ties]
            shared = ways @ (1.0 / np.arange(1, ways.shape[1] + 1))  # [size]
            wins[t : t + len(shared)] += own[t] * shared
    return np.minimum(wins[1:] / _binomials(n)[1:], 1.0) if n else np.zeros(0)


def _capped_ways(others: Sequence[int], empty: int, t: int) -> np.ndarray:
    """[size, ties] ways to draw ``size`` samples from the other classes and the empty answers, at most t a class."""
    free = empty + sum(count for count in others if count < t)
    tieable = [count for count in others if count >= t]
    ways = _binomials(free)[:, None]
    for count in tieable:
        weights = _binomials(count)
        size, ties = ways.shape
        wider = np.zeros((size + t, ties + 1))
        for i in range(t):
            wider[i : i + size, :ties] += weights[i] * ways
        wider[t : t + size, 1:] += weights[t] * ways
        ways = wider
    return ways


@functools.lru_cache(maxsize=4096)
def _binomials(n: int) -> np.ndarray:
    """float64 [n + 1]: C(n, i) / 2**n. Shared: callers only read it."""
    scale = 1 << n
    return np.array([math.comb(n, i) / scale for i in range(n + 1)])


def _check_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(
            f"k is {k} but the problem has {n} scored samples: k must be 1 to {n}; draw more samples or lower it"
        )
