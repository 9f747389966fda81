"""The report: one HTML file that opens offline with its pictures inside, and a short Markdown version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.claims import claims
from eval.doubts import doubts
from eval.gather import gather
from eval.moved import visible
from eval.sections import checkpoint_table, own_sentences, page, totals
from pipeline.rundir import RunPaths, write_atomic

TEMPLATES = Path(__file__).parent / "templates"


def build_report(runs: Sequence[RunPaths], out: Path) -> Path:
    """Write the report of one run, or of several side by side, and return its file.

    The same runs give the same file byte for byte. ValueError names a run whose recipe cannot be read.
    """
    facts = [gather(paths) for paths in runs]
    if not facts:
        raise ValueError("a report needs at least one run; name one that `grpoflow status` lists")
    html = environment().get_template("report.html.j2").render(page(facts))
    write_atomic(out, html)
    return out


def build_markdown(paths: RunPaths) -> str:
    """The short report of a run: what it was, its checkpoints with intervals, what changed, what to doubt."""
    run = gather(paths)
    return environment(autoescape=False).get_template("report.md.j2").render(
        run=run, tables=[checkpoint_table([run], benchmark) for benchmark in run.benchmarks],
        claims=claims([run]), sentences=own_sentences(run), doubts=doubts(run), totals=totals(run),
    )  # fmt: skip


def environment(*, autoescape: bool = True) -> Environment:
    """Templates with the filters they use; whatever a completion contains is escaped."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=autoescape, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters.update(
        number=number, measure=measure, svg=Markup, visible=visible, duration=duration, cell=markdown_cell
    )
    return found


def number(value: Any, digits: int = 3) -> str:
    """A figure for a table: thousands separated, floats to ``digits`` significant digits, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    return str(value)


def measure(row: dict[str, Any] | None, percent: bool = True) -> str:
    """ "62.5 [55.0, 69.9]": the value with its interval, in per cent for shares."""
    if row is None or row["value"] is None:
        return "–"
    scale, digits = (100, 1) if percent else (1, 2 if abs(row["value"]) < 10 else 1)
    value, low, high = (f"{scale * row[part]:.{digits}f}" for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def duration(seconds: float) -> str:
    """ "2 h 05 min", "3 min 20 s", "4.2 s"."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s" if seconds >= 60 else f"{seconds:.1f} s"


def markdown_cell(text: Any) -> str:
    """Text that stays inside one cell of a Markdown table and starts no markup."""
    flat = " ".join(str(text).split())
    for mark in "\\`*_[]<>|#":
        flat = flat.replace(mark, "\\" + mark)
    return flat
