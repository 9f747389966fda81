"""Benchmarks by name, how they are put, and the rule that what is trained on is not what is measured."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.config import EvaluateConfig, Recipe, SourceConfig
from pipeline.types import Problem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A held-out problem set: where it is read from, and how many problems its authors published."""

    source: SourceConfig
    problems: int | None
    about: str


BENCHMARKS = {
    "embedded": Benchmark(SourceConfig(name="embedded"), None, "the generator's held-out word problems"),
    "gsm8k": Benchmark(SourceConfig(name="gsm8k", split="test"), 1319, "grade-school word problems, arXiv 2110.14168"),
    "math": Benchmark(SourceConfig(name="math", split="test"), 5000, "competition problems, arXiv 2103.03874"),
    "math500": Benchmark(SourceConfig(name="math500", split="test"), 500, "500 of MATH's test, arXiv 2305.20050"),
    "svamp": Benchmark(SourceConfig(name="svamp", split="test"), 300, "varied one-step problems, arXiv 2103.07191"),
    "mgsm": Benchmark(
        SourceConfig(name="mgsm", split="test"), 250, "GSM8K in eleven languages, mgsm/de and so on, arXiv 2210.03057"
    ),
}


def find_benchmark(name: str, recipe: Recipe | None = None, path: str | None = None) -> SourceConfig:
    """The source of a benchmark: one of ``BENCHMARKS``, ``mgsm/<language>``, or any problem set of the recipe by label.

    The recipe's own sets go first, since they say where a local copy is; ``path`` names another copy. How many problems
    are put is ``evaluate.problems``, drawn by seed: the first ones of MATH are all algebra. ValueError with the nearest
    names when there is none.
    """
    found = {name: benchmark.source for name, benchmark in BENCHMARKS.items()}
    if name.startswith("mgsm/"):
        found[name] = found["mgsm"].model_copy(update={"config": name.partition("/")[2]})
    if recipe is not None:
        found |= {source.label: source for source in (*recipe.data.sources, *recipe.data.benchmarks)}
    if name not in found:
        close = difflib.get_close_matches(name, found, n=2) or list(found)
        raise ValueError(f"benchmark {name!r} is unknown; expected {', '.join(close)}, or a problem set of the recipe")
    source = found[name].model_copy(update={"limit": None, "cap": None})
    return source.model_copy(update={"path": path}) if path else source


def heldout_problems(problems: Iterable[Problem], benchmark: str | None = None) -> list[Problem]:
    """The problems that may be evaluated on: split "heldout", of one benchmark's label where it is named."""
    return [p for p in problems if p.split == "heldout" and benchmark in (None, p.source, *p.meta.get("also_in", ()))]


def enforce_heldout(
    name: str, problems: Sequence[Problem], trained_on: Iterable[str], config: EvaluateConfig
) -> list[str]:
    """Ids of evaluation problems that stand in the training set too, logged.

    ``trained_on`` are problem ids, which are hashes of the normalised text. ValueError when there are any and
    ``evaluate.allow_overlap`` is off: an accuracy on training problems says nothing about others.
    """
    known = set(trained_on)
    shared = [problem for problem in problems if problem.problem_id in known]
    if shared and not config.allow_overlap:
        raise ValueError(
            f"benchmark {name!r}: {len(shared)} of its {len(problems)} problems stand in the training set, for example "
            f"{shared[0].problem[:60]!r}; take them out of training, or set evaluate.allow_overlap=true to measure anyway"
        )
    if shared:
        logger.warning("benchmark %s: %d of %d problems stand in the training set", name, len(shared), len(problems))
    return [problem.problem_id for problem in shared]


def how_put(
    *, problems: int, samples: int, temperature: float, top_p: float, max_tokens: int, greedy: bool, engine: str
) -> str:
    """How a benchmark is put to a policy, in one sentence: what a figure means depends on it.

    Example: "200 problems, 8 samples each at temperature 1, top_p 1, at most 128 tokens, and greedy; engine vllm".
    """
    return (
        f"{problems:,} problems, {samples} samples each at temperature {temperature:g}, top_p {top_p:g}, at most "
        f"{max_tokens:,} tokens{', and greedy' if greedy else ''}; engine {engine}"
    )
