"""Stage select: sources and benchmarks → the problems table; every row set aside has its reason, every rule its count."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data.funnel import AcceptGold, Selection, select_problems
from data.selection import SetAside
from pipeline import store
from pipeline.config import Recipe
from pipeline.rundir import RunPaths, StageContext
from pipeline.types import Problem, StageResult
from stages import base


def run(context: StageContext, tokenizer: Any, accept_gold: AcceptGold) -> StageResult:
    """Select, render and record the problems of a run. Raises ValueError when nothing usable is left."""
    selection = select_problems(context.recipe.data, context.recipe.seed, tokenizer, accept_gold)
    store.append(context.paths, "problems", context.key, [problem_row(problem) for problem in selection.problems])
    file = context.paths.stage(context.key) / "set_aside.parquet"
    write_set_aside(file, selection.set_aside)
    return StageResult(
        context.key, {"set_aside": str(file.relative_to(context.paths.directory))}, selection_metrics(selection)
    )


def load_problems(paths: RunPaths) -> list[Problem]:
    """The selected problems of a run (or of the ancestor it inherited them from), both splits, in selection order."""
    rows = store.read(paths, "problems", "select").to_pylist()
    if not rows:
        raise ValueError(f"run {paths.run_id!r} has no selected problems: its stage select is not complete")
    return [
        Problem(**{**row, "prompt_token_ids": tuple(row["prompt_token_ids"]), "meta": json.loads(row["meta"])})
        for row in rows
    ]


def select_files(recipe: Recipe, out: Path, *, show: int = 0, write: Callable[[str], None] = print) -> Selection:
    """The stage alone: writes ``out`` (.jsonl or .parquet), ``<stem>.set_aside.parquet`` and ``<stem>.funnel.json``.

    Prints the funnel, and ``show`` training prompts as the model will see them, special tokens visible. Golds are
    checked by the recipe's verifier. ValueError, in one line, as ``run``.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"--out {out}: expected a name that ends in .jsonl or .parquet")
    with TemporaryDirectory(prefix="grpoflow-") as folder:
        tokenizer = base.prepare(StageContext(recipe, RunPaths(Path(folder), "select"), "select"))
        selection = select_problems(recipe.data, recipe.seed, tokenizer, base.gold_check(recipe.rewards))
    out.parent.mkdir(parents=True, exist_ok=True)
    _write_rows(out, [problem_row(problem) for problem in selection.problems])
    write_set_aside(out.with_suffix(".set_aside.parquet"), selection.set_aside)
    out.with_suffix(".funnel.json").write_text(json.dumps(selection.funnel, indent=1) + "\n", encoding="utf-8")
    for line in funnel_lines(selection.funnel):
        write(line)
    for problem in [p for p in selection.problems if p.split == "train"][:show]:
        write(f"--- {problem.source} {problem.problem_id}: {len(problem.prompt_token_ids)} tokens")
        write(tokenizer.decode(problem.prompt_token_ids))
    return selection


def funnel_lines(funnel: Sequence[Mapping[str, Any]]) -> list[str]:
    """The funnel as a table for people: how many each rule took, by source."""
    lines = [f"{'rule':16}{'came in':>10}{'set aside':>11}{'kept':>10}  set aside by source"]
    for row in funnel:
        sources = ", ".join(f"{name} {count}" for name, count in row["set_aside_by_source"].items())
        lines.append(
            f"{row['rule']:16}{row['came_in']:>10,}{row['set_aside']:>11,}{row['kept']:>10,}  {sources}".rstrip()
        )
    return lines


def selection_metrics(selection: Selection) -> dict[str, Any]:
    """Counts for the stage's result: how many are left in each split, and the funnel."""
    train = sum(problem.split == "train" for problem in selection.problems)
    return {
        "train": train,
        "heldout": len(selection.problems) - train,
        "set_aside": len(selection.set_aside),
        "funnel": selection.funnel,
    }


def problem_row(problem: Problem) -> dict[str, Any]:
    """A row of the problems table: the fields of ``Problem``, with ``meta`` as JSON."""
    row = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return {
        **row,
        "prompt_token_ids": list(problem.prompt_token_ids),
        "meta": json.dumps(dict(problem.meta), sort_keys=True),
    }


def write_set_aside(file: Path, rows: Sequence[SetAside]) -> None:
    """One row a problem set aside: rule, reason, evidence (JSON), source, split, id, text and gold."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("rule", "reason", "evidence", "source", "split", "problem_id", "problem", "answer", "meta")
    table = pa.table(
        {name: [_aside_row(row)[name] for row in rows] for name in names},
        schema=pa.schema([(name, pa.string()) for name in names]),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, compression="zstd")


def _aside_row(row: SetAside) -> dict[str, str]:
    problem = replace(row.problem, prompt_token_ids=())
    return {
        "rule": row.rule,
        "reason": row.reason,
        "evidence": json.dumps(dict(row.evidence), sort_keys=True),
        "source": problem.source,
        "split": problem.split,
        "problem_id": problem.problem_id,
        "problem": problem.problem,
        "answer": problem.answer,
        "meta": json.dumps(dict(problem.meta), sort_keys=True),
    }


def _write_rows(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    if out.suffix == ".jsonl":
        out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), out, compression="zstd")
