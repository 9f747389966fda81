"""Process supervision through the whole recipe in miniature: labels, step rewards, advantages a token."""

import pytest

from pipeline import store
from pipeline.rundir import read_result
from stages.process_model import labelled_steps
from tests.tiny import tiny_run

pytestmark = pytest.mark.slow
PROCESS = [
    'grpo.advantages.supervision="process"', 'reward_model.step_delimiter="o"', "reward_model.continuations=3",
    "reward_model.process_samples=2", "grpo.rounds=1", "grpo.steps=2",
]  # fmt: skip
"""The policy writes one line, so its steps are cut after the letter o of the box's command."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("runs"), *PROCESS)


def rows_of(paths, table, key=None):
    return store.read(paths, table, key).to_pylist()


def test_every_continuation_is_a_rollout_with_a_verdict(whole):
    _, paths = whole
    rollouts = rows_of(paths, "rollouts", "process_model")
    first = [row for row in rollouts if row["sample_index"] < 2]
    assert len(first) == 6 * 2  # six problems, two completions each
    continued = [row for row in rollouts if row["sample_index"] >= 2]
    assert continued and len(continued) % 3 == 0
    prompts = {row["problem_id"]: row["prompt_token_ids"] for row in first}
    for row in continued:
        assert row["prompt_token_ids"][: len(prompts[row["problem_id"]])] == prompts[row["problem_id"]]
        assert len(row["prompt_token_ids"]) > len(prompts[row["problem_id"]])
        # What stands before and what was drawn keep the limit together.
        drawn = len(row["prompt_token_ids"]) - len(prompts[row["problem_id"]]) + len(row["completion_token_ids"])
        assert drawn <= 12
    assert len({row["rollout_id"] for row in rollouts}) == len(rollouts)
    assert {row["rollout_id"] for row in rollouts} == {
        r["rollout_id"] for r in rows_of(paths, "rewards", "process_model")
    }
    metrics = read_result(paths, "process_model").metrics
    assert metrics["continuations"] == len(continued)


def test_the_refresh_continues_the_rounds_own_completions_and_measures_the_new_model_beside_the_old(whole):
    _, paths = whole
    metrics = read_result(paths, "round-01/refresh").metrics
    train = {row["rollout_id"]: row for row in rows_of(paths, "rollouts") if row["purpose"] == "train"}
    whole_rows = [row.completion_token_ids for row in labelled_steps(paths, "round-01/refresh")]
    # 2 steps of 4 groups: 8, of which 6 (reward_model.problems) are drawn, 2 (process_samples) completions each.
    assert metrics["process/completions"] == len(whole_rows) == 12
    assert all(tokens in [row["completion_token_ids"] for row in train.values()] for tokens in whole_rows)
    continued = rows_of(paths, "rollouts", "round-01/refresh")
    assert len(continued) == metrics["process/continuations"]
    assert {row["policy_version"] for row in continued} == {"round-01"}
    # A tenth of as many earlier rows as there are new ones.
    assert metrics["process/replayed"] == round(0.1 * metrics["process/new"])
    assert metrics["process/before/rollouts"] == metrics["process/after/rollouts"]
    assert paths.checkpoint("process-model-01").is_dir()


def test_the_lowest_step_score_is_a_component_and_ranks_completions_in_evaluations(whole):
    _, paths = whole
    scored = [row for row in rows_of(paths, "rewards") if dict(row["components"]).get("process_model") is not None]
    assert scored
    for row in scored:
        assert dict(row["components"])["process_model"] == min(row["step_rewards"])
    assert "best_of_k_prm" in {row["metric"] for row in rows_of(paths, "evaluations")}


def test_continuations_are_judged_with_what_stands_before_them(whole):
    _, paths = whole
    verdicts = {row["rollout_id"]: row for row in rows_of(paths, "rewards", "process_model")}
    continued = [row for row in rows_of(paths, "rollouts", "process_model") if row["sample_index"] >= 2]
    # By itself "xed{1}" has no box and no answer; with "\\bo" before it, it has.
    assert any("\\boxed" not in row["text"] and verdicts[row["rollout_id"]]["answer"] is not None for row in continued)


def test_step_rewards_become_advantages_of_tokens(whole):
    _, paths = whole
    train = {row["rollout_id"]: row for row in rows_of(paths, "rollouts") if row["purpose"] == "train"}
    rewards = {row["rollout_id"]: row for row in rows_of(paths, "rewards") if row["rollout_id"] in train}
    several = 0
    for rollout_id, reward in rewards.items():
        ends, length = reward["step_ends"], len(train[rollout_id]["completion_token_ids"])
        assert ends[-1] == length - 1
        assert len(ends) == len(reward["step_rewards"])
        assert all(0.0 <= value <= 1.0 for value in reward["step_rewards"])
        several += len(ends) > 1
    assert several > 0
    advantages = rows_of(paths, "advantages")
    assert all(
        len(row["token_advantages"]) == len(train[row["rollout_id"]]["completion_token_ids"]) for row in advantages
    )
    assert any(value != 0.0 for row in advantages for value in row["token_advantages"])


def test_a_crash_while_labelling_samples_nothing_twice(whole, tmp_path, monkeypatch):
    class Killed(BaseException):
        """Stands for SIGKILL."""

    def die(*arguments, **keywords):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("stages.process_model.train_process_model", die)
        with pytest.raises(Killed):
            tiny_run(tmp_path, *PROCESS)
    _, paths = tiny_run(tmp_path, *PROCESS)
    before, after = (rows_of(run, "rollouts", "process_model") for run in (whole[1], paths))
    assert [row["completion_token_ids"] for row in before] == [row["completion_token_ids"] for row in after]
    assert read_result(whole[1], "process_model").metrics["train/loss_last"] == pytest.approx(
        read_result(paths, "process_model").metrics["train/loss_last"], rel=1e-9
    )
