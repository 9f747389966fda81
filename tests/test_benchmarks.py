"""Benchmarks by name, and the rule that training problems are not measured on."""

from __future__ import annotations

import logging

import pytest

from eval.benchmarks import BENCHMARKS, enforce_heldout, find_benchmark, heldout_problems, how_put
from pipeline.config import EvaluateConfig, load_recipe
from pipeline.types import Problem


def problem(number, **changes):
    return Problem(
        f"id{number}", f"question {number}", str(number), **{"split": "heldout", "source": "sums", **changes}
    )


def test_every_benchmark_reads_its_test_split():
    assert {name for name, b in BENCHMARKS.items() if b.source.split != "test"} == {"embedded"}
    assert find_benchmark("gsm8k") == BENCHMARKS["gsm8k"].source
    assert find_benchmark("mgsm/de").label == "mgsm/de" and find_benchmark("mgsm/de").split == "test"


def test_the_recipe_s_own_sets_are_benchmarks_whole_and_go_first():
    recipe = load_recipe(
        "embedded",
        ['data.benchmarks=[{name="gsm8k", path="mine.jsonl", limit=5}, {name="file", path="folder/hard.csv"}]'],
    )
    assert find_benchmark("gsm8k", recipe).path == "mine.jsonl" and find_benchmark("gsm8k", recipe).limit is None
    assert find_benchmark("hard", recipe).path == "folder/hard.csv"
    assert find_benchmark("math", recipe, path="copy.parquet").path == "copy.parquet"


def test_an_unknown_benchmark_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="benchmark 'gsm8' is unknown; expected gsm8k"):
        find_benchmark("gsm8")


def test_only_heldout_problems_are_evaluated():
    problems = [problem(1), problem(2, split="train"), problem(3, source="products")]
    assert [p.problem_id for p in heldout_problems(problems)] == ["id1", "id3"]
    assert [p.problem_id for p in heldout_problems(problems, "products")] == ["id3"]


def test_training_problems_are_refused_or_counted(caplog):
    problems = [problem(1), problem(2), problem(3)]
    assert enforce_heldout("sums", problems, ["id7"], EvaluateConfig()) == []
    with pytest.raises(ValueError, match=r"'sums': 1 of its 3 problems stand in the training set, .*'question 2'"):
        enforce_heldout("sums", problems, ["id2", "id7"], EvaluateConfig())
    with caplog.at_level(logging.WARNING):
        assert enforce_heldout("sums", problems, ["id2"], EvaluateConfig(allow_overlap=True)) == ["id2"]
    assert "1 of 3 problems stand in the training set" in caplog.text


def test_how_a_benchmark_is_put_is_said_in_one_sentence():
    text = how_put(problems=1319, samples=64, temperature=0.7, top_p=0.95, max_tokens=2048, greedy=True, engine="vllm")
    assert text == (
        "1,319 problems, 64 samples each at temperature 0.7, top_p 0.95, at most 2,048 tokens, and greedy; engine vllm"
    )
