"""``grpoflow evaluate --completions``: the verifier's judgement of a file, as a table and as JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.elsewhere import evaluate_file


def made(tmp_path):
    """Two problems of two completions each; three of the four are right, one of them written as a fraction."""
    rows = [
        ("a", "0.5", "so \\boxed{1/2}"),
        ("a", "0.5", "\\boxed{2}"),
        ("b", "7", "\\boxed{7}"),
        ("b", "7", "\\boxed{7.0}"),
    ]
    file = tmp_path / "made.jsonl"
    file.write_text("".join(json.dumps({"q": q, "gold": g, "completion": c}) + "\n" for q, g, c in rows))
    return file


def test_the_verifier_judges_and_both_outputs_agree(tmp_path):
    lines = evaluate_file(made(tmp_path), columns=["problem=q"], out=tmp_path / "out.json")
    # pass@1: (1/2 + 1) / 2
    assert lines[1].split()[3] == "75.0"
    (result,) = json.loads((tmp_path / "out.json").read_text())
    assert next(m["value"] for m in result["measures"] if (m["metric"], m["k"]) == ("pass@k", 1)) == 0.75


def test_the_command_prints_the_table(tmp_path):
    found = CliRunner().invoke(
        app, ["evaluate", "--completions", str(made(tmp_path)), "--column", "problem=q", "--k", "2"]
    )
    assert found.exit_code == 0 and "pass@2" in found.output and "pass@1" not in found.output


def test_a_mapping_without_an_equals_sign_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--column 'q': expected ours=theirs"):
        evaluate_file(made(tmp_path), columns=["q"])
