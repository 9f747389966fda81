"""The model card: what it says of a run, and what it leaves alone."""

import pytest
from huggingface_hub import ModelCard

from data.sources import hub_names
from eval.card import base_model, write_card
from flows.runs import claim_run
from pipeline import store
from pipeline.config import load_recipe
from pipeline.rundir import RunPaths, write_result
from pipeline.types import StageResult
from stages.checkpoint import is_intact, new_checkpoint

OVERRIDES = ["name=toy", "model.name=Qwen/Qwen2.5-0.5B-Instruct", 'data.sources=[{name="gsm8k"}]', "evaluate.ks=[1]"]


def measured(metric, k, value, slice_="all"):
    return {
        "run_id": "toy", "stage": "evaluate/warm-start", "checkpoint": "warm-start", "benchmark": "gsm8k",
        "temperature": 1.0, "metric": metric, "k": k, "slice": slice_, "value": value, "low": value - 0.1,
        "high": value + 0.1, "n_problems": 40, "n_samples": 320, "method": "wilson",
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    recipe, paths = load_recipe("embedded", OVERRIDES), RunPaths(tmp_path, "toy")
    claim_run(recipe, paths)
    blank = {"problem": "?", "answer": "1", "prompt": "?", "prompt_token_ids": [1], "meta": "{}", "source": "gsm8k"}
    splits = ["train", "train", "heldout"]
    store.append(paths, "problems", "select", [
        {**blank, "problem_id": str(i), "split": split} for i, split in enumerate(splits)
    ])  # fmt: skip
    rows = [
        measured("pass@k", 1, 0.5),
        measured("pass@k", 8, 0.8),
        measured("pass@k", 1, 0.25, "level=1"),
        measured("mean_length", None, 40.25),
    ]
    store.append(paths, "evaluations", "evaluate/warm-start", rows)
    write_result(paths, StageResult("sft", metrics={"steps": 700, "pairs": 1234}))
    with new_checkpoint(paths, "warm-start") as folder:
        (folder / "model.safetensors").write_bytes(b"weights")
    return recipe, paths


def test_the_card_says_base_data_recipe_and_evaluation_with_intervals(run):
    recipe, paths = run
    card = ModelCard.load(write_card(recipe, paths, "warm-start", hub_names(recipe.data)))
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert card.data.datasets == ["openai/gsm8k"]
    assert card.data.license is None
    # Asked for k = 1 only, over all problems: the curve's pass@8 and the level are left to the report.
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("pass@1", 0.5)
    assert result.metric_name == "pass@1, 95% interval [0.4000, 0.6000]"
    assert "| pass@1 | 50.0 \\[40.0, 60.0\\] % | 40 | 320 |" in card.text
    assert "| length | 40.2 \\[40.1, 40.4\\] | 40 | 320 |" in card.text
    assert "The base policy after 700 optimizer steps of SFT on 1,234 worked solutions." in card.text
    assert "| gsm8k | 2 | 1 |" in card.text
    assert recipe.digest in card.text


def test_the_card_is_the_same_each_time_and_breaks_no_checksum(run):
    recipe, paths = run
    first = write_card(recipe, paths, "warm-start").read_bytes()
    assert is_intact(paths.checkpoint("warm-start"))
    (paths.checkpoint("warm-start") / "README.md").unlink()
    assert write_card(recipe, paths, "warm-start").read_bytes() == first


def test_a_card_that_its_owner_has_edited_stays(run):
    recipe, paths = run
    write_card(recipe, paths, "warm-start").write_text("license: mit")
    assert write_card(recipe, paths, "warm-start") is None
    assert (paths.checkpoint("warm-start") / "README.md").read_text() == "license: mit"


def test_a_local_base_is_named_by_its_last_word_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    assert base_model(str(tmp_path / "mine")) == "mine"
    assert base_model("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
