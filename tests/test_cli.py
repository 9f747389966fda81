"""The command line: what the user can mend ends with exit status 2 and one line, whatever kind of mistake it is."""

import sys

import pytest

from flows.cli import main


def refused(monkeypatch, capsys, *arguments):
    """The one line that the command line gives for these arguments."""
    monkeypatch.setattr(sys, "argv", ["grpoflow", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert len(lines) == 1
    return lines[0]


def test_a_file_where_a_folder_must_be_and_a_folder_where_a_file_must_be(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert "Is a directory" in refused(monkeypatch, capsys, "grade", tmp_path)
    assert "does not exist" in refused(monkeypatch, capsys, "init", file / "mine.toml")
    assert "cannot write" in refused(monkeypatch, capsys, "run", "--root", file, "--no-prefect")


def test_a_report_of_a_folder_that_is_not_there_makes_none(tmp_path, monkeypatch, capsys):
    assert "no folder of runs" in refused(monkeypatch, capsys, "report", "--root", tmp_path / "rusn")
    assert not (tmp_path / "rusn").exists()


def test_a_study_cannot_be_branched(tmp_path, monkeypatch, capsys):
    branch = ("--run-id", "x", "--resume-from", "reject", "--root", tmp_path)
    assert "study" in refused(monkeypatch, capsys, "run", "--recipe", "figure5", *branch)
    assert not list(tmp_path.iterdir())
