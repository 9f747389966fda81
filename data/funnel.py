"""The rules in their order: how many problems came in, how many left at each rule and why. No file is written here."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data.prompts import render
from data.selection import (
    SetAside,
    Sifted,
    cap_sources,
    drop_contaminated,
    drop_empty,
    drop_exact_duplicates,
    drop_near_duplicates,
    hold_out,
)
from data.sources import load_source
from pipeline.config import DataConfig, SourceConfig
from pipeline.types import Problem

logger = logging.getLogger(__name__)

AcceptGold = Callable[[Sequence[Problem]], "list[str | None]"]
"""For each problem None when the verifier judges its gold correct against itself, else the reason why not."""
Rule = tuple[str, Callable[[list[Problem]], Sifted]]


@dataclass(frozen=True, slots=True)
class Selection:
    """Everything that was decided: the rendered problems (both splits), the rows set aside, the counts of each rule."""

    problems: list[Problem]
    set_aside: list[SetAside]
    funnel: list[dict[str, Any]]


def select_problems(config: DataConfig, seed: int, tokenizer: Any, accept_gold: AcceptGold) -> Selection:
    """The problems of a recipe after every rule. Raises ValueError with one line when nothing usable is left."""
    problems = load_all(config, seed)
    funnel = [_count("read", problems, [])]
    aside: list[SetAside] = []
    for rule, sift in rules(config, seed, tokenizer, accept_gold):
        sifted = sift(problems)
        logger.info("select: rule %s keeps %d of %d problems", rule, len(sifted.kept), len(problems))
        problems = sifted.kept
        aside += sifted.set_aside
        funnel.append(_count(rule, problems, sifted.set_aside))
    _refuse_empty(problems, funnel, config)
    return Selection(problems, aside, funnel)


def load_all(config: DataConfig, seed: int) -> list[Problem]:
    """Benchmarks (split "heldout") first, then the sources, with their splits."""
    benchmarks: list[Problem] = []
    for benchmark in config.benchmarks:
        benchmarks += [replace(p, split="heldout") for p in load_source(benchmark, config, seed)]
    problems: list[Problem] = []
    for source in config.sources:
        loaded = load_source(source, config, seed)
        _refuse_benchmark_as_source(source, loaded, benchmarks)
        problems += loaded
    _refuse_clashing_ids([*benchmarks, *problems])
    if config.benchmarks:
        return [*benchmarks, *(problem for problem in problems if problem.split == "train")]
    return hold_out(problems, config.heldout_share, seed)


def rules(config: DataConfig, seed: int, tokenizer: Any, accept_gold: AcceptGold) -> list[Rule]:
    """(name, rule) in the order of work: cheap rules first, the verifier late, caps on what is left."""

    def decontaminate(problems: list[Problem]) -> Sifted:
        return drop_contaminated(problems, config.decontaminate, own_split=not config.benchmarks)

    return [
        ("empty", lambda problems: _refuse_many(drop_empty(problems), config)),
        ("decontaminate", decontaminate),
        ("duplicate", drop_exact_duplicates),
        ("near_duplicate", lambda problems: drop_near_duplicates(problems, config.near_duplicates)),
        ("prompt", lambda problems: _render(problems, tokenizer, config)),
        ("gold", lambda problems: _check_golds(problems, accept_gold, config)),
        ("cap", lambda problems: cap_sources(problems, config.named_sources(), seed)),
    ]


def _render(problems: list[Problem], tokenizer: Any, config: DataConfig) -> Sifted:
    """Rule "prompt": a prompt over ``max_prompt_tokens`` is set aside, never cut."""
    kept, aside = [], []
    for problem in render(problems, tokenizer, config):
        tokens = len(problem.prompt_token_ids)
        if 0 < tokens <= config.max_prompt_tokens:
            kept.append(problem)
        else:
            size = f"{tokens} tokens" if tokens else f"{len(problem.problem)} characters"
            reason = f"prompt of {size} is over data.max_prompt_tokens = {config.max_prompt_tokens}"
            aside.append(SetAside(problem, "prompt", reason, {"prompt_tokens": tokens or None}))
    return Sifted(kept, aside)


def _check_golds(problems: list[Problem], accept_gold: AcceptGold, config: DataConfig) -> Sifted:
    """Rule "gold": the verifier must judge the gold correct against itself; too many that fail stop the run."""
    reasons = accept_gold(problems)
    kept = [p for p, reason in zip(problems, reasons, strict=True) if reason is None]
    aside = [SetAside(p, "gold", reason) for p, reason in zip(problems, reasons, strict=True) if reason is not None]
    return _refuse_many(Sifted(kept, aside), config)


def _refuse_many(sifted: Sifted, config: DataConfig) -> Sifted:
    """What came in; ValueError when more of a source than ``max_gold_rejects`` has an unusable text or gold."""
    left, stayed = (Counter(p.source for p in side) for side in ([a.problem for a in sifted.set_aside], sifted.kept))
    for source, count in left.items():
        total = count + stayed[source]
        if count > config.max_gold_rejects * total:
            example = next(item for item in sifted.set_aside if item.problem.source == source)
            shown = f"{example.problem.problem[:60]!r} with gold {example.problem.answer[:60]!r}"
            raise ValueError(
                f"source {source!r}: {count} of {total} problems cannot be used, more than data.max_gold_rejects = "
                f"{config.max_gold_rejects}; for example {shown}: {example.reason}. Check the columns that the recipe maps, "
                f"or raise data.max_gold_rejects"
            )
    return sifted


def _count(rule: str, kept: Sequence[Problem], aside: Sequence[SetAside]) -> dict[str, Any]:
    """One row of the funnel; ``reasons`` by source, without their evidence."""
    return {
        "rule": rule,
        "came_in": len(kept) + len(aside),
        "set_aside": len(aside),
        "kept": len(kept),
        "set_aside_by_source": dict(sorted(Counter(item.problem.source for item in aside).items())),
        "kept_by_source": dict(sorted(Counter(problem.source for problem in kept).items())),
    }


def _refuse_empty(problems: Sequence[Problem], funnel: Sequence[dict[str, Any]], config: DataConfig) -> None:
    story = ", ".join(f"{row['rule']} took {row['set_aside']}" for row in funnel[1:] if row["set_aside"])
    for split in ("train", "heldout"):
        if not any(problem.split == split for problem in problems):
            way_out = (
                "name a data.benchmarks set or raise data.heldout_share" if split == "heldout" else "loosen that rule"
            )
            raise ValueError(
                f"no {split} problem is left of the {funnel[0]['came_in']} that were read ({story or 'no rule took any'}): "
                f"{way_out}"
            )


def _refuse_clashing_ids(problems: Sequence[Problem]) -> None:
    """Ids that the recipe maps name one problem each, over all sets."""
    seen: dict[str, Problem] = {}
    for problem in problems:
        if "id" not in problem.meta:
            continue
        other = seen.setdefault(problem.meta["id"], problem)
        if other.problem_id != problem.problem_id:
            raise ValueError(
                f"id {problem.meta['id']!r} names two problems, at {other.source} {other.meta.get('row')} and at "
                f"{problem.source} {problem.meta.get('row')}: make the ids unique over the sets, or map no id column"
            )


def _refuse_benchmark_as_source(source: SourceConfig, loaded: Sequence[Problem], benchmarks: Sequence[Problem]) -> None:
    ids = {problem.problem_id for problem in loaded if problem.split == "train"}
    for name in dict.fromkeys(problem.source for problem in benchmarks):
        wanted = {problem.problem_id for problem in benchmarks if problem.source == name}
        shared = len(wanted & ids)
        if shared > 0.5 * len(wanted):
            raise ValueError(
                f"benchmark {name!r} is also the training set {source.label!r}: {shared} of its {len(wanted)} problems are "
                f"in it; train on another set or split, or evaluate on another benchmark"
            )
