"""Problem sets → ``Problem``: where each set keeps its question, gold answer, solution, level and subject.

Golds are taken as each set stores them and are not judged here; the selection stage does that with the verifier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from data.readers import Row, read_rows
from data.text import clean_text, last_boxed, problem_id
from pipeline.config import DataConfig, SourceConfig
from pipeline.types import Problem

OURS = ("problem", "answer", "solution", "level", "subject", "id")
KNOWN: dict[str, tuple[str, str | None, dict[str, str]]] = {
    "gsm8k": ("openai/gsm8k", "main", {"problem": "question", "solution": "answer"}),
    "math": ("EleutherAI/hendrycks_math", None, {"problem": "problem", "solution": "solution", "subject": "type"}),
    "math500": ("HuggingFaceH4/MATH-500", None, {"problem": "problem", "answer": "answer", "subject": "subject"}),
    "svamp": ("ChilleD/SVAMP", None, {"problem": "question_concat", "answer": "Answer", "subject": "Type"}),
    "mgsm": ("juletxara/mgsm", "en", {"problem": "question", "answer": "answer_number", "subject": "language"}),
}
"""Set → Hub name, default Hub configuration, and columns (ours: theirs) when the recipe maps none."""
MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_ANNOTATION = re.compile(r"<<[^<>]*>>")


def hub_names(data: DataConfig) -> list[str]:
    """Hub names of the sets that a recipe's training problems come from; generators and local files have none."""
    names = [KNOWN[source.name][0] if source.name in KNOWN else source.name for source in data.sources]
    return sorted({name for name in names if "/" in name})


def load_source(config: SourceConfig, data: DataConfig, seed: int) -> list[Problem]:
    """Problems of one source, in the set's order, ids from content, nothing removed, nothing rendered.

    ``seed`` feeds the generators (embedded, reasoning_gym) only. Golds may be empty here: the selection stage sets
    those rows aside. Raises ValueError for a missing column, an unreadable file or an unreachable set.
    """
    if config.name == "embedded":
        return _embedded(config, data, seed)
    if config.name == "reasoning_gym":
        from data.procedural import generate_tasks

        problems = generate_tasks(config, seed)
    else:
        problems = list(islice(_problems(config), config.limit))
    if not problems:
        raise ValueError(f"source {config.label!r} has no rows")
    return problems[: config.limit]


def _embedded(config: SourceConfig, data: DataConfig, seed: int) -> list[Problem]:
    """The generator's problems, both splits; ``limit`` bounds the training ones."""
    from data.embedded import generate

    problems = [
        replace(p, problem_id=problem_id(p.problem), source=config.label) for p in generate(data.embedded, seed)
    ]
    train = [problem for problem in problems if problem.split == "train"][: config.limit]
    return [*train, *(problem for problem in problems if problem.split == "heldout")]


def _problems(config: SourceConfig) -> Iterator[Problem]:
    build = _BUILDERS.get(config.name, _generic)
    columns = {**KNOWN.get(config.name, ("", None, {}))[2], **config.columns}
    unknown = sorted(set(config.columns) - set(OURS))
    if unknown:
        raise ValueError(f"source {config.label!r}: columns maps {unknown[0]!r}; expected one of {', '.join(OURS)}")
    seen: dict[str, str] = {}
    for where, row in _rows(config):
        problem = build(row, columns, where)
        row_id = problem.meta.get("id")
        if row_id is not None and seen.setdefault(row_id, where) != where:
            raise ValueError(f"{where}: id {row_id!r} was used before at {seen[row_id]}; ids must be unique in a set")
        yield _named(problem, config.label, where)


def _named(problem: Problem, source: str, where: str) -> Problem:
    return replace(problem, source=source, meta={**problem.meta, "row": where.rpartition("/")[2]})


def _rows(config: SourceConfig) -> Iterator[tuple[str, Row]]:
    if config.path is not None:
        rows = read_rows(config.path)
        if config.name == "mgsm":
            language = config.config or "en"
            return ((where, row) for where, row in rows if row.get("language", language) == language)
        return rows
    if config.name == "file":
        raise ValueError("source 'file' needs path = a file, folder or glob of JSONL, JSON, CSV or Parquet")
    from data.hub import hub_rows

    name, default, _ = KNOWN.get(config.name, (config.name, None, {}))
    if config.name == "math":
        subjects = [config.config] if config.config else list(MATH_SUBJECTS)
        return (row for subject in subjects for row in hub_rows(config, name, subject))
    return hub_rows(config, name, config.config or default)


