"""A study's methods branch off one warm start, and its recipe and overrides make the methods that they name."""

from __future__ import annotations

import json

import pytest

from eval.claims import METHODS, method
from flows.study import BRANCH, STUDIES, find_branch, run_study
from pipeline.config import load_recipe
from pipeline.rundir import RunPaths, read_result, stage_keys, write_atomic
from tests.tiny import tiny_recipe


@pytest.mark.parametrize("label", METHODS)
def test_each_method_of_figure_5_is_what_its_overrides_make(label):
    recipe = load_recipe("figure5", STUDIES["figure5"].methods[label])
    assert method(recipe.model_dump(mode="json")) == label
    assert BRANCH in stage_keys(recipe)


def test_the_branches_inherit_no_stage_that_the_first_method_lacks():
    study = STUDIES["figure5"]
    first = stage_keys(load_recipe("figure5", next(iter(study.methods.values()))))
    for overrides in study.methods.values():
        keys = stage_keys(load_recipe("figure5", overrides))
        assert set(keys[: keys.index(BRANCH)]) <= set(first)


def test_a_branch_is_found_by_its_parent_and_method(tmp_path):
    for name, parent, overrides in (("p-r1", "p", "Online RFT"), ("q-r1", "q", "RFT"), ("p-r2", "p", "RFT")):
        recipe = load_recipe("figure5", STUDIES["figure5"].methods[overrides]).model_dump(mode="json")
        header = {"recipe": recipe, "parent": parent, "resume_from": BRANCH}
        write_atomic(RunPaths(tmp_path, name).recipe_file, json.dumps(header))
    assert find_branch(tmp_path, "p", "RFT") == "p-r2"
    assert find_branch(tmp_path, "q", "Online RFT") is None


@pytest.mark.slow
def test_a_study_runs_shares_its_warm_start_and_continues_for_nothing(tmp_path):
    said: list[str] = []
    report = run_study("figure5", [*tiny_recipe(tmp_path), "grpo.steps=1"], tmp_path, say=said.append)
    assert report.is_file() and any(line.startswith("Figure 5") for line in said)
    runs = sorted(path.parent.name for path in tmp_path.glob("*/recipe.json"))
    figure = STUDIES["figure5"]
    assert len(runs) == len(figure.methods) * len(figure.seeds)
    child = RunPaths(tmp_path, "figure5-s0-r1")
    assert not (child.directory / "stages" / "sft").exists() and read_result(child, "sft") is not None
    before = child.result_file("evaluate/final").stat().st_mtime_ns
    run_study("figure5", [*tiny_recipe(tmp_path), "grpo.steps=1"], tmp_path, say=said.append)
    assert child.result_file("evaluate/final").stat().st_mtime_ns == before
    assert len(list(tmp_path.glob("*/recipe.json"))) == len(runs)


@pytest.mark.parametrize("override", ["seed=7", "grpo.objective.algorithm=dpo"])
def test_a_field_that_the_study_varies_is_refused(tmp_path, override):
    with pytest.raises(ValueError, match=f"figure5 varies {override.partition('=')[0]} itself"):
        run_study("figure5", [override], tmp_path)
    assert not any(tmp_path.iterdir())
