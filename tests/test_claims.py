"""The paper's claims: sentences say seen only when it is, and say how sure; a study's methods are told apart by recipe."""

from __future__ import annotations

import numpy as np
import pytest

from eval.claims import (
    SeedsDifference,
    claims,
    iteration_sentence,
    method,
    ordering_sentence,
    seeds_difference,
    sharpening_sentence,
)
from eval.compare import Difference
from eval.gather import gather
from eval.report import build_report
from flows.execute import findings
from pipeline.config import load_recipe
from tests.synthetic_run import synthetic_run
from tests.test_report import Page


def changed(metric, difference, p_value):
    return Difference(metric, 0.3, 0.3 + difference, difference, difference - 0.02, difference + 0.02, p_value, "", 100)


def test_a_vote_that_rose_without_reach_is_the_paper_s_picture():
    rose, stayed = changed("maj@64", 0.1, 0.001), changed("pass@64", 0.01, 0.4)
    assert sharpening_sentence(rose, stayed).startswith("The paper's picture is seen here: the vote rose")
    assert "maj@64 +10.0 points" in sharpening_sentence(rose, stayed) and "p = 0.001" in sharpening_sentence(
        rose, stayed
    )
    reach = changed("pass@64", 0.1, 0.001)
    assert sharpening_sentence(rose, reach).startswith("Half of the paper's picture")
    assert "not seen here" in sharpening_sentence(changed("maj@64", -0.1, 0.001), reach)
    assert "not seen here" in sharpening_sentence(changed("maj@64", 0.1, 0.2), stayed)


def test_two_sure_rounds_of_which_the_first_gained_more_are_the_paper_s_picture():
    large, small = changed("pass@1", 0.2, 0.001), changed("pass@1", 0.05, 0.01)
    assert "picture is seen here" in iteration_sentence(large, small)
    assert "the first did not gain more" in iteration_sentence(small, large)
    assert "not seen here in full" in iteration_sentence(small, large)
    assert "the second cannot be told from none" in iteration_sentence(large, changed("pass@1", 0.01, 0.5))
    assert "Neither" in iteration_sentence(changed("pass@1", -0.1, 0.001), changed("pass@1", 0.01, 0.5))


def test_the_order_of_methods_is_seen_only_when_every_step_is_sure():
    sure, unsure = SeedsDifference(0.05, 0.02, 0.08, 3, 3), SeedsDifference(0.01, -0.02, 0.04, 2, 3)
    against = SeedsDifference(-0.03, -0.05, -0.01, 3, 3)
    pairs = [("RFT", "Online RFT", sure), ("Online RFT", "GRPO+OS", sure)]
    assert ordering_sentence(pairs, "round-04").startswith("The paper's order is seen here, in pass@1 at round-04.")
    assert "not every step of it is sure" in ordering_sentence([pairs[0], ("a", "b", unsure)], "round-04")
    assert ordering_sentence([pairs[0], ("a", "b", against)], "round-04").startswith(
        "The paper's order is not seen here"
    )
    assert "the same sign in 3 of 3 seeds" in ordering_sentence(pairs, "round-04")


def test_the_interval_over_seeds_is_wider_than_that_over_problems_alone():
    rng = np.random.default_rng(0)
    effects = {0: 0.0, 1: 0.1, 2: 0.2}
    base = {s: {f"{s}-{i}": float(v) for i, v in enumerate(rng.random(100))} for s in effects}
    better = {s: {p: v + effects[s] for p, v in base[s].items()} for s in effects}
    found = seeds_difference(base, better)
    assert found.difference == pytest.approx(0.1) and (found.agreeing, found.seeds) == (2, 3)
    # each problem of a seed changes by the same: only the draw of seeds spreads, from 0.0 to 0.2
    assert found.low == pytest.approx(0.0, abs=0.04) and found.high == pytest.approx(0.2, abs=0.04)
    alone = seeds_difference({1: base[1]}, {1: better[1]})
    assert alone.low == pytest.approx(0.1) and alone.high == pytest.approx(0.1)


def test_methods_without_a_common_seed_are_refused():
    with pytest.raises(ValueError, match="no training seed in common"):
        seeds_difference({0: {"a": 1.0}}, {1: {"a": 1.0}})


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "GRPO+OS"),
        (["grpo.advantages.supervision=process"], "GRPO+PS"),
        (["grpo.objective.algorithm=rft", "grpo.objective.kl_coefficient=0"], "RFT"),
        (["grpo.objective.algorithm=online_rft", "grpo.objective.kl_coefficient=0"], "Online RFT"),
    ],
)
def test_a_recipe_says_which_method_it_trains_by(overrides, name):
    data = load_recipe("embedded").model_dump(mode="json")
    for override in overrides:
        *path, last = override.split("=")[0].split(".")
        section = data
        for part in path:
            section = section[part]
        section[last] = override.split("=")[1]
    assert method(data) == name


def test_a_run_of_figure_7_reports_its_claim_with_a_picture(tmp_path):
    run = synthetic_run(tmp_path, "seven", overrides=["name=figure7"])
    (claim,) = claims([gather(run)])
    # the chance of a right answer doubles from 0.3 to 0.6, so the vote of 8 surely rises
    assert "the vote rose" in claim.found and claim.picture.startswith("<svg")
    text = "".join(Page(build_report([run], tmp_path / "r.html").read_text(encoding="utf-8")).text)
    assert claim.found in text


def test_a_run_of_figure_6_reports_its_claim_and_says_it_at_its_end(tmp_path):
    run = synthetic_run(tmp_path, "six", problems=60, overrides=["name=figure6"])
    (claim,) = claims([gather(run)])
    assert findings(load_recipe("figure6"), run) == [f"{claim.title}. {claim.found}"]
    assert findings(load_recipe("embedded"), run) == []
    # 0.3 to 0.45 to 0.6 with 60 problems of 8 samples: a standard error of about 0.03 a round
    assert "round 1 +" in claim.found and "Both rounds are sure gains" in claim.found


def test_the_methods_of_figure_5_are_compared_seed_by_seed(tmp_path):
    runs = [
        synthetic_run(tmp_path, f"{name}-{seed}", lift=lift, seed=seed, overrides=["name=figure5", *overrides])
        for seed in (0, 1)
        for name, lift, overrides in (
            ("online", 0.0, ["grpo.objective.algorithm=online_rft", "grpo.objective.kl_coefficient=0"]),
            ("grpo", 0.3, []),
        )
    ]
    (claim,) = claims([gather(run) for run in runs])
    assert claim.found.startswith("The paper's order is seen here, in pass@1 at round-02. GRPO+OS over Online RFT: +")
    assert "2 of 2 seeds" in claim.found


def test_other_recipes_make_no_claim(tmp_path):
    assert claims([gather(synthetic_run(tmp_path))]) == []
