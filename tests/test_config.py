"""Recipes: files, overrides, and one clear line for every mistake."""

import re

import pytest

from pipeline.config import load_recipe, recipe_names
from pipeline.config.write import commented_toml
from pipeline.rundir import stage_keys


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_that_ships_is_valid_and_carries_its_own_name(name):
    assert load_recipe(name).name == name


def test_an_override_changes_one_field_and_the_digest():
    recipe = load_recipe("embedded", ["grpo.group_size=16"])
    assert recipe.grpo.group_size == 16
    assert recipe.digest != load_recipe("embedded").digest
    assert recipe.digest == load_recipe("embedded", ["grpo.group_size = 16"]).digest


def test_a_file_states_only_what_differs_from_its_base(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "embedded"\nname = "mine"\n[grpo]\nrounds = 5\n')
    mine, base = load_recipe(str(file)), load_recipe("embedded")
    assert (mine.grpo.rounds, mine.grpo.steps) == (5, base.grpo.steps)


def test_learner_temperature_and_length_always_follow_the_sampler():
    recipe = load_recipe("embedded", ["sampler.temperature=0.7", "sampler.max_tokens=50"])
    assert (recipe.grpo.objective.temperature, recipe.grpo.objective.max_tokens) == (0.7, 50)


def test_the_paper_recipe_has_the_papers_figures():
    # arXiv 2402.03300, 4.2: lr 1e-6, KL coefficient 0.04, 64 outputs a question, 1,024 tokens, batch 1,024, one update.
    recipe = load_recipe("paper")
    grpo = recipe.grpo
    assert (grpo.lr, grpo.objective.kl_coefficient, grpo.group_size) == (1e-6, 0.04, 64)
    assert recipe.sampler.max_tokens == 1024
    assert grpo.problems_per_step * grpo.group_size == 1024
    assert (grpo.epochs, grpo.minibatches) == (1, 1)
    assert recipe.reward_model.replay == 0.1


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["grpo.group_sze=8"], ["grpo.group_sze", "group_size"]),
        (["grppo.group_size=8"], ["grppo", "grpo"]),
        (["grpo.group_size=1"], ["grpo.group_size", "1", "2"]),
        (["grpo.group_size=many"], ["grpo.group_size", "many", "integer"]),
        (["evaluate.ks=[1, 64]"], ["evaluate.ks", "64", "evaluate.samples"]),
        (["grpo.group_size"], ["key=value"]),
        (["grpo.objective.temperature=0.5"], ["sampler.temperature"]),
        (["seed=-1"], ["seed", "-1", "0"]),
        (["grpo.lr=nan"], ["grpo.lr", "nan"]),
        (["grpo=3"], ["grpo is 3", "GRPOConfig"]),
        (["grpo.objective=abc"], ["grpo.objective is 'abc'", "ObjectiveConfig"]),
    ],
)
def test_a_mistake_gets_one_line_that_names_field_value_and_way_out(overrides, parts):
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        load_recipe("embedded", overrides)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_an_unknown_recipe_names_the_nearest_and_a_missing_file_says_so(tmp_path):
    with pytest.raises(ValueError, match="did you mean embedded"):
        load_recipe("embeded")
    with pytest.raises(ValueError, match="no such file"):
        load_recipe(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[grpo\n")
    with pytest.raises(ValueError, match="not valid TOML"):
        load_recipe(str(tmp_path / "bad.toml"))


def test_stage_keys_come_in_the_order_of_work():
    recipe = load_recipe("embedded", ["grpo.rounds=1", "grpo.steps=1"])
    assert stage_keys(recipe) == [
        "select", "sft", "reward_model", "process_model", "evaluate/warm-start", "round-01/step-0001/rollout",
        "round-01/step-0001/reward", "round-01/step-0001/update", "round-01/refresh", "evaluate/round-01",
        "reject", "regenerate", "evaluate/final",
    ]  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_written_out_with_comments_reads_back_as_it_was(name, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(commented_toml(load_recipe(name)))
    assert load_recipe(str(file)) == load_recipe(name)
    assert "# Seconds for one verdict" in file.read_text()


def test_bases_that_go_in_a_circle_are_refused(tmp_path):
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(f'base = "{two}"\n')
    two.write_text(f'base = "{one}"\n')
    with pytest.raises(ValueError, match=r"one\.toml: its bases go in a circle \(.*one.* → .*two.* → .*one.*\)"):
        load_recipe(str(one))
