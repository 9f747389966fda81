"""Process reward models: a score at the end of every step, learnt from step labels (estimated or given).

Where steps end and how labels are estimated is ``rewards.steps``; what scores do to advantages is
``pipeline.advantages.process_advantages``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config import RewardModelConfig
from pipeline.protocols import Progress
from rewards.fitting import fit
from rewards.measures import logit, measure
from rewards.scalar import Marked, ScalarModel, read_kind, write_kind
from rewards.steps import SteppedSequence, TokenText, step_ends


class ProcessRewardModel:
    """A scalar head on a causal language model, read at the last token of each step."""

    def __init__(self, model: ScalarModel, delimiter: str) -> None:
        self.model, self.delimiter = model, delimiter
        self._text = TokenText(model.tokenizer)

    @classmethod
    def load(cls, directory: Path, *, device: str | None = None) -> ProcessRewardModel:
        """From a folder that ``train_process_model`` wrote; it splits steps as it was trained to."""
        kind = read_kind(directory, "process")
        model = ScalarModel.load(directory, device=device, dtype=kind.get("dtype", "float32"))
        return cls(model, kind["step_delimiter"])

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], progress: Progress | None = None
    ) -> list[tuple[list[float], list[int]]]:
        """(step rewards, step ends) of each (prompt_token_ids, completion_token_ids), in order.

        A step's reward is the model's probability that the solution is still right at its end; ends are positions in
        the completion.
        """
        ends = [step_ends(self._text.pieces(completion), self.delimiter) for _, completion in sequences]
        rows = [
            Marked([*prompt, *completion], [len(prompt) + end for end in own])
            for (prompt, completion), own in zip(sequences, ends, strict=True)
        ]
        scores = self.model.score(rows, progress)
        return [([_sigmoid(s) for s in given], list(own)) for given, own in zip(scores, ends, strict=True)]


def train_process_model(
    init: Path,
    rows: Sequence[SteppedSequence],
    config: RewardModelConfig,
    *,
    seed: int,
    out: Path,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train by cross-entropy with the labels at all step ends, from a policy's or an earlier model's folder, into ``out``.

    Soft labels are targets as they are. As deterministic as ``train_outcome_model``.
    """
    started = time.perf_counter()
    marked = [_marked(row) for row in rows]
    marked = [row for row in marked if row.positions]
    if not marked:
        raise ValueError(
            f"process reward model {out.name}: there is no labelled step to train on; raise reward_model.problems or "
            f"reward_model.continuations"
        )
    model = ScalarModel.load(init, train=True, dtype=config.dtype)
    metrics = fit(model, marked, config, seed=seed, progress=progress)
    model.save(out)
    write_kind(out, "process", step_delimiter=config.step_delimiter, step_labels=config.step_labels, dtype=config.dtype)
    targets = [target for row in marked for target in row.targets]
    return {
        "rows": len(marked),
        "labelled_steps": len(targets),
        "mean_label": math.fsum(targets) / len(targets),
        **metrics,
        "seconds": time.perf_counter() - started,
    }


def measure_steps(scores: Sequence[Sequence[float]], rows: Sequence[SteppedSequence]) -> dict[str, float | int | None]:
    """``measure`` of step rewards (probabilities) against labels over 0.5, all steps but the last of each completion.

    The last step's label is the outcome itself, which needs no estimate; its measures come as ``outcome/…``.
    """
    inner = [
        (score, label, row.problem_id)
        for given, row in zip(scores, rows, strict=True)
        for score, label in list(zip(given, row.labels, strict=True))[:-1]
        if label is not None
    ]
    last = [(g[-1], r.labels[-1], r.problem_id) for g, r in zip(scores, rows, strict=True) if r.labels[-1] is not None]
    found = measure([logit(s) for s, _, _ in inner], [float(x > 0.5) for _, x, _ in inner], [p for _, _, p in inner])
    outcome = measure([logit(s) for s, _, _ in last], [x or 0.0 for _, x, _ in last], [p for _, _, p in last])
    return {**found, **{f"outcome/{name}": value for name, value in outcome.items()}}


def _marked(row: SteppedSequence) -> Marked:
    if not len(row.step_ends) == len(row.labels):
        raise ValueError(
            f"process reward model: {len(row.labels)} labels for {len(row.step_ends)} steps of a rollout of problem "
            f"{row.problem_id}: expected one a step"
        )
    known = [(end, label) for end, label in zip(row.step_ends, row.labels, strict=True) if label is not None]
    if any(not 0.0 <= label <= 1.0 or not 0 <= end < len(row.completion_token_ids) for end, label in known):
        raise ValueError(
            f"process reward model: steps {list(row.step_ends)} with labels {list(row.labels)} of a rollout of problem "
            f"{row.problem_id}: expected positions in its {len(row.completion_token_ids)} tokens and labels in [0, 1]"
        )
    token_ids = [*row.prompt_token_ids, *row.completion_token_ids]
    return Marked(
        token_ids, [len(row.prompt_token_ids) + end for end, _ in known], [label for _, label in known], row.problem_id
    )


def _sigmoid(score: float) -> float:
    return 0.5 * (1.0 + math.tanh(0.5 * score))
