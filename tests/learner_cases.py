"""A tiny policy and random ragged rollouts for the learner's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pipeline.config import Recipe, load_recipe
from pipeline.models import build_embedded
from pipeline.types import TrainSequence

SHAPE = [
    "model.embedded.layers=2", "model.embedded.width=32", "model.embedded.heads=4", "model.embedded.kv_heads=2",
    "model.embedded.intermediate=48", "model.embedded.vocabulary=300", "runtime.threads=1", "runtime.device=cpu",
]  # fmt: skip


def tiny_learner_recipe(*overrides: str) -> Recipe:
    """The embedded recipe with a policy of some 20 k parameters."""
    return load_recipe("embedded", [*SHAPE, *overrides])


def tiny_policy(folder: Path, recipe: Recipe, seed: int = 0) -> Path:
    """A folder with the recipe's policy and tokenizer."""
    return build_embedded(recipe.model.embedded, ["345 + 278 = 623. The sum is 623."] * 20, seed, folder)


def rollouts(groups: int = 3, size: int = 4, *, seed: int = 0, longest: int = 9) -> list[TrainSequence]:
    """Groups of ragged completions with every array filled in at random; prompts differ in length between groups."""
    rng = np.random.default_rng(seed)
    sequences = []
    for group in range(groups):
        prompt = tuple(rng.integers(5, 260, 3 + 2 * group).tolist())
        for member in range(size):
            length = int(rng.integers(1, longest + 1))
            old = rng.uniform(-6.5, -4.5, length).astype(np.float32)
            sequences.append(
                TrainSequence(
                    sequence_id=f"{group}-{member}",
                    group_id=f"group-{group}",
                    prompt_token_ids=prompt,
                    completion_token_ids=tuple(rng.integers(5, 260, length).tolist()),
                    advantages=np.full(length, rng.normal(), dtype=np.float32),
                    sampling_logprobs=old + rng.normal(0, 0.05, length).astype(np.float32),
                    old_logprobs=old,
                    ref_logprobs=old + rng.normal(0, 0.3, length).astype(np.float32),
                    truncated=member == size - 1,
                )
            )
    return sequences


def plain_logprobs(model: torch.nn.Module, sequence: TrainSequence, temperature: float) -> torch.Tensor:
    """[T] the straightforward way: one sequence alone through the whole model, log-softmax of all logits."""
    ids = torch.tensor([[*sequence.prompt_token_ids, *sequence.completion_token_ids]])
    logits = model(input_ids=ids).logits[0] / temperature
    start = len(sequence.prompt_token_ids)
    picked = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])
    return picked[:, 0]
