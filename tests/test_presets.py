"""Named sets of choices: whole, taken apart into fields when read, and giving way to what is named beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import AdvantageConfig, ObjectiveConfig, load_recipe
from pipeline.config.presets import PRESETS
from pipeline.config.recipe import FILLED_IN, apply_overrides, validate_recipe
from pipeline.config.write import commented_toml

NOT_OF_GRPO = {"dpo_beta", "dpo_length_average"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_no_choice_to_a_default(name: str) -> None:
    objective, advantages = PRESETS[name]
    filled_in = {field.rsplit(".", 1)[-1] for field in FILLED_IN}
    assert objective.model_fields_set == ObjectiveConfig.model_fields.keys() - filled_in - NOT_OF_GRPO
    assert advantages.model_fields_set == AdvantageConfig.model_fields.keys()


def test_a_preset_replaces_the_base_and_shows_as_fields(tmp_path: Path) -> None:
    """The embedded recipe says token_mean, KL 0.04 and clip 0.2."""
    file = tmp_path / "mine.toml"
    file.write_text('base = "embedded"\nname = "mine"\n[grpo]\npreset = "modern"\n[grpo.objective]\nclip_high = 0.3\n')
    for recipe in (
        load_recipe(str(file)), load_recipe("embedded", ["grpo.preset=modern", "grpo.objective.clip_high=0.3"])
    ):  # fmt: skip
        objective = recipe.grpo.objective
        assert (objective.clip_high, objective.kl_coefficient, objective.mismatch) == (0.3, 0.0, "token_truncate")
        assert not objective.needs_reference and recipe.grpo.advantages.scale == "batch"
        assert objective.max_tokens == recipe.sampler.max_tokens == 112
        assert "preset" not in recipe.model_dump()["grpo"]
    assert load_recipe("embedded", ["grpo.preset=paper"]).grpo.objective.aggregation == "sequence_mean"


def test_what_is_named_after_a_preset_wins_and_what_came_before_does_not() -> None:
    before = load_recipe("embedded", ["grpo.objective.clip_high=0.3", "grpo.preset=modern"])
    assert before.grpo.objective.clip_high == 0.28
    child = apply_overrides(before.model_dump(mode="json"), ["grpo.preset=paper", "grpo.objective.kl_estimator=k2"])
    objective = validate_recipe(child, "child").grpo.objective
    assert (objective.kl_coefficient, objective.kl_estimator) == (0.04, "k2")


def test_a_preset_written_out_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("embedded", ["grpo.preset=modern", "name=mine"])
    file = tmp_path / "mine.toml"
    file.write_text(commented_toml(recipe))
    assert load_recipe(str(file)).digest == recipe.digest


@pytest.mark.parametrize("given", ["grpo.preset=papr", "grpo.preset=3"])
def test_an_unknown_preset_is_named(given: str) -> None:
    with pytest.raises(ValueError, match=r"grpo.preset is .*: expected one of 'paper', 'modern'"):
        load_recipe("embedded", [given])
    with pytest.raises(ValueError, match=r"grpo.presett is not a field .*did you mean preset"):
        load_recipe("embedded", ["grpo.presett=paper"])