# -- one row to one problem -------------------------------------------------------------------------------------


def _get(row: Row, columns: dict[str, str], ours: str, where: str) -> Any:
    """A value that must be there; ValueError lists the columns that are."""
    theirs = columns.get(ours, ours)
    if theirs not in row:
        raise ValueError(
            f"{where}: no column {theirs!r} for {ours}; columns here: {', '.join(map(str, row))}. "
            f'Map it in the recipe: columns = {{{ours} = "…"}}'
        )
    return row[theirs]


def _text(value: Any) -> str:
    """The value as text: lists of one give their item, whole floats lose their .0, None is empty."""
    if isinstance(value, list | tuple):
        return _text(value[0]) if len(value) == 1 else ", ".join(_text(item) for item in value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return "" if value is None else clean_text(str(value))


def _level(value: Any) -> int | None:
    """The number in ``5`` or ``Level 5``; None for ``Level ?``."""
    digits = re.search(r"\d+", str(value)) if value is not None else None
    return int(digits.group()) if digits else None


def _optional(row: Row, columns: dict[str, str], ours: str, where: str) -> Any:
    """A value that may be absent, unless the recipe maps a column for it."""
    return _get(row, columns, ours, where) if ours in columns or ours in row else None


def _generic(row: Row, columns: dict[str, str], where: str) -> Problem:
    """Columns as mapped; without an answer column the gold is the solution's last box, or what follows its ####."""
    text = _text(_get(row, columns, "problem", where))
    raw = _optional(row, columns, "solution", where)
    solution = _text(raw) if raw is not None else None
    tests = _tests(_optional(row, columns, "tests", where), where)
    if tests is not None:
        answer = _text(_optional(row, columns, "answer", where))
    elif "answer" in columns or "answer" in row or solution is None:
        answer = _text(_get(row, columns, "answer", where))
    else:
        boxed = last_boxed(solution)
        answer = boxed if boxed is not None else _marked(solution)[1]
    subject = _optional(row, columns, "subject", where)
    row_id = _get(row, columns, "id", where) if "id" in columns else None
    return Problem(
        problem_id=problem_id(text),
        problem=text,
        answer=answer,
        solution=solution or None,
        level=_level(_optional(row, columns, "level", where)),
        subject=_text(subject) or None,
        meta={
            **({} if row_id is None else {"id": str(row_id)}), **({} if tests is None else {"tests": tests}),
        },
    )  # fmt: skip


def _tests(value: Any, where: str) -> list[Any] | None:
    """Unit tests of a code problem: a list, or the JSON of one; None where there are none."""
    if value is None:
        return None
    try:
        tests = json.loads(value) if isinstance(value, str) else value
        # Parquet gives every test all the fields that any of them has.
        return [{name: text for name, text in dict(test).items() if text is not None} for test in tests]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: tests {str(value)[:60]!r}: expected a list of objects, or its JSON ({error})"
        ) from None


def _marked(text: str) -> tuple[str, str]:
    """(working, answer) around the last ``####``; the answer is empty when there is none."""
    body, marker, answer = text.rpartition("####")
    return (body.strip(), answer.strip()) if marker else (text.strip(), "")


def _gsm8k(row: Row, columns: dict[str, str], where: str) -> Problem:
    """GSM8K: the gold follows ``####`` (thousands commas dropped); calculator annotations leave the solution."""
    working, answer = _marked(_text(_get(row, columns, "solution", where)))
    plain = {ours: theirs for ours, theirs in columns.items() if ours not in ("solution", "answer")}
    problem = _generic({**row, "answer": answer.replace(",", "")}, {**plain, "answer": "answer"}, where)
    return replace(problem, solution=_ANNOTATION.sub("", working))


def _math(row: Row, columns: dict[str, str], where: str) -> Problem:
    r"""MATH: the gold is the last ``\boxed`` of the solution."""
    return _generic({key: value for key, value in row.items() if key != "answer"}, columns, where)


def _svamp(row: Row, columns: dict[str, str], where: str) -> Problem:
    """SVAMP: body and question are one text; the Hub's older copies have no joined column."""
    if columns["problem"] == "question_concat" and "question_concat" not in row:
        body, question = _get(row, {}, "Body", where), _get(row, {}, "Question", where)
        row = {**row, "question_concat": f"{str(body).rstrip()} {question}"}
    return _generic(row, columns, where)


_BUILDERS: dict[str, Callable[[Row, dict[str, str], str], Problem]] = {"gsm8k": _gsm8k, "math": _math, "svamp": _svamp}
