"""The problems whose pass rate moved most between two evaluations, with a completion from before and after."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from eval.compare import problem_accuracies
from eval.gather import Evaluation, RunFacts

SHOWN = 4000
"""Characters of a completion that the report shows; the store has the rest."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One problem: pass rates of 0 to 1, and a completion of each side as ``completions`` gives it."""

    problem: dict[str, Any]
    before: float
    after: float
    completion_before: dict[str, Any]
    completion_after: dict[str, Any]

    @property
    def change(self) -> float:
        return self.after - self.before


def most_moved(run: RunFacts, before: Evaluation, after: Evaluation, count: int = 4) -> tuple[list[Moved], list[Moved]]:
    """(risen, fallen): up to ``count`` problems each, the largest change first; ties by problem id."""
    rates = [problem_accuracies(run.samples(e)).get("pass@1", {}) for e in (before, after)]
    changes = {p: rates[1][p] - rates[0][p] for p in rates[0].keys() & rates[1].keys() if p in run.problems}
    ordered = sorted(changes, key=lambda p: (-abs(changes[p]), p))
    sides = []
    for direction in (1, -1):
        chosen = [p for p in ordered if changes[p] * direction > 0][:count]
        sides.append([_moved(run, before, after, p, rates[0][p], rates[1][p]) for p in chosen])
    return sides[0], sides[1]


def visible(text: str) -> str:
    """The text with characters that a page cannot hold, or that reorder it, written as ‹U+202E›; cut at ``SHOWN``."""
    shown = "".join(c if c in "\n\t" or not _unprintable(c) else f"‹U+{ord(c):04X}›" for c in text[:SHOWN])
    return shown + (f" … {len(text) - SHOWN:,} more characters" if len(text) > SHOWN else "")


def _moved(run: RunFacts, before: Evaluation, after: Evaluation, problem_id: str, old: float, new: float) -> Moved:
    risen = new > old
    # The telling pair: wrong before and right after where it rose, the other way round where it fell.
    first = _choose(run.completions(before, problem_id), correct=not risen)
    second = _choose(run.completions(after, problem_id), correct=risen)
    return Moved(run.problems[problem_id], old, new, first, second)


def _choose(rows: list[dict[str, Any]], *, correct: bool) -> dict[str, Any]:
    scored = [row for row in rows if row["correct"] is not None]
    return next((row for row in scored if row["correct"] == correct), scored[0])


def _unprintable(character: str) -> bool:
    # Cc control, Cf format (direction overrides, joiners), Cs surrogate, Co private, Zl and Zp separators.
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
