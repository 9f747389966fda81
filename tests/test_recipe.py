"""The whole recipe in miniature: every stage, what it leaves on disk, and crashes that cost nothing."""

import json
import logging
import resource
import shutil
import sys
import time
from contextlib import contextmanager
from datetime import datetime

import pytest

from flows.cli import main
from flows.console import Display
from flows.execute import RunLog, execute
from pipeline import store
from pipeline.rundir import RunPaths, read_result, stage_keys
from stages.checkpoint import is_intact
from tests.same_run import compare
from tests.tiny import tiny_recipe, tiny_run


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the product may catch it."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(root):
    return tiny_run(root)


def test_every_stage_leaves_a_result(whole):
    recipe, paths = whole
    assert [key for key in stage_keys(recipe) if read_result(paths, key) is None] == []


def test_every_evaluated_policy_has_a_model_card(whole):
    _, paths = whole
    for name in ("warm-start", "round-01", "round-02", "final"):
        assert f"# tiny-{name}" in (paths.checkpoint(name) / "README.md").read_text()
        assert is_intact(paths.checkpoint(name))


def test_every_rollout_is_recorded_once_with_reward_and_advantage(whole):
    _, paths = whole
    rollouts = store.read(paths, "rollouts").to_pylist()
    train = [row for row in rollouts if row["purpose"] == "train"]
    # 2 rounds x 3 steps x 4 problems x 4 completions = 96
    assert len(train) == 96
    assert len({row["rollout_id"] for row in rollouts}) == len(rollouts)
    rewards = {row["rollout_id"] for row in store.read(paths, "rewards").to_pylist()}
    assert {row["rollout_id"] for row in rollouts} == rewards
    advantages = {row["rollout_id"] for row in store.read(paths, "advantages").to_pylist()}
    assert {row["rollout_id"] for row in train} == advantages
    for row in rollouts:
        assert len(row["sampling_logprobs"]) == len(row["completion_token_ids"]) > 0
        assert max(row["sampling_logprobs"]) <= 0.0


def test_each_step_is_sampled_by_the_policy_of_the_step_before(whole):
    _, paths = whole
    versions = {
        (row["round"], row["step"]): row["policy_version"]
        for row in store.read(paths, "rollouts").to_pylist()
        if row["purpose"] == "train"
    }
    assert [versions[key] for key in sorted(versions)] == [
        "warm-start", "round-01-step-0001", "round-01-step-0002",
        "round-01", "round-02-step-0001", "round-02-step-0002",
    ]  # fmt: skip


def test_advantages_of_a_group_sum_to_zero(whole):
    _, paths = whole
    group = {row["rollout_id"]: row["group_id"] for row in store.read(paths, "rollouts").to_pylist()}
    sums: dict[str, float] = {}
    for row in store.read(paths, "advantages").to_pylist():
        sums[group[row["rollout_id"]]] = sums.get(group[row["rollout_id"]], 0.0) + row["advantage"]
    assert max(abs(total) for total in sums.values()) < 1e-4


def test_a_complete_run_is_reused_without_opening_an_engine(whole, root, monkeypatch):
    recipe, paths = whole
    monkeypatch.setattr("flows.engines.open_learner", lambda *_: pytest.fail("a complete run opened a learner"))
    before = {key: paths.result_file(key).read_text() for key in stage_keys(recipe)}
    tiny_run(root)
    assert {key: paths.result_file(key).read_text() for key in stage_keys(recipe)} == before


def test_the_sql_of_the_readme_works_on_one_run_and_on_all(whole, root):
    question = "SELECT round, avg(correct::INT) FROM rollouts JOIN rewards USING (rollout_id) GROUP BY 1 ORDER BY 1"
    for run in ("tiny", None):
        rows = store.connect(run, root=root).sql(question).fetchall()
        assert [row[0] for row in rows] == [1, 2, None]


@pytest.mark.parametrize("nth", [1, 4, 8, 13, 17, 22, 26, 31, 40])
def test_a_crash_after_any_write_costs_nothing(whole, tmp_path, monkeypatch, nth):
    # The process dies right after its nth Parquet file; the same command then ends in the same bits.
    kill_at(monkeypatch, "pipeline.store.append", nth, tmp_path)
    assert_same_after_resume(whole, tmp_path)


@pytest.mark.parametrize("nth", [1, 3, 7, 12, 16, 19, 24, 29])
def test_a_crash_before_any_result_is_marked_costs_nothing(whole, tmp_path, monkeypatch, nth):
    kill_at(monkeypatch, "flows.workflow.write_result", nth, tmp_path, before=True)
    assert_same_after_resume(whole, tmp_path)


@pytest.mark.parametrize("nth", [1, 2, 4, 6, 8])
def test_a_crash_inside_a_checkpoint_costs_nothing(whole, tmp_path, monkeypatch, nth):
    kill_at(monkeypatch, "stages.checkpoint.seal", nth, tmp_path, before=True)
    assert_same_after_resume(whole, tmp_path)


def test_a_damaged_step_checkpoint_is_passed_over(whole, tmp_path, monkeypatch):
    kill_at(monkeypatch, "flows.workflow.write_result", 13, tmp_path, before=True)  # round 1, step 3
    damaged = list((tmp_path / "tiny" / "checkpoints").glob("round-01-step-*/*.safetensors"))
    assert damaged
    for file in damaged:
        file.write_bytes(file.read_bytes()[:100])
    assert_same_after_resume(whole, tmp_path)


