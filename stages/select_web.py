"""Selection of web pages from files to files: a pretraining or SFT set out of a pool and seed pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from data.decontaminate import Reference
from data.readers import read_rows
from data.sources import load_source
from data.text import clean_text
from data.web import Page, WebSelection, select_pages
from pipeline.config import Recipe
from pipeline.config.data import WebConfig


def select_web_files(
    recipe: Recipe,
    pool: str,
    seed_pages: str,
    out: Path,
    config: WebConfig | None = None,
    *,
    write: Callable[[str], None] = print,
) -> WebSelection:
    """Write the mathematical pages of ``pool`` to ``out`` (.jsonl: url, text, score), and the others beside it.

    ``pool`` and ``seed_pages`` are files, folders or globs with a column text (the pool with url, too). Pages that repeat
    a problem of ``data.benchmarks`` leave. ``<stem>.set_aside.jsonl`` names page, url and reason of those that a rule took
    after the classifier. ValueError, in one line, for a missing column or an empty file.
    """
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out}: expected a name that ends in .jsonl")
    references = [
        Reference(benchmark.label, str(p.meta.get("row", p.problem_id)), part, text)
        for benchmark in recipe.data.benchmarks
        for p in load_source(benchmark, recipe.data, recipe.seed)
        for part, text in (("problem", p.problem), ("solution", p.solution or ""))
    ]
    seeds = [page.text for page in _pages(seed_pages, needs_url=False)]
    selection = select_pages(lambda: _pages(pool), seeds, references, config or WebConfig(), recipe.seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("w", encoding="utf-8") as kept,
        out.with_suffix(".set_aside.jsonl").open("w", encoding="utf-8") as aside,
    ):
        for number, page in enumerate(_pages(pool)):
            score = round(float(selection.scores[number]), 4)
            if selection.kept[number]:
                kept.write(json.dumps({"url": page.url, "text": page.text, "score": score}, ensure_ascii=False) + "\n")
            elif number in selection.reasons:
                row = {"page": number, "url": page.url, "score": score, "reason": selection.reasons[number]}
                aside.write(json.dumps(row, ensure_ascii=False) + "\n")
    for step in selection.iterations:
        write(
            f"iteration {step['iteration']}: {step['seed']:,} seed pages, {step['kept']:,} of {len(selection.kept):,} kept"
        )
    write(
        f"{int(selection.kept.sum()):,} pages written, {len(selection.reasons):,} copies and benchmark texts set aside"
    )
    return selection


def _pages(path: str, *, needs_url: bool = True) -> Iterator[Page]:
    for where, row in read_rows(path):
        for column in ("text", "url") if needs_url else ("text",):
            if column not in row:
                raise ValueError(f"{where}: no column {column!r}; columns here: {', '.join(map(str, row))}")
        yield Page(str(row.get("url", "")), clean_text(str(row["text"])))
