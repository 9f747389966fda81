"""Questions to runs in an object store: the same answers as from a folder, and nothing outside it is read."""

import json

import fsspec
import pytest

from pipeline import store
from pipeline.ask import answer
from pipeline.rundir import RunPaths, write_result
from pipeline.types import StageResult
from tests.bench.store_data import Size, make_run

URL = "memory://bucket/runs"
QUESTIONS = [
    "SELECT count(*), sum(completion_length), count(reward) FROM scored",
    "SELECT run_id, round, avg(correct)::FLOAT FROM scored GROUP BY ALL ORDER BY ALL",
    "SELECT run_id, recipe FROM runs ORDER BY 1",
    "SELECT run_id, stage FROM stages ORDER BY 1, 2",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run with two merged rounds, and a child that inherits the first; uploaded as they are."""
    folder = tmp_path_factory.mktemp("runs")
    parent = make_run(folder, 0, Size(runs=1, rounds=2, steps=1, rows=32))
    child = RunPaths(folder, "child")
    inherited = ["select", *(f"round-01/step-0001/{stage}" for stage in ("rollout", "reward", "update"))]
    child.directory.mkdir()
    header = {"run_id": "child", "recipe": {"name": "synthetic"}, "parent": parent.run_id, "inherited": inherited}
    child.recipe_file.write_text(json.dumps(header))
    write_result(child, StageResult("round-01/refresh"))
    files = fsspec.filesystem("memory")
    files.put(str(folder), "/bucket/runs", recursive=True)
    files.pipe("/bucket/private/x.parquet", files.cat(files.find("/bucket/runs/synthetic-0/tables/rollouts")[0]))
    return folder


@pytest.mark.parametrize("query", QUESTIONS)
@pytest.mark.parametrize("run", [None, "synthetic-0", "child"])
def test_an_object_store_answers_as_the_folder_does(root, query, run):
    expected = store.sql(query, run, root=root).to_pylist()
    assert expected
    assert store.sql(query, run, root=URL).to_pylist() == expected


def test_the_command_answers_named_questions_of_a_url(root, capsys):
    answer(None, "synthetic-0", URL, named="hacking_suspects", format_="csv")
    there = capsys.readouterr().out
    answer(None, "synthetic-0", root, named="hacking_suspects", format_="csv")
    assert there == capsys.readouterr().out != ""


@pytest.mark.parametrize(
    "file", ["memory://bucket/private/x.parquet", "runs://../private/x.parquet", "/etc/passwd", "s3://other/x.parquet"]
)
def test_nothing_outside_the_runs_is_read(root, file):
    with pytest.raises(ValueError, match=r"^Permission ?Error"):
        store.sql(f"SELECT count(*) FROM read_parquet('{file}')", root=URL)


def test_dots_do_not_lead_out_of_a_store_that_is_a_folder(root):
    (root.parent / "outside.csv").write_text("a\n1\n")
    with pytest.raises(ValueError, match=r"^PermissionError: runs://\.\./outside\.csv: leads out of file://"):
        store.sql("FROM read_csv('runs://../outside.csv')", root=f"file://{root}")
    assert store.sql(QUESTIONS[0], root=f"file://{root}") == store.sql(QUESTIONS[0], root=root)


def test_a_store_that_cannot_be_opened_is_named_in_a_line(root):
    with pytest.raises(ValueError, match="--root zz://x: cannot be opened"):
        store.sql("SELECT 1", root="zz://x")
    with pytest.raises(FileNotFoundError, match="no folder of runs"):
        store.sql("SELECT 1", root="memory://nothing")
    with pytest.raises(FileNotFoundError, match="no run 'absent'"):
        store.sql("SELECT 1", "absent", root=URL)
