"""Outside: starts the processes of one test, feeds them, and ends them at the deadline, whatever they do."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LONGEST_OUTPUT = 1 << 20
"""Bytes of standard output that are read; a program that prints more has failed."""
MOST_FILES = 1000
LOOK_SECONDS = 0.05
"""How often the folder of a program that may write is looked at."""
START_SECONDS = 60.0
"""Longest run of the first, harmless program (starting Python on a loaded machine)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``seconds`` of wall clock and of processor; ``file_mb`` for each file and all together, 0 is no file at all."""

    seconds: float = 4.0
    memory_mb: int = 512
    file_mb: int = 0
    weak: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status`` is the exit status of the process, None when it was ended; ``why`` says what went wrong."""

    status: int | None
    output: bytes
    why: str = ""


def run_script(program: str, stdin: str, limits: Limits) -> Outcome:
    """Run a program as ``python program.py`` with this standard input. What it prints to stderr is dropped."""
    with _folder(program) as folder, tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        settings = _settings(folder, limits, functions=False)
        process = _start("candidate.py", [json.dumps(settings)], stdin=given.fileno(), stdout=subprocess.PIPE)
        return _watch(process, folder, limits)


def run_test(program: str, test: str, limits: Limits) -> tuple[str, str]:
    """Run a test's text against the functions of a program: ("passed" | "failed" | "error", why)."""
    with _folder(program, test) as folder, contextlib.ExitStack() as pipes:
        settings = _settings(folder, limits, functions=True)
        requests_out, requests_in = _pipe(pipes)
        answers_out, answers_in = _pipe(pipes)
        candidate = _start("candidate.py", [json.dumps(settings)], stdin=requests_out, stdout=answers_in)
        tester = None
        try:
            arguments = [
                json.dumps(settings | {"folder": str(folder), "file_mb": 0}),
                str(answers_out),
                str(requests_in),
            ]
            tester = _start(
                "tester.py", arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                pass_fds=(answers_out, requests_in),
            )  # fmt: skip
            pipes.close()  # ours: either side must see the end of the other
            outcome = _watch(tester, folder, limits)
        finally:
            for process in (candidate, tester):
                if process is not None:
                    _end(process)
    if outcome.why:
        return "failed", outcome.why
    try:
        status, why = json.loads(outcome.output)
    except ValueError:
        return "failed", f"the test's process ended with status {outcome.status}"
    return status, why


def check_sandbox(limits: Limits) -> None:
    """RuntimeError when a harmless program does not run inside, with the reason and the way out."""
    with _folder("print(6 * 7)") as folder:
        settings = _settings(folder, limits, functions=False)
        done = subprocess.run(
            _command("candidate.py", [json.dumps(settings)]), stdin=subprocess.DEVNULL, capture_output=True,
            env=_environment(), timeout=START_SECONDS,
        )  # fmt: skip
    if done.stdout != b"42\n":
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise RuntimeError(
            f"code tests: a process cannot lock itself in here ({reason[0]}). They need Linux with seccomp and Landlock "
            f"(5.13 or newer) on x86_64 or aarch64, and rewards.code_memory_mb = {limits.memory_mb} to be enough; "
            f"rewards.code_weak_sandbox = true runs model-written code with resource limits alone"
        )


def _settings(folder: Path, limits: Limits, *, functions: bool) -> dict[str, Any]:
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return {
        "program": str(folder / "program.py"), "test": str(folder / "test.py"), "folder": str(folder / "empty"),
        "functions": functions, "memory_mb": limits.memory_mb, "cpu_seconds": math.ceil(limits.seconds),
        "file_mb": limits.file_mb, "weak": limits.weak,
        "readable": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *libraries],
    }  # fmt: skip


@contextlib.contextmanager
def _folder(program: str, test: str = "") -> Iterator[Path]:
    """A folder with the program, the test, and the empty folder that the program runs in."""
    with tempfile.TemporaryDirectory(prefix="grpoflow-code-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "empty").mkdir()
        for file, text in (("program.py", program), ("test.py", test)):
            (folder / file).write_bytes(text.encode("utf-8", "replace"))
        yield folder


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _command(script: str, arguments: list[str]) -> list[str]:
    # -P and -S: neither this folder nor site-packages can be imported from; no bytecode is written.
    return [sys.executable, "-P", "-s", "-S", "-B", str(HERE / script), *arguments]


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {**kept, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}


def _start(script: str, arguments: list[str], **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _command(script, arguments), stderr=subprocess.DEVNULL, env=_environment(), start_new_session=True, **streams
    )


def _watch(process: subprocess.Popen[bytes], folder: Path, limits: Limits) -> Outcome:
    """Read the process's output until it ends, the deadline passes, or it takes more than it may."""
    assert process.stdout is not None
    deadline = time.monotonic() + limits.seconds
    descriptor, output, why = process.stdout.fileno(), bytearray(), ""
    try:
        while not why:
            left = deadline - time.monotonic()
            if left <= 0:
                why = f"no end after {limits.seconds:g} s"
            elif select.select([descriptor], [], [], min(left, LOOK_SECONDS) if limits.file_mb else left)[0]:
                chunk = os.read(descriptor, 1 << 16)
                output += chunk
                if not chunk:
                    break
                if len(output) > LONGEST_OUTPUT:
                    why = f"more than {LONGEST_OUTPUT} bytes of output"
            elif limits.file_mb and _too_full(folder / "empty", limits.file_mb):
                why = f"more than {limits.file_mb} MiB or {MOST_FILES} files written"
        ended = not why and _has_ended(process, deadline)
        if not why and not ended:
            why = f"no end after {limits.seconds:g} s"
    finally:
        _end(process)
    return Outcome(process.returncode if ended else None, bytes(output), why)


def _has_ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether the process ends before the deadline. It is not reaped, so that its group's number stays taken."""
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _too_full(folder: Path, file_mb: int) -> bool:
    sizes = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(entry.stat(follow_symlinks=False).st_size)
    return len(sizes) > MOST_FILES or sum(sizes) > file_mb << 20


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and, in a weak sandbox, whatever of its session is left; then reap it. May be called twice."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
