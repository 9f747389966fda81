"""The history of all runs: every run has its line, damaged ones too, and building it again changes nothing."""

from __future__ import annotations

import json

from eval.index import build_index
from pipeline.rundir import RunPaths, write_atomic, write_result
from pipeline.types import StageResult
from tests.test_report import Page


def made(root, run_id, created, **metrics):
    """A run with a recipe and, when metrics are given, one evaluation."""
    paths = RunPaths(root, run_id)
    recipe = {"name": "small", "seed": 3, "grpo": {"rounds": 2, "steps": 5}}
    write_atomic(paths.recipe_file, json.dumps({"recipe": recipe, "digest": "0123456789abcdef", "created_at": created}))
    if metrics:
        write_result(
            paths, StageResult("evaluate/warm-start", metrics={"checkpoint": "warm-start", "pass@1": [0.1, 0.05, 0.2]})
        )
        write_result(
            paths, StageResult("evaluate/round-01", metrics={"checkpoint": "round-01", "benchmark": "sums", **metrics})
        )
        write_result(paths, StageResult("round-01/step-0001/update"))
    return paths


def test_every_run_has_its_line_the_newest_first(tmp_path):
    made(
        tmp_path,
        "old",
        "2026-01-01T00:00:00",
        **{"pass@1": [0.25, 0.2, 0.3], "maj@8": [0.5, 0.4, 0.6], "maj@4": [0.4, 0.3, 0.5]},
    )
    made(tmp_path, "new", "2026-02-01T00:00:00")
    write_atomic(tmp_path / "broken" / "recipe.json", "{")
    out = build_index(tmp_path)
    page = Page(out.read_text(encoding="utf-8"))
    text = "".join(page.text)
    assert out == tmp_path / "reports" / "index.html" and page.open == []
    assert text.index("new") < text.index("old")
    assert "25.0 [20.0, 30.0]" in text and "10.0 [5.0, 20.0]" in text and "maj@8 50.0 [40.0, 60.0]" in text
    assert text.count("25.0 [20.0, 30.0]") == 3  # after the rounds, at last, and as the largest pass@K
    assert "1 of 10" in text and "0 of 10" in text
    assert "cannot be read" in text


def test_a_report_is_linked_where_there_is_one(tmp_path):
    paths = made(tmp_path, "with", "2026-01-01T00:00:00")
    made(tmp_path, "without", "2026-01-01T00:00:00")
    write_atomic(paths.report("report"), "<p>")
    page = Page(build_index(tmp_path).read_text(encoding="utf-8"))
    links = [value for name, value in page.attributes if name == "href"]
    assert links == ["../with/reports/report.html"]
    assert (tmp_path / "reports" / links[0]).resolve() == paths.report("report").resolve()


def test_building_again_changes_nothing_and_the_index_is_no_run(tmp_path):
    made(tmp_path, "only", "2026-01-01T00:00:00", **{"pass@1": [0.25, 0.2, 0.3]})
    first = build_index(tmp_path).read_bytes()
    assert build_index(tmp_path).read_bytes() == first
    assert [path.parent.name for path in tmp_path.glob("*/recipe.json")] == ["only"]


def test_an_evaluation_of_a_model_is_not_shown_as_a_training_run_without_steps(tmp_path):
    paths = made(tmp_path, "only", "2026-01-01T00:00:00", **{"pass@1": [0.25, 0.2, 0.3]})
    header = json.loads(paths.recipe_file.read_text())
    write_atomic(paths.recipe_file, json.dumps({**header, "stages": ["select", "evaluate/base"]}))
    text = "".join(Page(build_index(tmp_path).read_text(encoding="utf-8")).text)
    assert "evaluation" in text and "1 of 10" not in text


def test_no_runs_say_how_to_start_one(tmp_path):
    assert "No runs yet" in build_index(tmp_path).read_text(encoding="utf-8")
