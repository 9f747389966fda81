"""Rules that keep a problem or set it aside with a reason: copies of benchmarks, duplicates, caps; splits by hash. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from data.alignment import is_number
from data.decontaminate import Decontaminator, Hit, Reference
from data.near_duplicates import ERROR, jaccard, shingles, signatures, similar_pairs
from data.words import in_batches, split_words
from pipeline.config import SourceConfig
from pipeline.config.data import DecontaminateConfig
from pipeline.seeds import derive_seed
from pipeline.types import Problem

SHINGLE = 3
"""Words of the n-grams that near-duplicates share."""


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
    """Rule "empty": a problem without text, or with neither gold answer nor unit tests, cannot be learnt from or judged."""
    kept, aside = [], []
    for problem in problems:
        if problem.problem and (problem.answer or "tests" in problem.meta):
            kept.append(problem)
        else:
            missing = "gold answer is empty" if problem.problem else "problem text is empty"
            aside.append(SetAside(problem, "empty", missing))
    return Sifted(kept, aside)


def drop_exact_duplicates(problems: Iterable[Problem]) -> Sifted:
    """Rule "duplicate": of problems with one normalised text (one id), within and across sources, the first stays.

    A held-out problem that stands in two benchmarks counts in both: ``meta["also_in"]`` of the one that stays names the
    other.
    """
    first: dict[str, Problem] = {}
    also_in: dict[str, list[str]] = {}
    aside = []
    for problem in problems:
        earlier = first.setdefault(problem.problem_id, problem)
        if earlier is problem:
            continue
        reason = f"same text as {earlier.source} {earlier.meta.get('row', '')}".rstrip()
        if earlier.answer != problem.answer:
            reason += f", whose gold is {earlier.answer!r} instead of {problem.answer!r}"
        elif problem.split == earlier.split == "heldout" and problem.source != earlier.source:
            also_in.setdefault(problem.problem_id, []).append(problem.source)
            reason += "; it counts in both benchmarks"
        aside.append(SetAside(problem, "duplicate", reason, {"duplicate_of": earlier.problem_id}))
    for id_, sources in also_in.items():
        first[id_] = replace(first[id_], meta={**first[id_].meta, "also_in": sorted(set(sources))})
    return Sifted(list(first.values()), aside)


def drop_contaminated(problems: Sequence[Problem], config: DecontaminateConfig, *, own_split: bool = False) -> Sifted:
    """Rule "decontaminate": a training problem (with its solution) that repeats a held-out one leaves.

    ``own_split``: the held-out problems are the sources' own. Then short ones, which are looked for whole, say nothing:
    "What is 2 + 2?" stands in "What is 2 + 2 + 5?", and in such sets in hundreds of others. Exact copies leave anyway.
    """
    references = [
        Reference(p.source, p.meta.get("row", p.problem_id), part, text)
        for p in problems
        if p.split == "heldout"
        for part, text in (("problem", p.problem), ("solution", p.solution))
        if text
    ]
    if own_split and references:
        documents = split_words([reference.text for reference in references]).documents
        lengths = np.bincount(documents, minlength=len(references)).tolist()
        references = [r for r, length in zip(references, lengths, strict=True) if length >= config.whole_below]
    if config.rule == "off" or not references:
        return Sifted(list(problems), [])
    train = (p for p in problems if p.split == "train")
    hits = Decontaminator(references, config).scan(f"{p.problem}\n\n{p.solution or ''}" for p in train)
    kept, aside = [], []
    for problem in problems:
        hit = next(hits) if problem.split == "train" else None
        if hit is None:
            kept.append(problem)
        else:
            aside.append(SetAside(problem, "decontaminate", *describe_hit(hit, config.rule)))
    return Sifted(kept, aside)


def describe_hit(hit: Hit, rule: str) -> tuple[str, dict[str, Any]]:
    """(reason in words, evidence) of a repeated benchmark text."""
    found = hit.reference
    reason = f"{rule}: repeats {hit.share:.0%} of the {found.part} of {found.benchmark} {found.row}"
    return reason, {
        "benchmark": found.benchmark,
        "row": found.row,
        "part": found.part,
        "share": round(hit.share, 4),
        "passage": hit.passage,
    }


def drop_near_duplicates(problems: Sequence[Problem], threshold: float | None) -> Sifted:
    """Rule "near_duplicate": a training problem as similar as ``threshold`` to an earlier one, with the same numbers.

    Similarity is the Jaccard index of word 3-grams. Held-out problems count as earlier than all others and always stay.
    """
    if threshold is None:
        return Sifted(list(problems), [])
    ordered = sorted(problems, key=lambda problem: problem.split != "heldout")
    texts = [problem.problem for problem in ordered]
    pairs = similar_pairs(signatures(texts, SHINGLE), threshold, threshold - 3 * ERROR)
    # Numbers come before the exact index: of problems made from templates nearly all pairs differ in their numbers alone.
    paired = sorted({index for pair in pairs for index in pair})
    numbers = dict(zip(paired, _numbers(texts[index] for index in paired), strict=True))
    gone: dict[int, tuple[int, float]] = {}
    for earlier, later in pairs:
        if ordered[later].split == "heldout" or later in gone or earlier in gone or numbers[earlier] != numbers[later]:
            continue
        similarity = jaccard(*shingles([texts[earlier], texts[later]], SHINGLE))
        if similarity >= threshold:
            gone[later] = earlier, similarity
    aside = []
    for later, (earlier, similarity) in sorted(gone.items()):
        other = ordered[earlier]
        reason = (
            f"{similarity:.0%} of its word 3-grams are those of {other.source} {other.meta.get('row', '')}".rstrip()
        )
        evidence = {"duplicate_of": other.problem_id, "similarity": round(similarity, 4), "text": other.problem[:400]}
        aside.append(SetAside(ordered[later], "near_duplicate", reason, evidence))
    left = {item.problem.problem_id for item in aside}
    return Sifted([problem for problem in problems if problem.problem_id not in left], aside)


def _numbers(texts: Iterable[str]) -> Iterator[bytes]:
    """Of each text the hashes of its numbers in their order, as bytes, reading a few texts ahead."""
    for some in in_batches(texts):
        words = split_words(some)
        _, first, distinct = np.unique(words.hashes, return_index=True, return_inverse=True)
        spans = zip(words.documents[first], words.starts[first], words.ends[first], strict=True)
        stated = np.array([is_number(words.texts[d][start:end].lower()) for d, start, end in spans], bool)[distinct]
        hashes = words.hashes[stated]
        bounds = np.searchsorted(words.documents[stated], np.arange(len(some) + 1))
        for start, end in pairwise(bounds):
            yield hashes[start:end].tobytes()


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
