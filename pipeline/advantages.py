"""Rewards to advantages: outcome supervision, process supervision, the correctness indicator and preference signs.

Pure numpy, in float64 inside and float32 out. Groups are told apart by their id, never by position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.config.training import AdvantageConfig

RELATIVE_NOISE, ABSOLUTE_NOISE = 1e-6, 1e-9
"""Rewards of a group that differ by less than this (share of the largest, plus a floor) count as equal: they are sums
of weighted components, so equal ones differ by rounding, and rounding divided by itself would be a large advantage."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """One entry a completion, arrays [B].

    ``values`` float32, 0 where there is no signal; ``scored`` bool, False where the reward was None; ``group_mean`` and
    ``group_std`` float32 of the scored members of the completion's group (0 where none is scored; the std has the
    config's ddof); ``zero_variance`` bool, True for scored members whose group carries no signal.
    """

    values: np.ndarray
    scored: np.ndarray
    group_mean: np.ndarray
    group_std: np.ndarray
    zero_variance: np.ndarray


def outcome_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[str], config: AdvantageConfig
) -> Advantages:
    """``Advantages`` from one reward a completion (arXiv 2402.03300, 4.1.2: A = (r - mean r) / std r).

    ``config.scale``: "group" divides by the group's standard deviation + epsilon, "batch" by that of all scored rewards
    + epsilon, "none" does not divide (Dr. GRPO, arXiv 2503.20783). None is unscored: it leaves every statistic and gets
    advantage 0. Groups with fewer than two scored members, or whose rewards are equal up to rounding, get exactly 0.

    Example, scale "group", ddof 0, epsilon 0: rewards 1, 0, 0, 0 of one group have mean 0.25 and std 0.433, hence
    advantages 1.732, -0.577, -0.577, -0.577; with ddof 1 the std is 0.5: 1.5, -0.5, -0.5, -0.5.

    Raises ValueError for lengths that differ and for a reward that is not finite.
    """
    values = _as_array(rewards, group_ids)
    scored = ~np.isnan(values)
    batch_std = _std(values[scored], config.ddof)
    out = {name: np.zeros(len(values)) for name in ("values", "mean", "std")}
    zero_variance = np.zeros(len(values), dtype=bool)
    for members in _groups(group_ids):
        known = members[scored[members]]
        if known.size == 0:
            continue
        group = values[known]
        mean, std = group.mean(), _std(group, config.ddof)
        out["mean"][members], out["std"][members] = mean, std
        if known.size < 2 or _equal(group):
            zero_variance[known] = True
            continue
        out["values"][known] = (group - mean) / _divisor(config, std, batch_std)
    return Advantages(
        values=out["values"].astype(np.float32),
        scored=scored,
        group_mean=out["mean"].astype(np.float32),
        group_std=out["std"].astype(np.float32),
        zero_variance=zero_variance,
    )


def process_advantages(
    step_rewards: Sequence[Sequence[float] | None],
    step_ends: Sequence[Sequence[int] | None],
    lengths: Sequence[int],
    group_ids: Sequence[str],
    config: AdvantageConfig,
) -> list[np.ndarray]:
    """float32 [T] a completion from rewards of its steps (arXiv 2402.03300, 4.1.3).

    Step rewards are normalised over all steps of all members of the group; token t then gets the sum over the steps
    that end at or after t. ``step_ends`` are the positions of each step's last token (0 is the first token), rising.
    None (unscored) leaves the statistics and gets zeros, and so do groups with equal step rewards or fewer than two.

    Example, scale "none": steps ending at tokens 1 and 3 of four tokens, with normalised rewards 0.5 and -1, give
    -0.5, -0.5, -1, -1. Raises ValueError where steps and ends do not fit each other or the completion.
    """
    count = len(lengths)
    if not len(step_rewards) == len(step_ends) == len(group_ids) == count:
        raise ValueError(
            f"process_advantages: {len(step_rewards)} lists of step rewards, {len(step_ends)} of step ends, {count} "
            f"lengths and {len(group_ids)} group ids: expected one of each a completion"
        )
    out = [np.zeros(length, dtype=np.float32) for length in lengths]
    steps = [_steps(step_rewards[i], step_ends[i], lengths[i], i) for i in range(count)]
    scored = [rewards for rewards, _ in steps if rewards is not None]
    batch_std = _std(np.concatenate(scored), config.ddof) if scored else 0.0
    for members in _groups(group_ids):
        known = [(i, *steps[i]) for i in members if steps[i][0] is not None]
        pooled = np.concatenate([rewards for _, rewards, _ in known]) if known else np.zeros(0)
        if pooled.size < 2 or _equal(pooled):
            continue
        mean, divisor = pooled.mean(), _divisor(config, _std(pooled, config.ddof), batch_std)
        for i, rewards, ends in known:
            out[i] = _returns((rewards - mean) / divisor, ends, lengths[i])
    return out


def correctness_indicator(correct: Sequence[bool | None]) -> np.ndarray:
    """float32 [B]: 1 for a correct completion, else 0: what RFT and Online RFT weigh log-likelihood with (eq. 10)."""
    return np.array([1.0 if verdict else 0.0 for verdict in correct], dtype=np.float32)


def preference_signs(correct: Sequence[bool | None], group_ids: Sequence[str]) -> np.ndarray:
    """float32 [B]: +1 chosen, -1 rejected, 0 unused, so that each group has as many chosen as rejected (for DPO).

    The k-th correct completion of a group is paired with its k-th incorrect one; None is never used.
    """
    if len(correct) != len(group_ids):
        raise ValueError(f"preference_signs: {len(correct)} verdicts but {len(group_ids)} group ids: expected as many")
    signs = np.zeros(len(correct), dtype=np.float32)
    for members in _groups(group_ids):
        chosen = [i for i in members if correct[i] is True]
        rejected = [i for i in members if correct[i] is False]
        pairs = min(len(chosen), len(rejected))
        signs[chosen[:pairs]] = 1.0
        signs[rejected[:pairs]] = -1.0
    return signs


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft penalty for long completions, in [-1, 0] (arXiv 2503.14476, eq. 13).

    0 up to ``max_tokens - buffer`` tokens, then falling linearly to -1 at ``max_tokens``. Example: with 100 tokens at
    most and a buffer of 20, 90 tokens cost (80 - 90) / 20 = -0.5. ``buffer`` 0 is no penalty.
    """
    if buffer == 0:
        return 0.0
    return min(0.0, max(-1.0, (max_tokens - buffer - length) / buffer))


