"""What a task of reasoning-gym says of an answer. Run in a process of its own by ``rewards.procedural``."""

from __future__ import annotations

import reasoning_gym

from pipeline.types import Problem


def score(problem: Problem, answer: str) -> float:
    """The task's own score of the answer: 1 is right, less is partly or wholly wrong."""
    task = problem.meta["reasoning_gym"]
    return float(reasoning_gym.get_score_answer_fn(task["task"])(answer, task["entry"]))
