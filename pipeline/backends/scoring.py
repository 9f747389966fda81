"""Logprobs of recorded completions under a policy, without gradient: what old and reference logprobs come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.backends.objective_step import Forward
from pipeline.batching import Layout, micro_batches, pack
from pipeline.types import TrainSequence


def score(
    forward: Forward, sequences: Sequence[TrainSequence], temperature: float, *, layout: Layout, budget: int
) -> list[np.ndarray]:
    """float32 [T] a sequence, in the order given; an empty completion has an empty array."""
    out = [np.zeros(len(s.completion_token_ids), dtype=np.float32) for s in sequences]
    members = [i for i, s in enumerate(sequences) if len(s.completion_token_ids)]
    batches = micro_batches(sequences, members, budget, layout=layout)
    scored = score_batches(forward, [[sequences[i] for i in batch] for batch in batches], temperature, layout=layout)
    for i, logprobs in zip((i for batch in batches for i in batch), scored, strict=True):
        out[i] = logprobs
    return out


def score_batches(
    forward: Forward, batches: Sequence[Sequence[TrainSequence]], temperature: float, *, layout: Layout
) -> list[np.ndarray]:
    """float32 [T] for each sequence of each micro-batch, in that order."""
    out: list[np.ndarray] = []
    for sequences in batches:
        batch = pack(sequences, range(len(sequences)), layout=layout)
        with torch.no_grad():
            logprobs = forward(batch, temperature)[0].float().cpu().numpy()
        out += np.split(logprobs, np.cumsum(batch.lengths)[:-1])
    return out
