"""Completions that were made elsewhere: a file of them becomes pass@k, maj@k and reward-weighted votes by model."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from eval.summary import Measure, Sampled, metric_title, summarise
from pipeline.config import EvaluateConfig
from pipeline.seeds import content_id
from pipeline.types import FinishReason, Problem, Status

NAMES = {
    "problem": ("problem", "question", "problem_id", "id"),
    "gold": ("gold", "answer"),
    "completion": ("completion", "response", "output"),
    "model": ("model",),
    "score": ("score", "rm_score"),
    "finish_reason": ("finish_reason",),
    "level": ("level",),
    "subject": ("subject", "type"),
    "label": ("label",),
}
"""Our columns and the names under which they are found when no mapping is given, the first that is there."""
REQUIRED = ("problem", "gold", "completion")


class Judgement(Protocol):
    """What a judge says of one completion: its status, and the canonical answer under which it votes."""

    @property
    def status(self) -> Status: ...
    @property
    def answer(self) -> str | None: ...


Judge = Callable[[Sequence[tuple[str, str, FinishReason]]], Sequence[Judgement]]
"""(gold, completion, finish reason) a row to one judgement a row; ``VerifierPool.judge_many`` is one."""


@dataclass(frozen=True, slots=True)
class ModelResult:
    """The measures of one model of the file ("all" where it names none).

    ``published``: mean of the file's own labels, ``agreement``: share of labelled rows on which the judge says the
    same; None where the file has no labels.
    """

    model: str
    measures: list[Measure]
    problems: int
    completions: int
    published: float | None
    agreement: float | None

    def get(self, metric: str, k: int | None = None, slice_: str = "all") -> Measure | None:
        """The measure, or None."""
        return next((m for m in self.measures if (m.metric, m.k, m.slice) == (metric, k, slice_)), None)


def evaluate_completions(
    file: Path,
    judge: Judge,
    *,
    columns: Mapping[str, str] | None = None,
    ks: Sequence[int] | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> list[ModelResult]:
    """The results of each model in a file of completions (.parquet, .jsonl, .json or .csv), in the order of their names.

    A row has a problem (its text or id; rows of one problem are its samples), a gold answer and a completion, and may
    have a model, a reward model's score (a logit), a finish reason, level, subject, and a published label. ``columns``
    maps our names to the file's. ``ks`` defaults to the powers of two up to the fewest samples of a problem, and that
    number itself. ValueError names what is missing or cannot be read.
    """
    rows = read_rows(file, columns or {})
    verdicts = judge([(row["gold"], row["completion"], row["finish_reason"]) for row in rows])
    groups: dict[str, list[tuple[dict[str, Any], Judgement]]] = {}
    for row, verdict in zip(rows, verdicts, strict=True):
        groups.setdefault(row["model"], []).append((row, verdict))
    return [_result(model, groups[model], ks, resamples, seed) for model in sorted(groups)]


def read_rows(file: Path, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """The file's rows under our names, with texts for texts and None for what a row does not have."""
    raw = _read(file)
    if not raw:
        raise ValueError(f"{file}: no rows; expected one completion a row")
    present = list(dict.fromkeys(name for row in raw[:100] for name in row))
    chosen = _choose_columns(file, present, columns)
    rows = []
    for number, row in enumerate(raw, 1):
        entry = {ours: row.get(theirs) for ours, theirs in chosen.items()}
        for name in REQUIRED:
            if entry[name] is None or (name != "completion" and not str(entry[name]).strip()):
                raise ValueError(f"{file} row {number}: {chosen[name]} is empty; expected a {name}")
        finish: Any = entry.get("finish_reason") or "stop"
        if finish not in ("stop", "length"):
            raise ValueError(f"{file} row {number}: finish_reason is {finish!r}; expected stop or length")
        rows.append({
            **{name: entry.get(name) for name in NAMES}, "problem": str(entry["problem"]), "gold": str(entry["gold"]),
            "completion": str(entry["completion"]), "finish_reason": finish, "model": str(entry.get("model") or "all"),
            "score": _number(entry.get("score"), f"{file} row {number}: score"),
        })  # fmt: skip
    return rows


