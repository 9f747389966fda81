"""Completions made elsewhere: published accuracies come out, votes use the given scores, bad files say what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eval.completions import default_ks, evaluate_completions, read_rows, result_json, result_lines

SHARED = Path(__file__).parents[2] / "shared" / "data"


@dataclass
class Plain:
    """A judgement by string equality of the completion's last word."""

    status: str
    answer: str | None


def plain_judge(cases):
    """Last word against gold; "?" has no answer, "!" is a failure of the judge."""
    found = []
    for gold, completion, _ in cases:
        answer = completion.split()[-1] if completion.split() else None
        if answer == "!":
            found.append(Plain("error", None))
        elif answer in (None, "?"):
            found.append(Plain("no_answer", None))
        else:
            found.append(Plain("correct" if answer == gold else "incorrect", answer))
    return found


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def rows_of(**answers):
    """Rows of problems by name, gold 7, one a given answer."""
    return [
        {"problem": name, "gold": "7", "completion": f"it is {answer}", "rm_score": 2.0 if answer == "7" else -2.0}
        for name, given in answers.items()
        for answer in given
    ]


def test_votes_and_pass_are_those_of_the_given_samples_and_scores(tmp_path):
    file = write(tmp_path / "made.jsonl", rows_of(a=["7", "8", "8"], b=["7", "7", "9"]))
    (found,) = evaluate_completions(file, plain_judge)
    assert (found.model, found.problems, found.completions, found.published) == ("all", 2, 6, None)
    # pass@1: (1/3 + 2/3) / 2
    assert found.get("pass@k", 1).value == pytest.approx(0.5)
    # pass@2: a: 1 - C(2,2)/C(3,2) = 2/3; b: 1
    assert found.get("pass@k", 2).value == pytest.approx((2 / 3 + 1) / 2)
    # maj@3: a votes 8, b votes 7
    assert found.get("maj@k", 3).value == pytest.approx(0.5)
    # weights sigmoid(2) = 0.881 for a 7, sigmoid(-2) = 0.119 for others: a: 0.881 against 0.238, so 7 wins in both
    assert found.get("self_consistency_rm", 3).value == 1.0
    assert found.get("best_of_k_rm", 3).value == 1.0


def test_each_model_of_the_file_has_its_own_result(tmp_path):
    rows = [{**row, "model": model} for model in ("small", "large") for row in rows_of(a=["7"], b=["8"], c=["7"])]
    rows[-1]["completion"] = "it is !"
    small, large = sorted(evaluate_completions(write(tmp_path / "m.jsonl", rows), plain_judge), key=lambda r: r.model)[
        ::-1
    ]
    # small: 2 of 3; large: the last row is unscored, 1 of the 2 left
    assert small.get("pass@k", 1).value == pytest.approx(2 / 3)
    assert large.get("pass@k", 1).value == 0.5 and large.get("pass@k", 1).n_problems == 2
    assert large.get("unscored_share").value == pytest.approx(1 / 3)


def test_the_fewest_samples_of_a_problem_set_the_largest_k(tmp_path):
    assert [default_ks(n) for n in (1, 3, 8)] == [[1], [1, 2, 3], [1, 2, 4, 8]]
    (found,) = evaluate_completions(write(tmp_path / "u.jsonl", rows_of(a=["7", "8"], b=["7", "7", "7"])), plain_judge)
    assert found.get("pass@k", 2) and not found.get("pass@k", 3)


def test_levels_are_read_as_numbers_and_sliced(tmp_path):
    rows = [
        {**row, "level": f"Level {1 + i // 2}"} for i, row in enumerate(rows_of(a=["7"], b=["7"], c=["8"], d=["8"]))
    ]
    (found,) = evaluate_completions(write(tmp_path / "l.jsonl", rows), plain_judge)
    assert found.get("pass@k", 1, "level=1").value == 1.0 and found.get("pass@k", 1, "level=2").value == 0.0


