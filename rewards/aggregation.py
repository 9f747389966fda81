"""Components to one reward: a weighted sum, or each brought to one scale within its group first. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal


def combine(
    components: Sequence[Mapping[str, float | None]],
    weights: Mapping[str, float],
    group_ids: Sequence[str],
    *,
    how: Literal["sum", "gdpo"],
) -> list[float | None]:
    """The weighted sum of each rollout's components; None where one with a weight other than 0 is None.

    A component that a rollout's problem does not have (code tests of a problem without any) is absent from its row
    and adds nothing. "gdpo" first brings each component to mean 0 and deviation 1 within its group (arXiv 2601.05242).
    """
    if how == "gdpo":
        components = _normalised(components, weights, group_ids)
    totals: list[float | None] = []
    for row in components:
        paid = [(weight, row[name]) for name, weight in weights.items() if weight != 0.0 and name in row]
        terms = [weight * value for weight, value in paid if value is not None]
        totals.append(math.fsum(terms) if len(terms) == len(paid) else None)
    return totals


def without_in_plain_groups(
    components: Sequence[Mapping[str, float | None]],
    names: Sequence[str],
    group_ids: Sequence[str],
    correct: Sequence[bool | None],
) -> list[Mapping[str, float | None]]:
    """The components, but for ``names`` in the groups that do not hold both a correct and a wrong completion."""
    verdicts: dict[str, set[bool | None]] = defaultdict(set)
    for group, verdict in zip(group_ids, correct, strict=True):
        verdicts[group].add(verdict)
    return [
        row if {True, False} <= verdicts[group] else {key: value for key, value in row.items() if key not in names}
        for row, group in zip(components, group_ids, strict=True)
    ]


def _normalised(
    components: Sequence[Mapping[str, float | None]], weights: Mapping[str, float], group_ids: Sequence[str]
) -> list[dict[str, float | None]]:
    rows: list[dict[str, float | None]] = [{} for _ in components]
    for name in weights:
        holders = [index for index, row in enumerate(components) if name in row]
        values = normalise_in_groups([components[i][name] for i in holders], [group_ids[i] for i in holders])
        for index, value in zip(holders, values, strict=True):
            rows[index][name] = value
    return rows


def normalise_in_groups(
    values: Sequence[float | None], group_ids: Sequence[str], epsilon: float = 1e-6
) -> list[float | None]:
    """``(value - mean) / (deviation + epsilon)`` within each group, deviation with ddof 0; None stays None, uncounted.

    A group whose values agree to within rounding gets exactly 0.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for group, value in zip(group_ids, values, strict=True):
        if value is not None:
            groups[group].append(value)
    statistics = {}
    for group, members in groups.items():
        mean = math.fsum(members) / len(members)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in members) / len(members))
        statistics[group] = (mean, 0.0 if deviation < 1e-9 * max(1.0, abs(mean)) else 1.0 / (deviation + epsilon))
    normalised: list[float | None] = []
    for group, value in zip(group_ids, values, strict=True):
        if value is None:
            normalised.append(None)
            continue
        mean, scale = statistics[group]
        normalised.append((value - mean) * scale)
    return normalised
