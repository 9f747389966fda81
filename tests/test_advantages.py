"""Advantages by hand-computed numbers, then invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.advantages import (
    correctness_indicator,
    outcome_advantages,
    overlong_penalty,
    preference_signs,
    process_advantages,
)
from pipeline.config import AdvantageConfig

EXACT = AdvantageConfig(epsilon=0.0)


@pytest.mark.parametrize(("ddof", "first", "rest"), [(0, 3**0.5, -1 / 3**0.5), (1, 1.5, -0.5)])
def test_rewards_1_0_0_0(ddof: int, first: float, rest: float) -> None:
    # mean 0.25; sum of squares 0.75: std (0.75/4)^.5 = 0.433 or (0.75/3)^.5 = 0.5; 0.75/0.433 = 1.732, 0.75/0.5 = 1.5
    got = outcome_advantages([1, 0, 0, 0], ["a"] * 4, AdvantageConfig(epsilon=0.0, ddof=ddof))
    assert got.values.tolist() == pytest.approx([first, rest, rest, rest])
    assert got.group_mean.tolist() == [0.25] * 4
    assert got.group_std.tolist() == pytest.approx([math.sqrt(0.75 / (4 - ddof))] * 4)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    # std 0.5: 0.5 / (0.5 + 0.5)
    got = outcome_advantages([1, 0], ["a", "a"], AdvantageConfig(epsilon=0.5))
    assert got.values.tolist() == [0.5, -0.5]


def test_a_group_of_two_and_scale_none() -> None:
    got = outcome_advantages([3, 1], ["a", "a"], AdvantageConfig(scale="none"))
    assert got.values.tolist() == [1.0, -1.0]


def test_batch_scale_divides_by_the_std_of_all_scored_rewards() -> None:
    # rewards 2 0 | 5 3 and one unscored: mean 2.5, squares .25 + 6.25 + 6.25 + .25 = 13, std (13/4)^.5
    got = outcome_advantages([2, 0, 5, 3, None], [*"aabbb"], AdvantageConfig(scale="batch", epsilon=0.0))
    unit = 1 / math.sqrt(13 / 4)
    assert got.values.tolist() == pytest.approx([unit, -unit, unit, -unit, 0.0])


def test_unscored_members_leave_the_statistics_and_get_zero() -> None:
    got = outcome_advantages([1, None, 0, None], ["a"] * 4, EXACT)
    assert got.values.tolist() == [1.0, 0.0, -1.0, 0.0]
    assert got.scored.tolist() == [True, False, True, False]
    assert got.group_mean.tolist() == [0.5] * 4


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [0.0, 0.0, 0.0], [1e6, 1e6 + 1e-3, 1e6], [0.7, None, None]])
def test_groups_without_signal_are_exactly_zero_and_counted(rewards: list[float | None]) -> None:
    got = outcome_advantages(rewards, ["a"] * 3, AdvantageConfig(epsilon=0.0))
    assert got.values.tolist() == [0.0, 0.0, 0.0]
    assert got.zero_variance.tolist() == [reward is not None for reward in rewards]


def test_small_true_differences_are_signal() -> None:
    got = outcome_advantages([1.0, 1.001], ["a", "a"], EXACT)
    assert got.values.tolist() == pytest.approx([-1.0, 1.0]) and not got.zero_variance.any()


def test_groups_are_told_apart_by_id_not_by_position() -> None:
    rewards, ids = [1, 5, 0, 9], ["a", "b", "a", "b"]
    together = outcome_advantages(rewards, ids, EXACT).values
    assert together.tolist() == [1.0, -1.0, -1.0, 1.0]


def test_an_empty_step_has_no_advantages() -> None:
    assert outcome_advantages([], [], EXACT).values.shape == (0,)
    assert outcome_advantages([None], ["a"], EXACT).values.tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"group b.*None where scoring failed"):
        outcome_advantages([1.0, bad], ["a", "b"], EXACT)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 group"):
        outcome_advantages([1.0, 0.0], ["a"], EXACT)


def test_process_supervision_sums_the_steps_that_end_at_or_after_a_token() -> None:
    # One group: steps 1, 0 (ends 1, 3 of 4 tokens) and 0 (end 1 of 2 tokens). Pooled 1, 0, 0: mean 1/3,
    # std (2/9)^.5 = 0.4714; normalised 1.4142, -0.7071, -0.7071.
    got = process_advantages([[1, 0], [0]], [[1, 3], [1]], [4, 2], ["a", "a"], EXACT)
    high, low = math.sqrt(2), -math.sqrt(0.5)
    assert got[0].tolist() == pytest.approx([high + low, high + low, low, low])
    assert got[1].tolist() == pytest.approx([low, low])


def test_tokens_after_the_last_step_get_nothing() -> None:
    got = process_advantages([[1.0], [0.0]], [[0], [0]], [3, 1], ["a", "a"], AdvantageConfig(scale="none"))
    assert got[0].tolist() == [0.5, 0.0, 0.0]


def test_unscored_and_equal_steps_give_zeros() -> None:
    got = process_advantages([None, [1, 1], [0], [1]], [None, [0, 1], [0], [0]], [2, 2, 1, 1], [*"aabb"], EXACT)
    assert [g.tolist() for g in got] == [[0, 0], [0, 0], [-1], [1]]


@pytest.mark.parametrize("ends", [[1, 1], [2, 1], [0, 5], [-1, 1], [0]])
def test_step_ends_that_do_not_fit_are_refused(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="step ends"):
        process_advantages([[1, 0]], [ends], [3], ["a"], EXACT)


def test_one_step_at_the_last_token_is_outcome_supervision() -> None:
    rewards = [1.0, 0.0, 0.5]
    outcome = outcome_advantages(rewards, ["a"] * 3, EXACT).values
    process = process_advantages([[r] for r in rewards], [[1], [2], [0]], [2, 3, 1], ["a"] * 3, EXACT)
    for value, tokens in zip(outcome, process, strict=True):
        np.testing.assert_allclose(tokens, value, rtol=1e-6)


def test_advantages_of_a_group_sum_to_zero_and_ignore_shift_and_scale() -> None:
    rng = np.random.default_rng(0)
    rewards, ids = rng.normal(size=24), [f"g{i % 3}" for i in range(24)]
    base = outcome_advantages(rewards.tolist(), ids, EXACT).values
    moved = outcome_advantages((3 * rewards - 7).tolist(), ids, EXACT).values
    np.testing.assert_allclose(base, moved, rtol=1e-5, atol=1e-6)
    for group in range(3):
        assert base[group::3].sum() == pytest.approx(0.0, abs=1e-5)
        assert (base[group::3] ** 2).mean() == pytest.approx(1.0, rel=1e-5)


def test_indicator_and_preference_signs() -> None:
    verdicts = [True, False, None, True, False, False]
    assert correctness_indicator(verdicts).tolist() == [1, 0, 0, 1, 0, 0]
    # group a: one correct, one incorrect: a pair; group b: one correct, two incorrect: the first of them
    assert preference_signs(verdicts, [*"aaabbb"]).tolist() == [1, -1, 0, 1, -1, 0]
    assert preference_signs([True, True], ["a", "a"]).tolist() == [0, 0]


@pytest.mark.parametrize(("length", "penalty"), [(50, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (120, -1.0)])
def test_overlong_penalty(length: int, penalty: float) -> None:
    # 100 at most, buffer 20: (80 - 90) / 20 = -0.5
    assert overlong_penalty(length, 100, 20) == penalty
    assert overlong_penalty(length, 100, 0) == 0.0