def test_csv_json_and_mapped_columns_give_the_same(tmp_path):
    rows = rows_of(a=["7", "8"], b=["7", "7"])
    expected = evaluate_completions(write(tmp_path / "r.jsonl", rows), plain_judge)[0].measures
    (tmp_path / "r.json").write_text(json.dumps(rows), encoding="utf-8")
    lines = [
        "q;g".replace(";", ",") + ",out,s",
        *(f'{r["problem"]},7,"{r["completion"]}",{r["rm_score"]}' for r in rows),
    ]
    (tmp_path / "r.csv").write_text("\n".join(lines), encoding="utf-8")
    mapped = {"problem": "q", "gold": "g", "completion": "out", "score": "s"}
    assert evaluate_completions(tmp_path / "r.json", plain_judge)[0].measures == expected
    assert evaluate_completions(tmp_path / "r.csv", plain_judge, columns=mapped)[0].measures == expected


def test_the_table_has_one_line_a_model_and_the_json_every_measure(tmp_path):
    found = evaluate_completions(write(tmp_path / "t.jsonl", rows_of(a=["7", "8"], b=["7", "7"])), plain_judge)
    head, line = result_lines(found)
    assert head.split()[:4] == ["model", "problems", "completions", "pass@1"] and len(head) == len(line)
    assert "75.0 [" in line
    assert len(json.loads(result_json(found))[0]["measures"]) == len(found[0].measures)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        ('{"problem": "a", "completion": "7"}\n', r"no column for gold \(looked for gold, answer"),
        ('{"problem": "a", "gold": "", "completion": "7"}\n', "row 1: gold is empty"),
        ('{"problem": "a", "gold": "1", "completion": "7", "rm_score": "high"}\n', "row 1: score is 'high'"),
        ('{"problem": "a", "gold": "1", "completion": "7", "finish_reason": "eos"}\n', "finish_reason is 'eos'"),
        ("{broken\n", "cannot be read"),
        ("[1]\n", "expected .parquet, .jsonl"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path, text, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_rows(file, {})


def test_a_mapping_to_a_column_that_is_not_there_is_named(tmp_path):
    file = write(tmp_path / "c.jsonl", rows_of(a=["7"]))
    with pytest.raises(ValueError, match="no column 'nope' for gold"):
        read_rows(file, {"gold": "nope"})
    with pytest.raises(ValueError, match="'golden' is unknown"):
        read_rows(file, {"golden": "gold"})
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_rows(tmp_path / "absent.jsonl", {})


def shared_file(name):
    file = SHARED / name
    if not file.is_file():
        pytest.skip(f"../shared/data/{name} is not there")
    return file


def verified(file):
    from rewards.workers import VerifierPool

    with VerifierPool(1, 5.0, 2048) as pool:
        return evaluate_completions(file, pool.judge_many, resamples=100)


def test_published_accuracies_of_gsm8k_models_come_out():
    found = verified(shared_file("gsm8k_model_outputs.parquet"))
    assert len(found) >= 4
    for result in found:
        assert result.get("pass@k", 1).value == pytest.approx(result.published, abs=0.002), result.model
        assert result.problems == 1319 and result.get("unscored_share").value == 0.0


def test_pass_and_votes_of_given_math_samples_agree_with_their_labels():
    file = shared_file("math_qwen_rm_samples.parquet")
    (found,) = verified(file)
    rows = pq.read_table(file, columns=["idx", "sample", "label"]).to_pylist()
    # gold 10{,}000, answer 10000: the published label is a false negative
    known = [row["label"] or (row["idx"], row["sample"]) == (72, 7) for row in rows]
    right = Counter(row["idx"] for row, label in zip(rows, known, strict=True) if label)
    drawn = Counter(row["idx"] for row in rows)
    assert set(drawn.values()) == {8} and found.problems == len(drawn)
    assert found.agreement == 1 - 1 / len(rows)
    assert found.get("pass@k", 8).value == len(right) / len(drawn)
    assert found.get("pass@k", 1).value == pytest.approx(sum(known) / len(rows))
    # the scores separate right from wrong: the best of 8 by score beats the plain vote
    assert found.get("best_of_k_rm", 8).value > found.get("maj@k", 8).value
    assert found.get("self_consistency_rm", 8).value >= found.get("maj@k", 8).value


def test_a_line_separator_inside_a_completion_does_not_end_the_row(tmp_path):
    file = tmp_path / "given.jsonl"
    rows = [{"problem_id": name, "gold": "2", "completion": "one\u2028 2"} for name in "pq"]
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    (result,) = evaluate_completions(file, plain_judge, columns={}, ks=None)
    assert "100" in "\n".join(result_lines([result]))
