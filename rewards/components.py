"""The built-in components by name: each a function of one rollout, its problem and its verdict."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.config import RewardConfig
from pipeline.types import UNSCORED, Problem, Rollout
from rewards import functions
from rewards.code import code_score, extract_program

if TYPE_CHECKING:
    from rewards.code import CodeVerdict
    from rewards.verifier import Verdict

AnswerFormat = Literal["boxed", "tags"]


@dataclass(frozen=True, slots=True)
class Item:
    """One rollout with its problem and verdict: what a component is a function of.

    ``code`` is None for a problem without unit tests; with them, ``verdict`` says whether all passed.
    """

    problem: Problem
    rollout: Rollout
    verdict: Verdict
    code: CodeVerdict | None = None

    @property
    def correct(self) -> bool | None:
        return None if self.verdict.status in UNSCORED else self.verdict.status == "correct"


def _verifier(item: Item, config: RewardConfig, answer_format: AnswerFormat) -> float | None:
    return None if item.correct is None else float(item.correct)


def _code(item: Item, config: RewardConfig, answer_format: AnswerFormat) -> float | None:
    return None if item.correct is None or item.code is None else code_score(item.code, config.code_score)


def _format(item: Item, config: RewardConfig, answer_format: AnswerFormat) -> float:
    if item.code is not None:
        return float(extract_program(item.rollout.text, item.rollout.finish_reason) is not None)
    opened = item.problem.prompt.rstrip().endswith("<think>")
    return functions.format_reward(
        item.rollout.text, answer_format, finish_reason=item.rollout.finish_reason, opened=opened
    )


def _length(item: Item, config: RewardConfig, answer_format: AnswerFormat) -> float | None:
    if item.correct is None:
        return None
    ends = config.length_correct if item.correct else config.length_wrong
    tokens = len(item.rollout.completion_token_ids)
    return functions.length_reward(tokens, item.rollout.max_tokens, ends, config.length_shape)


def _overlong(item: Item, config: RewardConfig, answer_format: AnswerFormat) -> float:
    tokens = len(item.rollout.completion_token_ids)
    return functions.overlong_penalty(tokens, item.rollout.max_tokens, config.overlong_share)


def _repetition(item: Item, config: RewardConfig, answer_format: AnswerFormat) -> float:
    return functions.repetition_penalty(item.rollout.completion_token_ids, config.repetition_ngram)


def _language(item: Item, config: RewardConfig, answer_format: AnswerFormat) -> float:
    return functions.language_consistency(item.rollout.text, config.language, item.problem.problem)


PURE: dict[str, Callable[[Item, RewardConfig, AnswerFormat], float | None]] = {
    "verifier": _verifier,
    "format": _format,
    "length": _length,
    "overlong": _overlong,
    "repetition": _repetition,
    "language": _language,
    "code": _code,
}
LEARNT = ("reward_model", "process_model")
"""Components that a model of this run gives; the others are functions of a completion alone."""
BUILT_IN = (*PURE, *LEARNT)


def check_names(config: RewardConfig) -> None:
    """ValueError when a weight names a component that does not exist, with the nearest one that does."""
    if not config.weights:
        raise ValueError("rewards.weights is empty: name at least one component, for example verifier = 1.0")
    for name, target in config.functions.items():
        if name in BUILT_IN:
            raise ValueError(f"rewards.functions.{name}: that is the name of a built-in component; choose another")
        module, separator, attribute = target.partition(":")
        if not (module and separator and attribute):
            raise ValueError(f'rewards.functions.{name} is {target!r}: expected "module:function"')
    known = [*BUILT_IN, *config.functions]
    for name in config.weights:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                f"rewards.weights.{name} is no component{hint}; known: {', '.join(known)}, or name a function of yours "
                f"in rewards.functions"
            )
