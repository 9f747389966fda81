"""The command line as tests call it."""

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
