"""Scoring end to end: verdicts, components, and failures that are counted and never paid as 0."""

import logging
import math

import pytest

from pipeline.config import RewardConfig
from rewards.scoring import Scorer
from rewards.verifier import Verdict
from rewards.watch import drift, summarise_learnt
from tests.scored import problem, rollout

PROBLEMS = {"p": problem("4"), "q": problem("7", problem_id="q")}
RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"


class FixedVerdicts:
    """A verifier that says what it was told, case by case."""

    def __init__(self, *statuses):
        self.statuses = statuses

    def judge_many(self, cases, progress):
        return [Verdict(status, None, "told") for status, _ in zip(self.statuses, cases, strict=True)]


def score(rollouts, *, verifier=None, reward_model=None, process_model=None, problems=None, **config):
    config.setdefault("max_unscored", 1.0)
    with Scorer(
        RewardConfig(**config), "boxed", reward_model, process_model=process_model, verifier=verifier
    ) as scorer:
        return scorer.score(problems or PROBLEMS, rollouts), scorer.take_faults()


def test_the_reward_is_the_weighted_sum_and_every_component_is_kept():
    rollouts = [rollout(RIGHT), rollout(WRONG, index=1), rollout("no answer here", index=2)]
    rewards, faults = score(rollouts, weights={"verifier": 1.0, "format": 0.1})
    # 1 + 0.1; 0 + 0.1; 0 + 0.
    assert [r.reward for r in rewards] == pytest.approx([1.1, 0.1, 0.0])
    assert [r.status for r in rewards] == ["correct", "incorrect", "no_answer"]
    assert [r.correct for r in rewards] == [True, False, False]
    assert rewards[0].components == {"verifier": 1.0, "format": 1.0}
    assert rewards[0].answer == "4"
    assert [r.rollout_id for r in rewards] == ["p-0", "p-1", "p-2"]
    assert faults == {}


def test_a_truncated_completion_is_not_paid_for_a_box():
    rewards, _ = score([rollout(RIGHT, finish_reason="length")], weights={"verifier": 1.0, "format": 1.0})
    assert rewards[0].components["format"] == 0.0


@pytest.mark.parametrize("status", ["timeout", "error", "gold_unparsable"])
def test_a_failure_to_judge_is_unscored_counted_once_and_leaves_the_others_alone(status):
    rollouts = [rollout(RIGHT), rollout(RIGHT, index=1)]
    rewards, faults = score(
        rollouts, verifier=FixedVerdicts(status, "correct"), weights={"verifier": 1.0, "format": 0.1, "length": 0.1}
    )
    assert (rewards[0].reward, rewards[0].correct, rewards[0].status) == (None, None, status)
    assert rewards[1].reward > 1.0
    assert faults == {f"verifier/{status}": 1}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("raises", "mine/raised"), ("hangs", "mine/hung"), ("exits", "mine/died"), ("not_a_number", "mine/not_finite"),
        ("infinite", "mine/not_finite"), ("a_string", "mine/not_a_number"), ("a_list", "mine/not_a_number"),
        ("nothing", "mine/unscored"), ("unpicklable", "mine/not_a_number"),
    ],
)  # fmt: skip
def test_a_users_function_that_fails_is_named_counted_and_unscored(name, fault):
    rewards, faults = score(
        [rollout(RIGHT)],
        weights={"verifier": 1.0, "mine": 1.0}, functions={"mine": f"tests.user_rewards:{name}"}, function_timeout=0.3,
    )  # fmt: skip
    assert rewards[0].reward is None
    assert rewards[0].components == {"verifier": 1.0, "mine": None}
    assert rewards[0].correct is True  # the verdict stands
    assert faults == {fault: 1}


def test_only_the_calls_that_fail_are_unscored():
    rollouts = [rollout(text, index=i) for i, text in enumerate(["one", "two", "three"])]
    rewards, faults = score(rollouts, weights={"mine": 2.0}, functions={"mine": "tests.user_rewards:raises_on_two"})
    assert [r.reward for r in rewards] == [2.0, None, 2.0]
    assert faults == {"mine/raised": 1}


def test_a_component_that_pays_nothing_cannot_unscore():
    rewards, faults = score(
        [rollout(RIGHT)], weights={"verifier": 1.0, "mine": 0.0}, functions={"mine": "tests.user_rewards:raises"}
    )
    assert rewards[0].reward == 1.0
    assert faults == {"mine/raised": 1}


