"""Every block of the README that can run here runs, as printed and in the order of the page, in one empty folder.

A block under ``<!-- not run: WHY -->`` is left out. ``grpoflow`` commands run in this process (each would load torch
again), without Prefect, and new runs in the smallest sizes; everything else goes to bash.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.cli import main
from pipeline.config import load_recipe
from tests.tiny import TINY

README = Path(__file__).resolve().parent.parent / "README.md"
OURS = ".venv/bin/grpoflow"
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
SMALL = [
    *(change for change in TINY if not change.startswith("data.")), "sampler.max_tokens=24", "reject.problems=60",
    "reject.samples=8",
]  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its first line in the README, its text, and why it is not run, if so."""

    language: str
    line: int
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"line-{self.line}-{self.language}"


def blocks_of(page: str) -> list[Block]:
    """The bash, toml and python blocks of a page. A fence without a language is a drawing."""
    found, fence, above = [], None, ""
    for number, line in enumerate(page.splitlines(), start=1):
        if fence is None and line.startswith("```"):
            reason = NOT_RUN.fullmatch(above)
            fence = (line.removeprefix("```"), number + 1, reason[1] if reason else None, [])
        elif fence is not None and line == "```":
            language, first, why, lines = fence
            if language in ("bash", "toml", "python"):
                found.append(Block(language, first, "\n".join(lines) + "\n", why))
            fence = None
        elif fence is not None:
            fence[3].append(line)
        above = line
    return found


def commands_of(script: str) -> list[str]:
    """The commands of a bash block, each with its continued lines, open quotes and here-document."""
    commands, lines = [], iter(script.splitlines())
    for line in lines:
        command = line
        while command.endswith("\\") or is_open(command):
            command += "\n" + next(lines)
        if document := re.search(r"<<'(\w+)'", line):
            while not command.endswith("\n" + document[1]):
                command += "\n" + next(lines)
        commands.append(command)
    return [command for command in commands if command.strip()]


def is_open(command: str) -> bool:
    """Whether a quote is still open."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def run_bash(script: str) -> None:
    for command in commands_of(script):
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        if words[0] == OURS:
            run_ours(words[1:])
        else:
            subprocess.run(["bash", "-ec", command], check=True)


def run_ours(arguments: list[str]) -> None:
    if arguments[0] == "run":
        arguments = [*arguments, "--no-prefect"]
        if "--recipe" in arguments:
            arguments += [part for change in SMALL for part in ("--set", change)]
    before = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["grpoflow", *arguments]
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        sys.argv = before[0]
        signal.signal(signal.SIGTERM, before[1])
    assert not stop.value.code, f"grpoflow {' '.join(arguments)}: exit status {stop.value.code}"


def run_toml(text: str) -> None:
    file = Path("pasted.toml")
    file.write_text(text)
    load_recipe(str(file))


def run_python(text: str) -> None:
    exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})


BLOCKS = blocks_of(README.read_text(encoding="utf-8"))
RUN = {"bash": run_bash, "toml": run_toml, "python": run_python}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A newcomer's folder: empty but for the environment that ``make install`` made."""
    here = tmp_path_factory.mktemp("first")
    (here / ".venv").symlink_to(sys.prefix)
    return here


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.reason is None], ids=str)
def test_a_block_works_as_printed(block, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    RUN[block.language](block.text)


def test_the_first_hour_is_run_but_for_services_and_gpus():
    page = README.read_text(encoding="utf-8")
    start = page[: page.index("## The first hour")].count("\n")
    end = page[: page.index("## How it works")].count("\n")
    hour = [block for block in BLOCKS if start < block.line < end]
    assert len([block for block in hour if block.reason is None]) >= 6


def test_a_block_is_left_out_only_with_a_reason_right_above_it():
    page = "<!-- not run: needs a GPU -->\n```bash\nfirst\n```\n\n<!-- not run: x -->\n\n```bash\nsecond\n```\n"
    page += "```\ndrawing\n```\n"
    assert [(block.text, block.line, block.reason) for block in blocks_of(page)] == [
        ("first\n", 3, "needs a GPU"), ("second\n", 9, None),
    ]  # fmt: skip


def test_a_script_is_cut_into_commands():
    script = "cat > a <<'END'\nit's one\nEND\nrun \\\n  --now # don't\n\nsay \"two\n lines\"\n"
    assert commands_of(script) == ["cat > a <<'END'\nit's one\nEND", "run \\\n  --now # don't", 'say "two\n lines"']


@pytest.mark.parametrize("text", [f"{OURS} stauts", "false", f"{OURS} sql 'SELECT nothing FROM nowhere'"])
def test_a_block_that_stops_working_fails(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("runs")
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        run_bash(text + "\n")