@pytest.mark.parametrize("limit", [70_000, 100_000])
def test_a_disk_that_fills_ends_the_run_with_one_line_and_the_same_command_goes_on(
    whole, tmp_path, monkeypatch, capsys, limit
):
    # Files end at this size: the weights of the first checkpoint do not fit, or those with an optimizer do not.
    changes = [part for change in tiny_recipe(tmp_path) for part in ("--set", change)]
    arguments = ["grpoflow", "run", "--no-prefect", *changes, "--run-id", "tiny", "--root", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with file_size_limit(limit), pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    name = {70_000: "base", 100_000: "warm-start-step-000012"}[limit]
    way_out = "File too large; free space, then the same command continues"
    assert line == f"grpoflow: {tmp_path / 'tiny' / 'checkpoints' / name}: {way_out}"
    assert not list(tmp_path.rglob("*.partial"))
    assert_same_after_resume(whole, tmp_path)


def test_lines_of_the_log_that_a_full_disk_does_not_take_are_no_error(tmp_path, capsys):
    log = RunLog(tmp_path / "run.log")
    with file_size_limit(10):
        log.emit(logging.makeLogRecord({"msg": "stage select begins"}))
        log.close()
    assert capsys.readouterr().err == ""
    assert (tmp_path / "run.log").read_text() == "stage sele"


def test_a_clock_that_jumps_back_changes_nothing(whole, tmp_path, monkeypatch):
    kill_at(monkeypatch, "flows.workflow.write_result", 20, tmp_path, before=True)  # round 2, its second step
    last_year = time.time() - 365 * 24 * 3600

    class Earlier(datetime):
        @classmethod
        def now(cls, zone=None):
            return cls.fromtimestamp(last_year, zone)

    monkeypatch.setattr("flows.workflow.datetime", Earlier)
    monkeypatch.setattr("time.time", lambda: last_year)
    assert_same_after_resume(whole, tmp_path)


def test_a_truncated_result_is_named_and_its_stage_alone_is_done_again(whole, tmp_path):
    recipe, paths = copy_of(whole, tmp_path)
    key = "round-02/step-0003/update"
    paths.result_file(key).write_text(paths.result_file(key).read_text()[:40])
    display = Display(len(stage_keys(recipe)), quiet=True)
    with pytest.raises(ValueError, match=rf"{key}/result\.json: is damaged .*; delete it, and the run does"):
        execute(recipe, paths, display=display)
    paths.result_file(key).unlink()
    execute(recipe, paths, display=display)
    found = compare(whole[1], paths)
    assert (found.rows_lost, found.rows_doubled, found.bits_differ) == (0, 0, 0), found.details[:5]


def test_nothing_is_learnt_from_a_step_whose_rows_are_gone(whole, tmp_path):
    recipe, paths = copy_of(whole, tmp_path)
    key = "round-02/step-0003/update"
    paths.result_file(key).unlink()
    for table in ("rollouts", "rewards"):
        shutil.rmtree(paths.table(table))
    with pytest.raises(ValueError, match=rf"{key}: 0 rollouts .* --resume-from round-02/step-0003/rollout"):
        execute(recipe, paths, display=Display(len(stage_keys(recipe)), quiet=True))


def test_a_child_from_every_kind_of_stage_ends_like_its_parent(whole, root):
    # The same recipe from the same states samples the same; only the run id, and with it the row ids, are the child's.
    _, parent = whole
    for stage in ("round-02/step-0002/update", "reject", "evaluate/final"):
        _, child = tiny_run(root, resume_from=stage)
        assert child.header["parent"] == "tiny"
        expected = read_result(parent, "evaluate/final").metrics
        assert read_result(child, "evaluate/final").metrics == expected
        assert (child.checkpoint("final").exists()) == (stage != "evaluate/final")


def test_a_child_with_another_setting_leaves_its_parent_alone(whole, root):
    _, parent = whole
    before = sorted(path.name for path in parent.table("rollouts").rglob("*.parquet"))
    recipe, child = tiny_run(root, "grpo.lr=1e-3", resume_from="round-01/step-0001/rollout")
    assert recipe.grpo.lr == 1e-3
    assert sorted(path.name for path in parent.table("rollouts").rglob("*.parquet")) == before
    assert child.owner("sft") == parent


def test_kept_rejection_samples_are_correct_finished_and_distinct(whole):
    _, paths = whole
    kept = json.loads((paths.stage("reject") / "kept.json").read_text())
    rewards = {row["rollout_id"]: row for row in store.read(paths, "rewards", "reject").to_pylist()}
    rollouts = {row["rollout_id"]: row for row in store.read(paths, "rollouts", "reject").to_pylist()}
    assert kept
    assert all(rewards[i]["correct"] and rollouts[i]["finish_reason"] == "stop" for i in kept)
    assert len({(rollouts[i]["problem_id"], rollouts[i]["text"]) for i in kept}) == len(kept)


def copy_of(whole, folder):
    """The whole run, to be damaged."""
    recipe, paths = whole
    shutil.copytree(paths.directory, folder / "tiny")
    return recipe, RunPaths(folder, "tiny")


@contextmanager
def file_size_limit(size):
    """No file of this process grows past this size, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def kill_at(monkeypatch, target, nth, folder, *, before=False):
    """Run the tiny recipe until the nth call of ``target``, which raises before or after its work."""
    module, name = target.rsplit(".", 1)
    from importlib import import_module

    function, calls = getattr(import_module(module), name), 0

    def dying(*arguments, **options):
        nonlocal calls
        calls += 1
        if before and calls == nth:
            raise Killed
        result = function(*arguments, **options)
        if calls == nth:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(target, dying)
        with pytest.raises(Killed):
            tiny_run(folder)


def assert_same_after_resume(whole, folder):
    _, reference = whole
    tiny_run(folder)
    found = compare(reference, RunPaths(folder, "tiny"))
    assert (found.rows_lost, found.rows_doubled, found.bits_differ) == (0, 0, 0), found.details[:5]