def raising(rollouts):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("model", "values", "faults"),
    [
        # Logits are paid as probabilities: ln 3 is 3 / (3 + 1), -1000 is 0.
        (lambda rollouts: [math.log(3), -1000.0], [0.75, 0.0], {}),
        (lambda rollouts: [float("nan"), 0.0], [None, 0.5], {"reward_model/not_finite": 1}),
        (lambda rollouts: ["high", 0.0], [None, 0.5], {"reward_model/not_a_number": 1}),
        (lambda rollouts: [None, 0.0], [None, 0.5], {"reward_model/unscored": 1}),
        (lambda rollouts: [1.0], [None, None], {"reward_model/wrong_length": 2}),
        (lambda rollouts: "hi", [None, None], {"reward_model/wrong_length": 2}),
        (lambda rollouts: None, [None, None], {"reward_model/wrong_length": 2}),
        (raising, [None, None], {"reward_model/raised": 2}),
    ],
)
def test_a_reward_model_that_fails_is_named_counted_and_unscored(model, values, faults):
    rollouts = [rollout(RIGHT), rollout(WRONG, index=1)]
    rewards, found = score(rollouts, reward_model=model, weights={"reward_model": 1.0}, reward_model_pays="all_groups")
    assert [r.reward for r in rewards] == pytest.approx(values)
    assert found == faults


def test_the_reward_model_pays_only_where_the_verifier_finds_a_difference():
    rollouts = [
        rollout(RIGHT), rollout(WRONG, index=1), rollout(WRONG, problem_id="q"), rollout(WRONG, problem_id="q", index=1)
    ]  # fmt: skip

    def model(rollouts):
        return [0.0, 0.0, 3.0, -3.0]

    weights = {"verifier": 1.0, "reward_model": 0.2}
    rewards, _ = score(rollouts, reward_model=model, weights=weights)
    # Logit 0 is probability 0.5: 1 + 0.1 and 0.1; nobody of group q is right.
    assert [r.reward for r in rewards] == pytest.approx([1.1, 0.1, 0.0, 0.0])
    assert rewards[2].components["reward_model"] == pytest.approx(0.9526, abs=1e-4)  # kept all the same
    everywhere, _ = score(rollouts, reward_model=model, weights=weights, reward_model_pays="all_groups")
    # 1 / (1 + e^-3) = 0.9526, a fifth of it 0.1905.
    assert [r.reward for r in everywhere[2:]] == pytest.approx([0.1905, 0.0095], abs=1e-4)


def test_a_new_reward_model_takes_over():
    config = RewardConfig(weights={"reward_model": 1.0}, reward_model_pays="all_groups")
    with Scorer(config, "boxed", lambda rollouts: [1.0]) as scorer:
        scorer.set_reward_model(lambda rollouts: [0.0])
        assert scorer.score(PROBLEMS, [rollout(RIGHT)])[0].reward == 0.5


def test_a_weight_without_a_reward_model_says_so():
    with pytest.raises(RuntimeError, match=r"rewards\.weights names reward_model but none is set"):
        score([rollout(RIGHT)], weights={"reward_model": 1.0})


def test_step_rewards_and_their_ends_are_kept():
    rewards, _ = score(
        [rollout(RIGHT)], process_model=lambda rollouts: [([0.2, 0.9], [3, 9])], weights={"verifier": 1.0}
    )
    assert (rewards[0].step_rewards, rewards[0].step_ends) == ((0.2, 0.9), (3, 9))


@pytest.mark.parametrize("steps", [([0.2], [3, 9]), ([float("nan"), 1.0], [3, 9]), "steps", 3, ([0.1], None)])
def test_steps_that_do_not_fit_are_counted_and_left_out(steps):
    rewards, faults = score([rollout(RIGHT)], process_model=lambda rollouts: [steps], weights={"verifier": 1.0})
    assert rewards[0].step_rewards is None
    assert faults == {"process_model/not_steps": 1}


def test_code_problems_are_judged_by_their_tests_and_mathematics_by_the_verifier():
    problems = {
        "p": problem("4"),
        "c": problem("", problem_id="c", tests=[{"code": "assert f(1) == 2"}, {"code": "f(0)"}]),
    }
    program = "Here:\n```python\ndef f(x):\n    return 1 // x\n```"
    rewards, faults = score(
        [rollout(RIGHT), rollout(program, problem_id="c")], problems=problems,
        weights={"verifier": 1.0, "code": 1.0, "format": 0.5},
    )  # fmt: skip
    assert rewards[0].components == {"verifier": 1.0, "format": 1.0}
    # f(1) is 1 and not 2, f(0) raises: no test passes; the form (a closed block) is right.
    assert rewards[1].components == {"verifier": 0.0, "code": 0.0, "format": 1.0}
    assert (rewards[1].status, rewards[1].correct, rewards[1].reward) == ("incorrect", False, 0.5)
    assert faults == {}


def test_a_code_problem_with_broken_tests_is_unscored():
    problems = {"c": problem("", problem_id="c", tests=[{"input": "1"}])}
    rewards, faults = score([rollout("```python\nx\n```", problem_id="c")], problems=problems, weights={"code": 1.0})
    assert rewards[0].reward is None
    assert faults == {"code/gold_unparsable": 1}


def test_too_many_unscored_stop_the_step_and_the_message_names_the_cause():
    config = {"weights": {"mine": 1.0}, "functions": {"mine": "tests.user_rewards:raises"}, "max_unscored": 0.5}
    with pytest.raises(RuntimeError, match=r"2 of 2 rollouts are unscored.*max_unscored = 0\.5.*mine/raised 2"):
        score([rollout(RIGHT), rollout(RIGHT, index=1)], **config)