def result_lines(results: Sequence[ModelResult]) -> list[str]:
    """A table for the terminal: one line a model, shares in per cent with their 95 % intervals over problems."""
    keys = dict.fromkeys(
        (m.metric, m.k) for result in results for m in result.measures
        if m.slice == "all" and m.metric in ("pass@k", "maj@k", "self_consistency_rm", "best_of_k_rm", "unscored_share")
        and not (m.metric != "pass@k" and m.k == 1)  # of one sample every vote is the sample
    )  # fmt: skip
    labelled = any(result.published is not None for result in results)
    head = ["model", "problems", "completions", *(metric_title(*key) for key in keys)] + [
        "published",
        "agreement",
    ] * labelled
    table = [head]
    for result in results:
        cells = [_cell(result.get(*key)) for key in keys]
        extra = [_share(result.published, 2), _share(result.agreement, 2)] if labelled else []
        table.append([result.model, f"{result.problems:,}", f"{result.completions:,}", *cells, *extra])
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def result_json(results: Sequence[ModelResult]) -> str:
    """Every measure of every model, level and subject included, as JSON."""
    return json.dumps([asdict(result) for result in results], indent=1) + "\n"


def _result(
    model: str, rows: Sequence[tuple[dict[str, Any], Judgement]], ks: Sequence[int] | None, resamples: int, seed: int
) -> ModelResult:
    problems: dict[str, Problem] = {}
    counts: dict[str, int] = {}
    samples = []
    for row, verdict in rows:
        key = content_id(row["problem"], row["gold"])
        level = re.search(r"\d+", str(row["level"] if row["level"] is not None else ""))
        subject = None if row["subject"] is None else str(row["subject"])
        problems.setdefault(
            key, Problem(key, row["problem"], row["gold"], level=int(level[0]) if level else None, subject=subject)
        )
        index = counts[key] = counts.get(key, -1) + 1
        correct = {"correct": True, "incorrect": False, "no_answer": False}.get(verdict.status)
        samples.append(Sampled(
            key, index, verdict.answer, correct, verdict.status, row["finish_reason"], reward_model_score=row["score"],
        ))  # fmt: skip
    fewest, most = min(counts.values()) + 1, max(counts.values()) + 1
    config = EvaluateConfig(ks=tuple(ks or default_ks(fewest)), samples=most, curves=False, resamples=resamples)
    # The length of a text in tokens is its model's business: unknown here.
    measures = [m for m in summarise(problems, samples, config, seed) if m.metric != "mean_length"]
    labels = [(bool(row["label"]), sample.correct) for (row, _), sample in zip(rows, samples, strict=True)
              if row["label"] is not None]  # fmt: skip
    published = sum(label for label, _ in labels) / len(labels) if labels else None
    agreement = sum(label == found for label, found in labels) / len(labels) if labels else None
    return ModelResult(model, measures, len(problems), len(rows), published, agreement)


def default_ks(samples: int) -> list[int]:
    """1, 2, 4 … up to the number of samples, and that number."""
    return sorted({*(2**i for i in range(samples.bit_length())), samples})


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected completions as .parquet, .jsonl, .json or .csv")
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_table(file).to_pylist()
        if file.suffix == ".csv":
            with file.open(encoding="utf-8", newline="") as lines:
                return [{k: v if v != "" else None for k, v in row.items()} for row in csv.DictReader(lines)]
        text = file.read_text(encoding="utf-8")
        rows = (
            json.loads(text)
            if file.suffix == ".json"
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); expected .parquet, .jsonl, .json or .csv") from None
    if (
        file.suffix not in (".json", ".jsonl")
        or not isinstance(rows, list)
        or not all(isinstance(r, dict) for r in rows)
    ):
        raise ValueError(f"{file}: expected .parquet, .jsonl, .json (a list of objects) or .csv")
    return rows


def _choose_columns(file: Path, present: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    for ours, theirs in given.items():
        if ours not in NAMES:
            raise ValueError(f"columns: {ours!r} is unknown; expected some of {', '.join(NAMES)}")
        if theirs not in present:
            raise ValueError(f"columns: {file} has no column {theirs!r} for {ours}; it has {', '.join(present)}")
    chosen = {ours: next((n for n in names if n in present), None) for ours, names in NAMES.items()} | dict(given)
    for ours in REQUIRED:
        if chosen[ours] is None:
            raise ValueError(
                f"{file}: no column for {ours} (looked for {', '.join(NAMES[ours])}; it has {', '.join(present)}): "
                f"map it with --column {ours}=NAME"
            )
    return {ours: theirs for ours, theirs in chosen.items() if theirs is not None}


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where} is {value!r}; expected a number") from None


def _cell(measure: Measure | None) -> str:
    if measure is None:
        return "–"
    return f"{100 * measure.value:.1f} [{100 * measure.low:.1f}, {100 * measure.high:.1f}]"


def _share(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"
