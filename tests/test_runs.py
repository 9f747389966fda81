"""Opening runs: new ones, the same again, children; and what is refused."""

import json
import os

import pytest

from flows.evaluate import report_all
from flows.evaluate_model import check_unchanged
from flows.runs import changed_fields, claim_run, find_run, first_stage, open_run, read_recipe
from flows.status import print_run, print_runs
from pipeline.config import load_recipe
from pipeline.rundir import RunPaths, locked, read_result, stage_keys, write_result
from pipeline.types import StageResult
from stages.checkpoint import new_checkpoint
from tests.synthetic_run import synthetic_run

SMALL = ["grpo.rounds=2", "grpo.steps=2"]


def complete(paths, recipe, until):
    for key in stage_keys(recipe):
        if key == until:
            return
        write_result(paths, StageResult(key))


def test_the_same_command_continues_the_same_run(tmp_path):
    recipe, paths = open_run("embedded", SMALL, None, None, tmp_path)
    again, same = open_run("embedded", SMALL, None, None, tmp_path)
    assert same == paths
    assert again == recipe == read_recipe(paths)


def test_a_run_of_before_a_field_was_there_continues_when_the_recipe_has_its_default(tmp_path):
    _, paths = open_run("embedded", SMALL, "mine", None, tmp_path)
    header = json.loads(paths.recipe_file.read_text())
    del header["recipe"]["warm_start"]["checkpoint_every"]
    paths.recipe_file.write_text(json.dumps(header | {"digest": "of that recipe"}))
    open_run("embedded", SMALL, "mine", None, tmp_path)
    with pytest.raises(ValueError, match=r"warm_start\.checkpoint_every differ"):
        open_run("embedded", [*SMALL, "warm_start.checkpoint_every=9"], "mine", None, tmp_path)


def test_run_id_alone_continues_with_the_recipe_the_run_was_started_with(tmp_path):
    recipe, _ = open_run("embedded", [*SMALL, "seed=7"], "mine", None, tmp_path)
    again, _ = open_run(None, [], "mine", None, tmp_path)
    assert again == recipe


def test_another_recipe_under_the_same_id_is_refused_with_three_ways_out(tmp_path):
    open_run("embedded", SMALL, "mine", None, tmp_path)
    with pytest.raises(ValueError, match=r"seed differ.*\(1\).*\(2\).*\(3\)"):
        open_run("embedded", [*SMALL, "seed=1"], "mine", None, tmp_path)


def test_a_child_inherits_the_stages_before_its_resume_point(tmp_path):
    recipe, parent = open_run("embedded", SMALL, "mine", None, tmp_path)
    complete(parent, recipe, "round-02/refresh")
    _, child = open_run(None, [], "mine", "round-01/step-0002/update", tmp_path)
    assert child.run_id == "mine-r1"
    assert child.owner("round-01/step-0002/reward") == parent
    assert child.owner("round-01/step-0002/update") is None
    _, second = open_run(None, [], "mine", "sft", tmp_path)
    assert second.run_id == "mine-r2"
    assert second.owner("select") == parent


def test_a_child_may_change_only_what_later_stages_read(tmp_path):
    recipe, parent = open_run("embedded", SMALL, "mine", None, tmp_path)
    complete(parent, recipe, "reject")
    child, _ = open_run(None, ["reject.samples=3"], "mine", "reject", tmp_path)
    assert child.reject.samples == 3
    with pytest.raises(ValueError, match=r"another grpo\.lr: stage round-01/step-0001/rollout reads it"):
        open_run(None, ["grpo.lr=1e-3"], "mine", "reject", tmp_path)


def test_resuming_from_a_stage_whose_predecessor_is_not_complete_names_it(tmp_path):
    recipe, parent = open_run("embedded", SMALL, "mine", None, tmp_path)
    complete(parent, recipe, "reward_model")
    with pytest.raises(ValueError, match=r"stage reward_model of run mine is not complete"):
        open_run(None, [], "mine", "round-01/step-0001/rollout", tmp_path)


def test_the_status_of_a_run_says_what_is_done_and_where_it_goes_on(tmp_path, capsys):
    recipe, paths = open_run("embedded", SMALL, "mine", None, tmp_path)
    complete(paths, recipe, "round-01/step-0002/reward")
    print_run(tmp_path, "mine")
    shown = capsys.readouterr().out
    keys = stage_keys(recipe)
    done = keys.index("round-01/step-0002/reward")
    assert f"run mine: stopped; {done} of {len(keys)} stages done" in shown
    left = len(keys) - done
    assert f"{left} stages to do, from round-01/step-0002/reward: grpoflow run --run-id mine" in shown
    with locked(paths):
        print_runs(tmp_path)
        print_run(tmp_path, "mine")
    shown = capsys.readouterr().out
    assert f"{done}/{len(keys)}" in shown
    assert f"run mine: running (pid {os.getpid()} on " in shown


