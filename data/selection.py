"""Rules that keep a problem or set it aside with a reason: exact duplicates, hash splits, caps. Pure; order is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config import SourceConfig
from pipeline.seeds import derive_seed
from pipeline.types import Problem


@dataclass(frozen=True, slots=True)
class SetAside:
    """A problem that left the selection: at which rule, why in words, and what shows it (JSON-able)."""

    problem: Problem
    rule: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sifted:
    """What one rule kept and what it set aside."""

    kept: list[Problem]
    set_aside: list[SetAside]


def drop_empty(problems: Iterable[Problem]) -> Sifted:
    """Rule "empty": a problem without text or without a gold answer cannot be learnt from or judged."""
    kept, aside = [], []
    for problem in problems:
        if problem.problem and problem.answer:
            kept.append(problem)
        else:
            missing = "gold answer is empty" if problem.problem else "problem text is empty"
            aside.append(SetAside(problem, "empty", missing))
    return Sifted(kept, aside)


def drop_exact_duplicates(problems: Iterable[Problem]) -> Sifted:
    """Rule "duplicate": of problems with one normalised text (one id), within and across sources, the first stays."""
    first: dict[str, Problem] = {}
    aside = []
    for problem in problems:
        earlier = first.setdefault(problem.problem_id, problem)
        if earlier is not problem:
            reason = f"same text as {earlier.source} {earlier.meta.get('row', '')}".rstrip()
            if earlier.answer != problem.answer:
                reason += f", whose gold is {earlier.answer!r} instead of {problem.answer!r}"
            aside.append(SetAside(problem, "duplicate", reason, {"duplicate_of": earlier.problem_id}))
    return Sifted(list(first.values()), aside)


def hold_out(problems: Sequence[Problem], share: float, seed: int) -> list[Problem]:
    """The problems with ``split`` set by a hash of the text: about ``share`` of them "heldout", whatever else is there.

    Sources that bring a held-out split of their own are left as they are. Adding or removing problems moves no other
    problem to the other side.
    """
    own = {problem.source for problem in problems if problem.split == "heldout"}
    return [
        replace(p, split="heldout") if p.source not in own and _unit(seed, p.problem_id) < share else p
        for p in problems
    ]


def cap_sources(problems: Sequence[Problem], sources: Iterable[tuple[str, SourceConfig]], seed: int) -> Sifted:
    """Rule "cap": of each source at most ``cap`` training problems, those with the smallest seeded hash."""
    over: set[str] = set()
    caps = {name: config.cap for name, config in sources if config.cap is not None}
    for name, cap in caps.items():
        ids = [p.problem_id for p in problems if p.source == name and p.split == "train"]
        over.update(sorted(ids, key=lambda id_: _unit(seed, "cap", id_))[cap:])
    kept = [p for p in problems if p.problem_id not in over]
    aside = [
        SetAside(p, "cap", f"over the cap of {caps[p.source]} problems of its source")
        for p in problems
        if p.problem_id in over
    ]
    return Sifted(kept, aside)


def _unit(*parts: str | int) -> float:
    """A number in [0, 1) from the parts."""
    return derive_seed(*parts) / 2.0**63