def test_or_only_warn(caplog):
    config = {"weights": {"mine": 1.0}, "functions": {"mine": "tests.user_rewards:raises"}, "max_unscored": 0.5}
    with caplog.at_level(logging.WARNING):
        rewards, _ = score([rollout(RIGHT)], unscored_action="warn", **config)
    assert rewards[0].reward is None
    assert "1 of 1 rollouts are unscored" in caplog.text


def test_equal_rewards_for_some_steps_are_said_loudly(caplog):
    same = [rollout(WRONG), rollout(WRONG, index=1)]
    config = RewardConfig(weights={"verifier": 1.0}, equal_steps=2)
    with Scorer(config, "boxed") as scorer, caplog.at_level(logging.WARNING):
        scorer.score(PROBLEMS, same)
        assert "equal" not in caplog.text
        scorer.score(PROBLEMS, [rollout(RIGHT), rollout(WRONG, index=1)])  # a difference starts the count again
        scorer.score(PROBLEMS, same)
        assert "equal" not in caplog.text
        scorer.score(PROBLEMS, same)
        assert "all 2 rewards of a step were equal (0) for 2 steps in a row" in caplog.text


def test_equal_rewards_can_stop_the_run_and_only_training_counts():
    config = RewardConfig(weights={"verifier": 1.0}, equal_steps=1, equal_action="stop")
    with Scorer(config, "boxed") as scorer:
        scorer.score(PROBLEMS, [rollout(WRONG, purpose="evaluate"), rollout(WRONG, index=1, purpose="evaluate")])
        with pytest.raises(RuntimeError, match="the policy learns nothing"):
            scorer.score(PROBLEMS, [rollout(WRONG), rollout(WRONG, index=1)])


def test_verify_gives_verdicts_alone():
    with Scorer(RewardConfig(weights={"verifier": 1.0, "format": 5.0}), "boxed") as scorer:
        rewards = scorer.verify(PROBLEMS, [rollout(RIGHT), rollout(WRONG, index=1)])
    assert [(r.reward, r.components) for r in rewards] == [(1.0, {}), (0.0, {})]


def test_a_problem_that_is_missing_is_named():
    with pytest.raises(ValueError, match="1 problems of the rollouts were not given, the first is nowhere"):
        score([rollout(RIGHT, problem_id="nowhere")], weights={"verifier": 1.0})


def test_a_closed_scorer_says_so():
    scorer = Scorer(RewardConfig(weights={"verifier": 1.0}), "boxed")
    with pytest.raises(RuntimeError, match="not open"):
        scorer.score(PROBLEMS, [rollout(RIGHT)])


def test_no_rollouts_no_rewards():
    assert score([], weights={"verifier": 1.0, "code": 1.0}) == ([], {})


def learnt(pairs):
    from pipeline.types import Reward

    return [Reward(str(i), 0.0, c, "correct", None, {"reward_model": s}) for i, (s, c) in enumerate(pairs)]


def test_the_learnt_reward_is_compared_with_the_verifier():
    # Scores 1, 2, 3, 4 and verdicts 0, 0, 1, 1: means 2.5 and 0.5, covariance 0.5, deviations 1.118 and 0.5:
    # correlation 0.5 / 0.559 = 0.894; every correct one scores above every wrong one.
    found = summarise_learnt(learnt([(1.0, False), (2.0, False), (3.0, True), (4.0, True)]))
    assert found["correlation"] == pytest.approx(0.8944, abs=1e-4)
    assert (found["rollouts"], found["score"], found["correct"], found["auc"]) == (4, 2.5, 0.5, 1.0)
    # Deviation 1.118 over the root of four rollouts.
    assert found["score_error"] == pytest.approx(0.5590, abs=1e-4)


def test_unscored_rollouts_do_not_count_and_a_constant_has_no_correlation():
    found = summarise_learnt(learnt([(None, True), (1.0, None), (1.0, True), (1.0, False)]))
    assert (found["rollouts"], found["correlation"], found["auc"]) == (2, None, 0.5)
    assert summarise_learnt([]) == {"rollouts": 0}


def test_a_rising_score_with_falling_correctness_is_named():
    early = summarise_learnt(learnt([(0.0, True), (0.2, True), (0.1, True), (0.3, False)] * 25))
    late = summarise_learnt(learnt([(2.0, False), (2.2, True), (2.1, False), (2.3, False)] * 25))
    warning = drift(early, late)
    # 75 of 100 correct before, 25 of 100 after; means 0.15 and 2.15.
    assert "rose from 0.150 to 2.150 while the share of correct rollouts fell from 0.750 to 0.250" in warning
    assert "rewards.weights.reward_model" in warning
    assert drift(late, early) is None  # both got better
    assert drift(early, early) is None
    assert drift(early, {"rollouts": 0}) is None


def test_a_difference_within_chance_is_not_named():
    early = summarise_learnt(learnt([(0.0, True), (0.2, True), (0.1, False)]))
    late = summarise_learnt(learnt([(0.1, True), (0.2, False), (0.1, False)]))
    assert drift(early, late) is None
