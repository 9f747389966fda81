"""Training sets from rollouts: which rows, in what form, and that ``datasets`` reads them."""

import json

import pytest

from pipeline import store
from pipeline.export import export
from tests.store_rows import new_run, problem_row, record_step, reward_row, rollout_row


@pytest.fixture
def root(tmp_path):
    """Run a: a group of p0 with verdicts + - - +, the last truncated; duplicates and evaluations in other stages."""
    run = new_run(tmp_path / "runs", "a")
    store.append(run, "problems", "select", [problem_row("p0"), problem_row("p1")])
    record_step(run, 1, 1, [True, False, False, None, True, True, True, True])
    twin = rollout_row(run, "reject", 0, purpose="reject", round=None, step=None, rollout_id="zz-twin")
    cut = rollout_row(run, "reject", 1, purpose="reject", round=None, step=None, finish_reason="length",
                      completion_token_ids=[9, 9, 9])  # fmt: skip
    store.append(run, "rollouts", "reject", [twin, cut])
    store.append(run, "rewards", "reject", [reward_row("zz-twin", True), reward_row(cut["rollout_id"], True)])
    held = rollout_row(
        run, "evaluate/final", 0, purpose="evaluate", round=None, step=None, completion_token_ids=[3, 3, 3]
    )
    store.append(run, "rollouts", "evaluate/final", [held])
    store.append(run, "rewards", "evaluate/final", [reward_row(held["rollout_id"], True)])
    return tmp_path / "runs"


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_sft_takes_correct_finished_distinct_training_completions(root, tmp_path):
    file = tmp_path / "set.jsonl"
    # p0: completion 0 (its twin in reject is the same tokens, the truncated and the evaluated one never count);
    # p1: completions 4 to 7, of which two are taken.
    assert export("a", "sft", file, root=root, per_problem=2) == 3
    rows = lines(file)
    assert [(row["problem_id"], row["completion"]) for row in rows] == [
        ("p0", "the answer is 0"), ("p1", "the answer is 4"), ("p1", "the answer is 5"),
    ]  # fmt: skip
    assert rows[0]["prompt"] == "<user>p0"


def test_a_condition_chooses_further(root, tmp_path):
    file = tmp_path / "set.jsonl"
    assert export("a", "sft", file, root=root, where="sample_index = 3 AND reward_format = 1") == 1
    assert lines(file)[0]["completion"] == "the answer is 7"


def test_a_preference_pairs_correct_and_wrong_of_one_group(root, tmp_path):
    file = tmp_path / "set.jsonl"
    # p0's group: one correct, two wrong, one unscored: one pair; p1's group has no wrong one.
    assert export("a", "preference", file, root=root) == 1
    row = lines(file)[0]
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("<user>p0", "the answer is 0", "the answer is 1")


@pytest.mark.parametrize("name", ["set.jsonl", "set.parquet"])
def test_hugging_face_reads_the_file(root, tmp_path, name):
    datasets = pytest.importorskip("datasets")
    file = tmp_path / name
    export("a", "sft", file, root=root)
    kind = "json" if name.endswith("jsonl") else "parquet"
    loaded = datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded[0]["prompt"] == "<user>p0" and len(loaded) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "round = 9"}, "no training rollout fits a sft set where round = 9"),
        ({"where": "colour = 1"}, "colour"),
        ({"where": "true); DROP TABLE runs; --"}, "Parser Error"),
        ({"where": ""}, "--where: is empty"),
        ({"per_problem": 0}, "--per-problem 0"),
        ({"kind": "dpo"}, "--kind dpo: expected sft or preference"),
        ({"out": "set.csv"}, "ends in .jsonl or .parquet"),
        ({"out": "runs/a/set.jsonl"}, "inside the folder of runs"),
        ({"out": "nowhere/set.jsonl"}, "does not exist"),
    ],
)
def test_mistakes_are_named_and_write_nothing(root, tmp_path, options, message):
    file = tmp_path / options.pop("out", "set.jsonl")
    with pytest.raises(ValueError, match=message):
        export("a", options.pop("kind", "sft"), file, root=root, **options)
    assert not file.exists()
