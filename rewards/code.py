"""Code problems: the program in a completion, run against the problem's unit tests in a sandbox.

A problem is one of code when its ``meta["tests"]`` lists tests, each ``{"stdin": …, "stdout": …}`` (the program is run as a
script) or ``{"code": "assert add(1, 2) == 3"}`` (the program's functions are called). The expected values never enter the
program's process. Programs have Python's standard library and nothing else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import RewardConfig
from pipeline.protocols import Progress, no_progress
from pipeline.types import FinishReason, Problem, Status
from rewards.sandbox.run import Limits, check_sandbox, run_script, run_test

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
PYTHON = frozenset({"", "python", "py", "python3"})


@dataclass(frozen=True, slots=True)
class CodeVerdict:
    """``status`` as of a verdict on an answer; ``rule`` says which test failed first, and why."""

    status: Status
    passed: int
    total: int
    rule: str
    seconds: float = 0.0


def tests_of(problem: Problem) -> Sequence[Mapping[str, str]] | None:
    """The problem's tests, None when it is not a code problem."""
    return problem.meta.get("tests")


def extract_program(text: str, finish_reason: FinishReason = "stop") -> str | None:
    """The last closed block of Python after the reasoning; None in a truncated completion or where there is none."""
    if finish_reason != "stop":
        return None
    blocks = [body for language, body in FENCE.findall(text.rpartition("</think>")[2]) if language.lower() in PYTHON]
    return blocks[-1] if blocks and blocks[-1].strip() else None


class CodeRunner:
    """Runs tests side by side, as many at a time as the recipe's ``workers``. Holds no process between calls."""

    def __init__(self, config: RewardConfig) -> None:
        self.workers, self.every = config.workers, config.code_score == "fraction"
        self.limits = Limits(config.code_timeout, config.code_memory_mb, config.code_file_mb, config.code_weak_sandbox)
        self._checked = False

    def judge_many(
        self, cases: Sequence[tuple[Problem, str, FinishReason]], progress: Progress = no_progress
    ) -> list[CodeVerdict]:
        """One verdict a (code problem, completion, finish reason), in order; equal programs are run once.

        RuntimeError when this machine cannot lock a process in (see ``code_weak_sandbox``).
        """
        if cases and not self._checked:
            check_sandbox(self.limits)
            self._checked = True
        keys = [(problem.problem_id, extract_program(text, reason)) for problem, text, reason in cases]
        problems = {problem.problem_id: problem for problem, _, _ in cases}
        distinct = list(dict.fromkeys(keys))
        found: dict[tuple[str, str | None], CodeVerdict] = {}
        with ThreadPoolExecutor(self.workers, "code") as threads:
            verdicts = threads.map(lambda key: self.judge(problems[key[0]], key[1]), distinct)
            for number, (key, verdict) in enumerate(zip(distinct, verdicts, strict=True)):
                found[key] = verdict
                progress(number + 1, len(distinct), "code tests")
        return [found[key] for key in keys]

    def judge(self, problem: Problem, program: str | None) -> CodeVerdict:
        """The verdict on one program. With ``code_score = "all"`` the first test that fails is the last one run."""
        tests = tests_of(problem) or ()
        wrong = next((str(test)[:80] for test in tests if not _is_test(test)), None if tests else "an empty list")
        if wrong is not None:
            return CodeVerdict("gold_unparsable", 0, len(tests), f"tests: {wrong}; expected stdin and stdout, or code")
        if program is None:
            return CodeVerdict("no_answer", 0, len(tests), "no closed block of Python in a finished completion")
        started, passed, rule = time.perf_counter(), 0, ""
        for number, test in enumerate(tests):
            outcome, why = self._run(program, test)
            if outcome == "error":
                return CodeVerdict("error", passed, len(tests), f"test {number + 1}: {why}")
            passed += outcome == "passed"
            if outcome == "failed":
                rule = rule or f"test {number + 1}: {why}"
                if not self.every:
                    break
        verdict = CodeVerdict("incorrect" if rule else "correct", passed, len(tests), rule or "every test passed")
        return replace(verdict, seconds=time.perf_counter() - started)

    def _run(self, program: str, test: Mapping[str, str]) -> tuple[str, str]:
        try:
            if "code" in test:
                return run_test(program, test["code"], self.limits)
            outcome = run_script(program, test["stdin"], self.limits)
        except OSError as error:  # no process or no disk space left: says nothing about the program
            return "error", str(error)
        if outcome.why or outcome.status != 0:
            return "failed", outcome.why or f"it ended with status {outcome.status}"
        if _lines(outcome.output.decode(errors="replace")) != _lines(test["stdout"]):
            return "failed", "it printed something else"
        return "passed", ""


def code_score(verdict: CodeVerdict, how: str) -> float:
    """Share of the tests passed, or with "all" 1.0 only when every one is."""
    return verdict.passed / verdict.total if how == "fraction" else float(verdict.passed == verdict.total)


def _is_test(test: Any) -> bool:
    """One of the two forms, all values text."""
    if not isinstance(test, Mapping) or not all(isinstance(value, str) for value in test.values()):
        return False
    return set(test) in ({"code"}, {"stdin", "stdout"})


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
