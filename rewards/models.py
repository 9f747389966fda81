"""Outcome reward models: one score a completion, learnt from verifier-labelled rollouts.

Scores at every step's end are ``rewards.process``'s; how well scores order and predict is ``rewards.measures``'.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config import RewardModelConfig
from pipeline.protocols import Progress
from rewards.fitting import fit
from rewards.measures import measure
from rewards.scalar import Marked, ScalarModel, read_kind, write_kind

__all__ = ["LabelledSequence", "OutcomeRewardModel", "choose_replay", "measure", "train_outcome_model"]

logger = logging.getLogger(__name__)

Row = TypeVar("Row")
"""A labelled completion of either kind of reward model."""


@dataclass(frozen=True, slots=True)
class LabelledSequence:
    """One rollout with its label: 1.0 correct, 0.0 wrong."""

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    label: float
    problem_id: str


class OutcomeRewardModel:
    """A scalar head on a causal language model, read at the last real token of the completion.

    Where that token is follows from the lengths alone, never from a pad or EOS id.
    """

    def __init__(self, model: ScalarModel) -> None:
        self.model = model

    @classmethod
    def load(cls, directory: Path, *, device: str | None = None) -> OutcomeRewardModel:
        """From a folder that ``train_outcome_model`` wrote; ``device`` None is the GPU where there is one."""
        kind = read_kind(directory, "outcome")
        return cls(ScalarModel.load(directory, device=device, dtype=kind.get("dtype", "float32")))

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], progress: Progress | None = None
    ) -> list[float]:
        """One logit a (prompt_token_ids, completion_token_ids), in order, whatever else is in the batch."""
        rows = [_marked(prompt, completion) for prompt, completion in sequences]
        return [scores[0] for scores in self.model.score(rows, progress)]


def train_outcome_model(
    init: Path,
    rows: Sequence[LabelledSequence],
    config: RewardModelConfig,
    *,
    seed: int,
    out: Path,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train a model on ``rows``, from a policy's folder or from an earlier reward model's, and write it into ``out``.

    The same arguments give the same weights on the same machine with the same number of threads. Rows of one label
    only teach nothing: pointwise training then learns that constant, pairwise leaves the model as it is; both warn.
    """
    if not rows:
        raise ValueError(
            f"reward model {out.name}: there is no labelled rollout to train on; raise reward_model.problems or lower "
            f"reward_model.heldout_share"
        )
    started = time.perf_counter()
    positives = sum(row.label > 0.5 for row in rows) / len(rows)
    if positives in (0.0, 1.0):
        logger.warning("reward model %s: all %d labels are %g: nothing can be learnt", out.name, len(rows), positives)
    model = ScalarModel.load(init, train=True, dtype=config.dtype)
    marked = [_marked(r.prompt_token_ids, r.completion_token_ids, r.label, r.problem_id) for r in rows]
    pairwise = config.objective == "pairwise"
    metrics = fit(model, marked, config, seed=seed, pairwise=pairwise, progress=progress)
    model.save(out)
    write_kind(out, "outcome", objective=config.objective, dtype=config.dtype)
    return {
        "rows": len(rows),
        "correct_share": positives,
        **metrics,
        "seconds": time.perf_counter() - started,
    }


def choose_replay(new: Sequence[Any], earlier: Sequence[Row], share: float, seed: int) -> list[Row]:
    """``share`` times as many of the earlier rows as there are new ones (or all of them), drawn without replacement."""
    return random.Random(seed).sample(list(earlier), min(len(earlier), round(share * len(new))))


def _marked(prompt: Sequence[int], completion: Sequence[int], label: float = 0.0, problem_id: str = "") -> Marked:
    token_ids = [*prompt, *completion]
    if not token_ids:
        raise ValueError("reward model: a rollout without prompt and completion tokens has no last token to score")
    return Marked(token_ids, (len(token_ids) - 1,), (label,), problem_id)
