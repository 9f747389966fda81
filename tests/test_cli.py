"""The command line: what the user can mend ends with exit status 2 and one line, whatever kind of mistake it is."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from flows.cli import main
from pipeline.rundir import RunPaths
from tests.commands import refused
from tests.tiny import tiny_recipe


def test_a_file_where_a_folder_must_be_and_a_folder_where_a_file_must_be(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert "Is a directory" in refused(monkeypatch, capsys, "grade", tmp_path)
    assert "does not exist" in refused(monkeypatch, capsys, "init", file / "mine.toml")
    assert "cannot write" in refused(monkeypatch, capsys, "run", "--root", file, "--no-prefect")


def test_a_picture_is_a_png_of_one_run(tmp_path, monkeypatch, capsys):
    for arguments in (["a", "b", "--picture", "c.png"], ["--picture", "c.png"], ["a", "--picture", "c.jpg"]):
        assert "--picture c." in refused(monkeypatch, capsys, "report", *arguments, "--root", tmp_path)


def test_a_report_of_a_folder_that_is_not_there_makes_none(tmp_path, monkeypatch, capsys):
    assert "no folder of runs" in refused(monkeypatch, capsys, "report", "--root", tmp_path / "rusn")
    assert not (tmp_path / "rusn").exists()


def test_a_study_cannot_be_branched(tmp_path, monkeypatch, capsys):
    branch = ("--run-id", "x", "--resume-from", "reject", "--root", tmp_path)
    assert "study" in refused(monkeypatch, capsys, "run", "--recipe", "figure5", *branch)
    assert not list(tmp_path.iterdir())


def test_a_status_that_a_command_asks_for_is_the_process_status(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpoflow", "doctor", "--root", str(tmp_path), "--home", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1  # no server and no worker there


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_says_how_to_go_on_and_leaves_nothing_in_memory(tmp_path, how):
    changes = [part for change in tiny_recipe(tmp_path) for part in ("--set", change)]
    command = [sys.executable, "-m", "flows.cli", "run", "--no-prefect", *changes, "--root", str(tmp_path)]
    # A shell's background job ignores Ctrl-C, and so would its children: the run is to hear it wherever the tests run.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.Popen(
        [*command, "--run-id", "tiny"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heard
    )
    first = RunPaths(tmp_path, "tiny").result_file("sft")
    while not first.is_file():
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    run.send_signal(how)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert errors.strip().splitlines()[-1] == "grpoflow: stopped; the same command continues where it was"
    assert not os.path.exists(f"/dev/shm/grpoflow-{run.pid}")
