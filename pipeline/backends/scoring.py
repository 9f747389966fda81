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
    for batch_members in micro_batches(sequences, members, budget, layout=layout):
        batch = pack(sequences, batch_members, layout=layout)
        with torch.no_grad():
            logprobs = forward(batch, temperature)[0].float().cpu().numpy()
        ends = np.cumsum(batch.lengths)
        for i, end, length in zip(batch.members, ends, batch.lengths, strict=True):
            out[i] = logprobs[end - length : end]
    return out
