"""Problems of reasoning-gym: a completion's answer is judged by the scorer of its task, since many answers may be right.

The scorers are the library's code and read what a model wrote, so they run in a process that can be killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pipeline.types import FinishReason, Problem, Status
from rewards.answers import canonical, extract
from rewards.user_functions import UserFunction
from rewards.verifier import Verdict

_FAILED: Mapping[str, Status] = {"hung": "timeout", "raised": "error", "died": "error", "given_up": "error"}


def task_of(problem: Problem) -> Mapping[str, Any] | None:
    """The task and its entry, None when the problem is of no task."""
    return problem.meta.get("reasoning_gym")


class TaskScorer:
    """Starts its process with the first problem of a task."""

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds a verdict may take."""
        self.timeout = timeout
        self._function: UserFunction | None = None

    def judge_many(self, cases: Sequence[tuple[Problem, str, FinishReason]]) -> list[Verdict]:
        """One verdict a (problem, completion, finish reason), in order: correct when the task's score is 1.

        Raises ImportError, with what to install, when the library is not there.
        """
        answers = [extract(text, reason) for _, text, reason in cases]
        stated = [
            (case[0], found.answer) for case, found in zip(cases, answers, strict=True) if found.answer is not None
        ]
        outcomes = iter(self._open().call_many(stated) if stated else [])
        return [
            Verdict("no_answer", None, found.rule) if found.answer is None else _verdict(found.answer, *next(outcomes))
            for found in answers
        ]

    def _open(self) -> UserFunction:
        if find_spec("reasoning_gym") is None:
            raise ImportError(
                "problems of reasoning_gym are judged by its scorers: install the extra (pip install 'grpoflow[reasoning-gym]')"
            )
        if self._function is None:
            self._function = UserFunction("reasoning_gym", "rewards.task_scores:score", self.timeout)
        return self._function

    def close(self) -> None:
        """End the process. May be called twice."""
        if self._function is not None:
            self._function.close()
            self._function = None


def _verdict(answer: str, kind: str, value: Any) -> Verdict:
    if kind != "value":
        return Verdict(_FAILED[kind], None, f"the task's scorer: {value}", extracted=answer)
    right = value >= 1.0
    return Verdict(
        "correct" if right else "incorrect", canonical(answer), f"the task's score is {value:g}", extracted=answer
    )
