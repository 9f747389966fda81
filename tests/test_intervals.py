"""Intervals over problems: agreement of bootstrap and closed form, coverage, Wilson's published value."""

from __future__ import annotations

import numpy as np
import pytest

from eval.intervals import bootstrap, clustered_normal, interval, wilson


def test_wilson_of_eight_in_ten():
    # p=0.8, n=10, z=1.959964: centre (0.8+0.19207)/1.38415 = 0.71674, half 1.41600*sqrt(0.016+0.0096036) = 0.22658.
    result = wilson(8, 10)
    assert (result.low, result.high) == pytest.approx((0.49016, 0.94332), abs=1e-4)


def test_wilson_keeps_a_width_where_all_or_none_succeed():
    assert wilson(0, 50).low == 0.0 < wilson(0, 50).high
    assert wilson(50, 50).high == 1.0 > wilson(50, 50).low


def test_bootstrap_and_closed_form_agree():
    values = np.random.default_rng(0).beta(0.6, 0.6, size=400)
    drawn, closed = bootstrap(values, resamples=4000, seed=1), clustered_normal(values)
    assert drawn.value == closed.value
    width = closed.high - closed.low
    assert abs(drawn.low - closed.low) < 0.06 * width
    assert abs(drawn.high - closed.high) < 0.06 * width


def test_closed_form_by_hand():
    # Values 0, 0.5, 1: mean 0.5, sd 0.5, t_2(0.975) = 4.302653, half = 4.302653 * 0.5 / sqrt(3).
    result = clustered_normal([0.0, 0.5, 1.0])
    assert (result.low, result.high) == pytest.approx((0.5 - 1.242069, 0.5 + 1.242069), abs=1e-5)


def test_clustering_widens_the_interval_of_repeated_samples():
    # 50 problems x 8 equal samples: pooled as 400 samples the interval would be sqrt(8) times too narrow.
    share = np.repeat(np.arange(50) % 2, 8).astype(float)
    pooled, clustered = wilson(share.sum(), 400), interval(share.reshape(50, 8).mean(axis=1))
    assert (clustered.high - clustered.low) / (pooled.high - pooled.low) == pytest.approx(8**0.5, rel=0.05)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(200):
        chance = rng.beta(2, 3, size=80)
        values = rng.binomial(4, chance) / 4
        result = interval(values, resamples=400, seed=trial)
        hits += result.low <= 0.4 <= result.high
    assert 0.90 <= hits / 200 <= 0.99


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    values = np.linspace(0, 1, 37)
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)
    assert bootstrap(values, seed=3) != bootstrap(values, seed=4)


def test_binary_values_take_wilson_and_others_the_bootstrap():
    assert interval([0.0, 1.0, 1.0]).method == "wilson"
    assert interval([0.0, 0.5, 1.0]).method == "bootstrap"


def test_what_cannot_have_an_interval_is_refused():
    with pytest.raises(ValueError, match="at least one problem"):
        interval([])
    with pytest.raises(ValueError, match="finite"):
        interval([0.5, float("nan")])
    with pytest.raises(ValueError, match="at least 2 problems"):
        clustered_normal([0.5])
    with pytest.raises(ValueError, match="successes"):
        wilson(3, 2)
