"""Procedural tasks of reasoning-gym as problems. Needs the extra ``reasoning-gym``."""

from __future__ import annotations

import json
from typing import Any

from data.text import clean_text, problem_id
from pipeline.config import SourceConfig
from pipeline.seeds import derive_seed
from pipeline.types import Problem

DEFAULT_PROBLEMS = 1000
"""Problems over all tasks when the recipe sets no ``limit``."""


def generate_tasks(config: SourceConfig, seed: int) -> list[Problem]:
    """``limit`` problems shared evenly over ``tasks``, a pure function of (configuration, seed).

    ``meta["reasoning_gym"]`` holds the task and its entry, which is what the task's own scorer takes. Raises ImportError,
    with what to install, without the library, and ValueError for a task it does not know.
    """
    library = _library()
    if not config.tasks:
        raise ValueError("source 'reasoning_gym' needs tasks = names of its tasks, for example [\"basic_arithmetic\"]")
    each, more = divmod(config.limit or DEFAULT_PROBLEMS, len(config.tasks))
    problems = []
    for position, task in enumerate(config.tasks):
        size = each + (position < more)
        if not size:
            continue
        try:
            data = library.create_dataset(task, seed=derive_seed(seed, "reasoning gym", task) % (1 << 31), size=size)
        except ValueError as error:
            raise ValueError(
                f"source 'reasoning_gym': task {task!r} cannot be made: {str(error).splitlines()[0]}"
            ) from None
        problems += [_problem(config, task, data[index], index) for index in range(size)]
    return problems


def _problem(config: SourceConfig, task: str, entry: dict[str, Any], index: int) -> Problem:
    text = clean_text(str(entry["question"]))
    plain = json.loads(json.dumps(entry, default=str))
    return Problem(
        problem_id=problem_id(text),
        problem=text,
        answer=clean_text(str(entry["answer"])),
        subject=task,
        source=config.label,
        meta={"row": f"{task}:{index}", "reasoning_gym": {"task": task, "entry": plain}},
    )


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise ImportError(
            "source 'reasoning_gym' needs its library: install the extra (pip install 'grpoflow[reasoning-gym]')"
        ) from None
    return reasoning_gym