def _as_array(rewards: Sequence[float | None], group_ids: Sequence[str]) -> np.ndarray:
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids: expected one of each a completion")
    for i, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(
                f"reward {i} (group {group_ids[i]}) is {reward}: expected a finite number, or None where scoring failed"
            )
    return np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)


def _steps(
    rewards: Sequence[float] | None, ends: Sequence[int] | None, length: int, index: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if rewards is None or ends is None:
        return None, None
    values, positions = np.asarray(rewards, dtype=np.float64), np.asarray(ends, dtype=np.int64)
    fits = len(values) == len(positions) and (np.diff(positions) > 0).all()
    if not fits or (positions.size and (positions[0] < 0 or positions[-1] >= length)):
        raise ValueError(
            f"completion {index}: {len(values)} step rewards and step ends {positions.tolist()} for {length} tokens: "
            f"expected one end a reward, rising, each a position in the completion"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"completion {index}: step rewards {values.tolist()}: expected finite numbers")
    return values, positions


def _returns(normalised: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """A_t = sum of the normalised rewards of the steps with end >= t; float32 [T]."""
    at_end = np.zeros(length)
    at_end[ends] = normalised
    return np.cumsum(at_end[::-1])[::-1].astype(np.float32)


def _groups(group_ids: Sequence[str]) -> list[np.ndarray]:
    members: dict[str, list[int]] = {}
    for i, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(i)
    return [np.array(indices) for indices in members.values()]


def _std(values: np.ndarray, ddof: int) -> float:
    return float(values.std(ddof=ddof)) if values.size > ddof else 0.0


def _equal(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= RELATIVE_NOISE * float(np.abs(values).max()) + ABSOLUTE_NOISE)


def _divisor(config: AdvantageConfig, group_std: float, batch_std: float) -> float:
    if config.scale == "none":
        return 1.0
    return (group_std if config.scale == "group" else batch_std) + config.epsilon
