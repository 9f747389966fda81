"""Components to one reward, by sums worked out by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.aggregation import combine, normalise_in_groups, without_in_plain_groups


def test_the_sum_is_weighted_and_leaves_out_what_a_problem_does_not_have():
    rows = [{"verifier": 1.0, "format": 0.5}, {"verifier": 0.0, "code": 0.25, "format": 1.0}]
    weights = {"verifier": 1.0, "format": 0.2, "code": 2.0}
    # 1 + 0.2 * 0.5 = 1.1; 0 + 2 * 0.25 + 0.2 * 1 = 0.7
    assert combine(rows, weights, ["a", "b"], how="sum") == pytest.approx([1.1, 0.7])


def test_an_unscored_component_leaves_the_rollout_unscored_unless_it_pays_nothing():
    rows = [{"verifier": 1.0, "format": None}]
    assert combine(rows, {"verifier": 1.0, "format": 0.1}, ["a"], how="sum") == [None]
    assert combine(rows, {"verifier": 1.0, "format": 0.0}, ["a"], how="sum") == [1.0]


def test_gdpo_brings_every_component_to_one_scale_within_its_group():
    rows = [{"a": 1.0, "b": 100.0}, {"a": 0.0, "b": 300.0}, {"a": 5.0, "b": 0.0}, {"a": 5.0, "b": 0.0}]
    # Group g: a is 1, 0 (mean 0.5, deviation 0.5): +1, -1; b is 100, 300 (mean 200, deviation 100): -1, +1.
    # Weights 1 and 0.5: 1 - 0.5 = 0.5 and -1 + 0.5 = -0.5. Group h has no differences: exactly 0.
    totals = combine(rows, {"a": 1.0, "b": 0.5}, ["g", "g", "h", "h"], how="gdpo")
    assert totals[:2] == pytest.approx([0.5, -0.5], abs=1e-5)
    assert totals[2:] == [0.0, 0.0]


def test_groups_are_told_apart_by_id_not_by_position():
    # Group g holds 0 and 2, group h holds 10 and 14, in turns: -1, -1, 1, 1.
    assert normalise_in_groups([0.0, 10.0, 2.0, 14.0], ["g", "h", "g", "h"]) == pytest.approx([-1, -1, 1, 1], abs=1e-5)


def test_unscored_members_leave_the_statistics():
    # Without the None: mean 1, deviation 1.
    assert normalise_in_groups([0.0, None, 2.0], ["g"] * 3) == pytest.approx([-1.0, None, 1.0], abs=1e-5)


def test_rounding_is_no_difference():
    assert normalise_in_groups([0.1 + 0.2, 0.3], ["g", "g"]) == [0.0, 0.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12))
def test_normalised_values_sum_to_zero_and_keep_their_order(values):
    out = normalise_in_groups(values, ["g"] * len(values))
    assert math.isclose(math.fsum(out), 0.0, abs_tol=1e-6)
    order = sorted(range(len(values)), key=lambda i: values[i])
    assert all(out[a] <= out[b] + 1e-12 for a, b in itertools.pairwise(order))


def test_a_component_can_be_left_out_of_groups_without_both_verdicts():
    rows = [{"verifier": float(i), "learnt": 0.5} for i in range(5)]
    groups, correct = ["mixed", "mixed", "wrong", "wrong", "right"], [True, False, False, None, True]
    out = without_in_plain_groups(rows, ["learnt"], groups, correct)
    assert ["learnt" in row for row in out] == [True, True, False, False, False]
    assert [row["verifier"] for row in out] == [0.0, 1.0, 2.0, 3.0, 4.0]
