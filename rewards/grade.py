"""The command ``grade``: judge the rows of a JSON-lines file, or show how one of them was judged."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.protocols import Progress, no_progress
from pipeline.types import FinishReason
from rewards.answers import clean, extract
from rewards.workers import Verdict, VerifierPool


@dataclass(frozen=True, slots=True)
class CaseRow:
    """One row to judge; ``expected`` says whether it should be correct, where the file tells."""

    id: str
    gold: str
    completion: str
    finish_reason: FinishReason = "stop"
    expected: bool | None = None


def grade(
    cases_path: Path,
    out: Path | None = None,
    explain: str | None = None,
    *,
    workers: int = 1,
    timeout: float = 5.0,
    memory_mb: int = 2048,
    progress: Progress = no_progress,
) -> list[Verdict]:
    """Judge every row {id, gold, completion}; writes {id, status, correct, answer, seconds} a row to ``out`` or prints it.

    ``explain`` judges the row of that id alone and prints what was extracted, cleaned and decided. A row may also have
    ``finish_reason`` ("stop", "length") and ``expected`` (true, false: the summary then counts agreement); other fields
    are ignored. ValueError names the line that cannot be read.
    """
    rows = read_cases(cases_path)
    if explain is not None:
        rows = [row for row in rows if row.id == explain]
        if not rows:
            raise ValueError(f"--explain {explain}: no row of {cases_path} has that id")
    with VerifierPool(workers, timeout, memory_mb) as pool:
        verdicts = pool.judge_many([(row.gold, row.completion, row.finish_reason) for row in rows], progress=progress)
    if explain is not None:
        print(explanation(rows[0], verdicts[0]))
        return verdicts
    lines = [json.dumps(verdict_row(row, verdict)) for row, verdict in zip(rows, verdicts, strict=True)]
    if out is None:
        print("\n".join(lines))
        return verdicts
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(summary(rows, verdicts))
    print(out)
    return verdicts


def read_cases(path: Path) -> list[CaseRow]:
    """The rows of a JSON-lines file. ValueError with the line number where one cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028 inside a string
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from None
    rows: list[CaseRow] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _case(line, f"{path} line {number}")
        if row.id in seen:
            raise ValueError(
                f"{path} line {number}: id {row.id!r} is already that of line {seen[row.id]}; make it unique"
            )
        seen[row.id] = number
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows: expected one JSON object a line with id, gold and completion")
    return rows


def _case(line: str, where: str) -> CaseRow:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); expected an object with id, gold and completion") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with id, gold and completion, got {type(value).__name__}")
    missing = [name for name in ("id", "gold", "completion") if name not in value]
    if missing:
        raise ValueError(
            f"{where}: {' and '.join(missing)} missing; it has {', '.join(map(str, value)) or 'no fields'}"
        )
    for name in ("gold", "completion"):
        if not isinstance(value[name], str):
            raise ValueError(f"{where}: {name} is {value[name]!r:.60}: expected text, so put it in quotes")
    if isinstance(value["id"], bool) or not isinstance(value["id"], (str, int)):
        raise ValueError(f"{where}: id is {value['id']!r:.60}: expected text or a whole number")
    finish_reason, expected = value.get("finish_reason", "stop"), value.get("expected")
    if finish_reason not in ("stop", "length"):
        raise ValueError(f'{where}: finish_reason is {finish_reason!r:.60}: expected "stop" or "length"')
    if expected is not None and not isinstance(expected, bool):
        raise ValueError(f"{where}: expected is {expected!r:.60}: expected true or false")
    return CaseRow(str(value["id"]), value["gold"], value["completion"], finish_reason, expected)


def verdict_row(row: CaseRow, verdict: Verdict) -> dict[str, Any]:
    """What is written of one verdict."""
    return {
        "id": row.id,
        "status": verdict.status,
        "correct": verdict.status == "correct",
        "answer": verdict.answer,
        "seconds": round(verdict.seconds, 6),
    }


def summary(rows: list[CaseRow], verdicts: list[Verdict]) -> str:
    """One line: how many of each status, and the agreement where rows say what was expected."""
    counts = Counter(verdict.status for verdict in verdicts)
    text = f"{len(rows)} judged: " + ", ".join(f"{count} {status}" for status, count in counts.most_common())
    told = [
        (row.expected, v.status == "correct") for row, v in zip(rows, verdicts, strict=True) if row.expected is not None
    ]
    if told:
        agreed = sum(expected == correct for expected, correct in told)
        text += f"; as expected {agreed} of {len(told)} ({agreed / len(told):.1%})"
    return text


def explanation(row: CaseRow, verdict: Verdict) -> str:
    """How one row was judged, for people: extraction, both cleaned answers, the rule that decided."""
    extraction = extract(row.completion, row.finish_reason)
    lines = [
        ("id", row.id),
        ("completion", f"{len(row.completion)} characters, ended by {row.finish_reason}"),
        ("extraction", extraction.rule),
        ("answer", "none" if extraction.answer is None else extraction.answer),
        ("answer cleaned", "none" if extraction.answer is None else clean(extraction.answer)),
        ("answer votes as", "none" if verdict.answer is None else verdict.answer),
        ("gold", row.gold),
        ("gold cleaned", clean(row.gold)),
        ("decided by", verdict.rule),
        ("status", f"{verdict.status} ({verdict.seconds:.3f} s)"),
    ]
    if row.expected is not None:
        lines.append(("expected", "correct" if row.expected else "not correct"))
    return "\n".join(f"{name + ':':17}{text}" for name, text in lines)
