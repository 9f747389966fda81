"""How well scores tell correct rollouts from wrong ones, and whether they still mean what they meant. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

BINS = 10
"""Equally wide bins of predicted probability for the calibration error."""
MEASURES = ("correct_share", "auc", "pairwise_accuracy", "calibration_error", "brier")


def measure(
    scores: Sequence[float], labels: Sequence[float], problem_ids: Sequence[str]
) -> dict[str, float | int | None]:
    """Measures of logits against labels (1 correct, 0 wrong): None where they are not defined.

    ``auc``: chance that a correct rollout scores above a wrong one, over all problems (ties count half).
    ``pairwise_accuracy``: the same within a problem, averaged over its pairs and then over problems; what a group's
    advantages are made of. ``calibration_error``: mean over 10 bins, weighted by size, of |mean probability - share
    correct|. ``brier``: mean squared error of the probability. ``correct_share`` and ``rollouts`` describe the sample.
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=np.float64) > 0.5
    if not len(values) == len(truth) == len(problem_ids):
        raise ValueError(f"{len(values)} scores, {len(truth)} labels, {len(problem_ids)} problem ids: expected as many")
    if not len(values):
        return {"rollouts": 0, **dict.fromkeys(MEASURES)}
    probability = _sigmoid(values)
    return {
        "rollouts": len(values),
        "correct_share": float(truth.mean()),
        "auc": auc(values, truth),
        "pairwise_accuracy": pairwise_accuracy(values, truth, problem_ids),
        "calibration_error": calibration_error(probability, truth),
        "brier": float(((probability - truth) ** 2).mean()),
    }


def auc(values: np.ndarray, truth: np.ndarray) -> float | None:
    """Area under the ROC curve from mid-ranks; None when one class is empty."""
    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # equal values share the mean of their ranks, from 1
    return float((ranks[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def pairwise_accuracy(values: np.ndarray, truth: np.ndarray, problem_ids: Sequence[str]) -> float | None:
    """Mean over problems with both labels of their own ``auc``; None when there is no such problem."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, problem_id in enumerate(problem_ids):
        members[problem_id].append(index)
    areas = [auc(values[indices], truth[indices]) for indices in members.values()]
    known = [area for area in areas if area is not None]
    return math.fsum(known) / len(known) if known else None


def calibration_error(probability: np.ndarray, truth: np.ndarray) -> float:
    """Expected calibration error over ``BINS`` bins of equal width."""
    bins = np.minimum((probability * BINS).astype(int), BINS - 1)
    gaps = [abs(probability[bins == b].mean() - truth[bins == b].mean()) * (bins == b).sum() for b in np.unique(bins)]
    return math.fsum(gaps) / len(truth)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * values))


def logit(probability: float) -> float:
    """The score whose sigmoid is ``probability``; finite for 0 and 1 too."""
    bounded = min(max(probability, 1e-12), 1.0 - 1e-12)
    return math.log(bounded / (1.0 - bounded))