def test_unknown_stage_and_run_name_the_nearest(tmp_path):
    open_run("embedded", SMALL, "mine", None, tmp_path)
    with pytest.raises(ValueError, match=r"nearest: .*round-01/step-0001/rollout"):
        open_run(None, [], "mine", "round-01/step-1/rollout", tmp_path)
    with pytest.raises(ValueError, match=r"run 'mien' is not in .*mine"):
        find_run(tmp_path, "mien")
    with pytest.raises(ValueError, match="resume-from needs run-id"):
        open_run("embedded", SMALL, None, "reject", tmp_path)


@pytest.mark.parametrize("run_id", ["../up", "a/b", "-x", "a" * 101])
def test_a_run_id_cannot_leave_the_root(tmp_path, run_id):
    with pytest.raises(ValueError, match="expected letters"):
        open_run("embedded", SMALL, run_id, None, tmp_path)


def test_a_second_process_on_the_same_run_is_refused_and_a_dead_one_does_not_block(tmp_path):
    _, paths = open_run("embedded", SMALL, "mine", None, tmp_path)
    with locked(paths), pytest.raises(BlockingIOError, match=r"pid .* wait for it"), locked(paths):
        pass
    with locked(paths):
        pass


def test_every_section_of_the_recipe_has_a_first_stage_that_exists():
    recipe = load_recipe("embedded", SMALL)
    order = stage_keys(recipe)
    for section in type(recipe).model_fields:
        stage = first_stage(section, order)
        assert stage is None or stage in order


def test_changed_fields_are_named_in_full():
    assert changed_fields({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": 3}) == ["a.c", "d", "e"]


def test_the_first_reader_of_a_field_is_the_first_stage_that_is_there():
    process = stage_keys(
        load_recipe("embedded", ["rewards.weights={verifier=1.0}", "grpo.advantages.supervision=process"])
    )
    assert first_stage("reward_model.process_samples", process) == "process_model"
    assert first_stage("sampler.temperature", process) == "process_model"
    plain = stage_keys(load_recipe("embedded", ["rewards.weights={verifier=1.0}"]))
    assert first_stage("sampler.temperature", plain) == "evaluate/warm-start"
    # Worked solutions that are longer than a completion may be are not learned from.
    assert first_stage("sampler.max_tokens", plain) == "sft"
    assert first_stage("warm_start.checkpoint_every", plain) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", "\xff"])
def test_a_damaged_header_is_named_and_the_other_runs_are_still_shown(tmp_path, capsys, text):
    for run_id in ("good", "bad"):
        open_run("embedded", SMALL, run_id, None, tmp_path)
    file = tmp_path / "bad" / "recipe.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"bad/recipe\.json: is damaged"):
        open_run("embedded", SMALL, "bad", None, tmp_path)
    print_runs(tmp_path)
    shown = capsys.readouterr().out
    assert "good" in shown
    assert "cannot be" in shown


def test_a_damaged_result_is_named(tmp_path):
    _, paths = open_run("embedded", SMALL, "mine", None, tmp_path)
    write_result(paths, StageResult("select"))
    paths.result_file("select").write_text("")
    with pytest.raises(ValueError, match=r"select/result\.json: is damaged"):
        read_result(paths, "select")


def test_an_evaluation_cannot_be_branched(tmp_path):
    recipe = load_recipe("embedded", SMALL)
    claim_run(recipe, RunPaths(tmp_path, "evaluate-it"), stages=["select", "evaluate/base"])
    with pytest.raises(ValueError, match="is an evaluation"):
        open_run(None, [], "evaluate-it", "select", tmp_path)


def test_one_run_that_cannot_be_read_does_not_keep_the_others_from_their_reports(tmp_path):
    synthetic_run(tmp_path, "good")
    open_run("embedded", SMALL, "bad", None, tmp_path)
    (tmp_path / "bad" / "recipe.json").write_text("{}")
    lines = []
    with pytest.raises(ValueError, match=r"no report of bad .*index\.html"):
        report_all(tmp_path, say=lines.append)
    assert sorted(line.split(":")[0] for line in lines) == ["bad", "good"]
    assert RunPaths(tmp_path, "good").report("report").is_file()


def test_results_of_a_model_folder_are_not_given_for_what_was_saved_there_later(tmp_path):
    weights, paths = tmp_path / "model.safetensors", RunPaths(tmp_path, "evaluate-it")
    weights.write_text("first")
    check_unchanged("model", paths)  # nothing evaluated yet
    with new_checkpoint(paths, "base") as partial:
        (partial / weights.name).symlink_to(weights)
    check_unchanged("model", paths)
    weights.write_text("other")
    with pytest.raises(ValueError, match=r"files have changed since\): move .*evaluate-it away"):
        check_unchanged("model", paths)
