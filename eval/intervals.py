"""Confidence intervals for means over problems. The problem is the unit that is drawn, so it is what is resampled.

Samples of one problem are not independent: pooling them gives intervals that are too narrow (arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over problems with its interval; ``method`` says how it was made ("wilson", "bootstrap", "normal")."""

    value: float
    low: float
    high: float
    method: str


def wilson(successes: float, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval for ``successes`` of n independent problems with one verdict each.

    Stays inside [0, 1] and keeps a width at 0 and at n, where the normal interval collapses.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(
            f"wilson: {successes} successes of {n} problems; expected n of at least 1 and 0 to n successes"
        )
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half), "wilson")


def clustered_normal(values: Sequence[float] | np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """Closed form: mean of the per-problem values +- t * sd / sqrt(P), sd with ddof 1, t of P - 1 degrees of freedom.

    With an equal weight a problem this is the cluster-robust interval. ``values`` is [P], P at least 2.
    """
    from scipy.special import stdtrit

    array = _checked(values)
    if len(array) < 2:
        raise ValueError("clustered_normal: one problem has no spread; evaluate at least 2 problems")
    mean = float(array.mean())
    quantile = float(stdtrit(len(array) - 1, 0.5 + confidence / 2))
    half = quantile * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(mean, mean - half, mean + half, "normal")


def bootstrap(
    values: Sequence[float] | np.ndarray, *, resamples: int = 1000, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """Percentile bootstrap of the mean over problems; ``values`` is [P]. The same seed gives the same interval."""
    array = _checked(values)
    means = resampled_means(array, resamples=resamples, seed=seed)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(array.mean()), float(low), float(high), "bootstrap")


def interval(
    values: Sequence[float] | np.ndarray, *, resamples: int = 1000, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """Wilson when every problem's value is 0 or 1 (greedy, one sample, pass@n), else the bootstrap over problems."""
    array = _checked(values)
    if np.isin(array, (0.0, 1.0)).all():
        return wilson(float(array.sum()), len(array), confidence)
    return bootstrap(array, resamples=resamples, seed=seed, confidence=confidence)


def resampled_means(array: np.ndarray, *, resamples: int, seed: int) -> np.ndarray:
    """float64 [resamples]: means of ``array`` [P] over problems drawn with replacement."""
    rng = np.random.default_rng(seed)
    size = len(array)
    # In blocks: one index matrix for 1,000 resamples of 10,000 problems would take 80 MB.
    block = max(1, 2_000_000 // size)
    means = [
        array[rng.integers(size, size=(min(block, resamples - start), size))].mean(axis=1)
        for start in range(0, resamples, block)
    ]
    return np.concatenate(means)


def _checked(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"an interval needs one value a problem and at least one problem, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError("an interval needs finite values; leave unscored problems out before")
    return array


def bootstrap_table(
    values: np.ndarray, *, resamples: int, seed: int, confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """(low [M], high [M]) of the mean of each column of ``values`` [P, M]; NaN is a problem without that metric.

    All columns see the same resampled problems, so that metrics of one evaluation move together.
    """
    size = len(values)
    present = np.isfinite(values)
    stacked = np.concatenate([np.where(present, values, 0.0), present], axis=1)  # [P, 2M]
    rng = np.random.default_rng(seed)
    block = max(1, 2_000_000 // size)
    sums = []
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = rng.integers(size, size=(rows, size)) + np.arange(rows)[:, None] * size
        counts = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size)
        sums.append(counts.astype(np.float64) @ stacked)
    total, weight = np.split(np.concatenate(sums), 2, axis=1)
    with np.errstate(invalid="ignore"):
        means = total / weight  # [resamples, M]; a resample that holds no problem with this metric is NaN
    low, high = np.nanquantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2], axis=0)
    return low, high
