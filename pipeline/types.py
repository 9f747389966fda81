"""The nouns of the recipe, as frozen dataclasses, and the glossary of shape letters.

Shape letters, used in every docstring and ``# [B, T]`` comment:
P problems, G completions in a group, B sequences, T tokens, V vocabulary.

The four logprobs (natural log, nats; always of the distribution at the sampling temperature):
``sampling_logprobs`` as drawn by the sampler, ``old_logprobs`` by the learner before the first update of a step,
``logprobs`` by the policy being updated, ``ref_logprobs`` by the reference policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length"]
Purpose = Literal["train", "evaluate", "reward_model", "reject", "probe", "process"]
Status = Literal["correct", "incorrect", "no_answer", "timeout", "error", "gold_unparsable"]
UNSCORED: frozenset[str] = frozenset({"timeout", "error", "gold_unparsable"})
"""Statuses that say nothing about the completion: reward None, outside every statistic, never reward 0."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its gold answer; ``problem_id`` is a hash of the normalised text, the same in every run.

    ``prompt`` and ``prompt_token_ids`` are exactly what the model sees (chat template applied, one BOS at most); they
    are empty until the selection stage has rendered them. ``meta`` holds what a scorer needs beyond the answer
    (unit tests of a code problem, a reasoning-gym entry), as JSON-able values.
    """

    problem_id: str
    problem: str
    answer: str
    solution: str | None = None
    level: int | None = None
    subject: str | None = None
    source: str = ""
    split: Literal["train", "heldout"] = "train"
    prompt: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler returns for one seed: ids with one logprob each, and why it ended.

    ``token_ids`` includes the EOS id (or the tokens of the stop string) when ``finish_reason`` is "stop": ending is an
    action that the policy took and is trained on. ``logprobs`` are of the distribution that was sampled.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One recorded completion: a row of the ``rollouts`` table, with everything needed to train on it again."""

    rollout_id: str
    run_id: str
    stage: str
    purpose: Purpose
    round: int | None
    step: int | None
    group_id: str
    problem_id: str
    sample_index: int
    seed: int
    policy_version: str
    policy_checksum: str
    engine: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    sampling_logprobs: Sequence[float]
    finish_reason: FinishReason
    text: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Reward:
    """The verdict on one rollout: a row of the ``rewards`` table.

    ``components`` are the unweighted values of the rewards named in the recipe, ``reward`` their weighted sum; None
    means unscored (a scorer failed), which is never the same as 0.
    """

    rollout_id: str
    reward: float | None
    correct: bool | None
    status: Status
    answer: str | None
    components: Mapping[str, float | None]
    step_rewards: Sequence[float] | None = None
    step_ends: Sequence[int] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The G completions of one problem in one step, with their rewards, in sample_index order."""

    group_id: str
    problem_id: str
    rollouts: Sequence[Rollout]
    rewards: Sequence[Reward]


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """What the learner needs of one rollout (or one SFT pair). Arrays are float32 [T], T completion tokens.

    ``advantages`` is None for SFT. ``truncated`` is True when the completion ended by length.
    """

    sequence_id: str
    group_id: str
    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    advantages: np.ndarray | None = None
    sampling_logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a finished stage left behind: ``stages/<key>/result.json``, written last.

    ``outputs`` maps a name to a path relative to the run directory; ``metrics`` holds finite numbers and short text.
    """

    key: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    started_at: str = ""
    finished_at: str = ""
