"""The command that judges a file: rows out, one row explained, and one clear line for each way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewards.grade import grade

ROWS = [
    {"id": "a", "gold": r"\frac12", "completion": r"So \boxed{0.5}", "expected": True},
    {"id": "b", "gold": "7", "completion": "The answer is 8.", "expected": True},
    {"id": 3, "gold": "7", "completion": "seven", "note": "other fields do not matter"},
    {"id": "d", "gold": "7", "completion": "#### 7", "finish_reason": "length"},
]


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    return written(tmp_path / "cases.jsonl", *(json.dumps(row) for row in ROWS), "")


def test_every_row_gets_a_verdict(cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "verdicts.jsonl"
    grade(cases, out=out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [list(row) for row in rows] == [["id", "status", "correct", "answer", "seconds"]] * 4
    assert [(row["id"], row["status"], row["correct"], row["answer"]) for row in rows] == [
        ("a", "correct", True, "1/2"),
        ("b", "incorrect", False, "8"),
        ("3", "no_answer", False, None),
        ("d", "no_answer", False, None),
    ]
    # b was expected to be correct and is not
    assert "4 judged: 2 no_answer, 1 correct, 1 incorrect; as expected 1 of 2 (50.0%)" in capsys.readouterr().out


def test_without_a_file_to_write_the_rows_are_printed(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grade(cases)
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["a", "b", "3", "d"]


def test_one_row_is_explained(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grade(cases, explain="a")
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert {name: text.strip() for name, text in shown.items() if name not in ("status", "completion")} == {
        "id": "a",
        "extraction": "last box",
        "answer": "0.5",
        "answer cleaned": "0.5",
        "answer votes as": "1/2",
        "gold": r"\frac12",
        "gold cleaned": r"\frac{1}{2}",
        "decided by": "number literals",
        "expected": "correct",
    }


def test_an_unknown_id_is_named(cases: Path) -> None:
    with pytest.raises(ValueError, match="--explain z: no row"):
        grade(cases, explain="z")


GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[1]", "line 2: expected an object with id, gold and completion, got list"),
        ('{"id": "b", "gold": "7"}', "line 2: completion missing; it has id, gold"),
        ("{}", "line 2: id and gold and completion missing; it has no fields"),
        ('{"id": "b", "gold": 7, "completion": ""}', "line 2: gold is 7: expected text, so put it in quotes"),
        ('{"id": null, "gold": "7", "completion": ""}', "line 2: id is None: expected text or a whole number"),
        ('{"id": "b", "gold": "7", "completion": "", "finish_reason": "eos"}', "line 2: finish_reason is 'eos'"),
        ('{"id": "b", "gold": "7", "completion": "", "expected": 1}', "line 2: expected is 1: expected true or false"),
        (GOOD, "line 2: id 'a' is already that of line 1"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match="line 2") as error:
        grade(written(tmp_path / "cases.jsonl", GOOD, line))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_without_rows_or_of_other_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows"):
        grade(written(tmp_path / "empty.jsonl", "", "  "))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        grade(tmp_path / "bytes.jsonl")
    with pytest.raises(FileNotFoundError):
        grade(tmp_path / "absent.jsonl")


def test_half_a_character_in_a_completion_is_judged_and_written(tmp_path: Path) -> None:
    row = '{"id": "s", "gold": "\\ud800", "completion": "\\\\boxed{\\ud800}"}'
    grade(written(tmp_path / "cases.jsonl", row), out=tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["correct"] is True


def test_a_line_separator_inside_a_completion_does_not_end_the_row(tmp_path: Path) -> None:
    row = {"id": "1", "gold": "2", "completion": "one\u2028two\x85 \\boxed{2}"}
    (verdict,) = grade(written(tmp_path / "cases.jsonl", json.dumps(row, ensure_ascii=False)))
    assert verdict.status == "correct"
