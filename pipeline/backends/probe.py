"""Proof that a policy arrived in the sampler: its logprobs of a few completions against the learner's.

Names and checksums cannot prove it: an engine can hold every new weight and still compute with a packed copy of an old
one. Only a comparison of logprobs shows that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.config import Recipe
from pipeline.protocols import Learner, Sampler, SamplingParams
from pipeline.seeds import derive_seed
from pipeline.types import TrainSequence

logger = logging.getLogger(__name__)

COMPLETIONS = 4
TOKENS = 32
"""Completions of the probe prompt, and tokens of each at most: enough to meet common and rare tokens alike."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two engines' logprobs of the same tokens are apart, in nats, and the token where they are farthest."""

    mean: float
    largest: float
    tokens: int
    sampler: float
    learner: float


def measure_gap(
    sampler: Sampler, learner: Learner, prompt_token_ids: Sequence[int], recipe: Recipe, temperature: float
) -> Gap:
    """|sampler - learner| over completions that the sampler draws at this temperature from the full distribution."""
    params = SamplingParams(max_tokens=min(TOKENS, recipe.sampler.max_tokens), temperature=temperature)
    seeds = [derive_seed(recipe.seed, "probe", index) for index in range(COMPLETIONS)]
    completions = sampler.sample([prompt_token_ids], params, [seeds])[0]
    sequences = [
        TrainSequence(f"probe-{index}", "probe", tuple(prompt_token_ids), tuple(completion.token_ids))
        for index, completion in enumerate(completions)
    ]
    ours = np.concatenate([np.asarray(completion.logprobs, dtype=np.float64) for completion in completions])
    theirs = np.concatenate(learner.logprobs(sequences, temperature)).astype(np.float64)
    difference = np.abs(ours - theirs)
    # A NaN on either side is the farthest of all: argmax returns the first one.
    worst = int(difference.argmax())
    return Gap(
        float(difference.mean()), float(difference[worst]), len(difference), float(ours[worst]), float(theirs[worst])
    )


def check_gap(sampler: Sampler, learner: Learner, prompt_token_ids: Sequence[int], recipe: Recipe) -> Gap:
    """The gap at the recipe's sampling temperature; RuntimeError when it is over ``sampler.sync_tolerance``."""
    gap = measure_gap(sampler, learner, prompt_token_ids, recipe, recipe.sampler.temperature)
    tolerance = recipe.sampler.sync_tolerance
    if not gap.largest <= tolerance:
        raise RuntimeError(
            f"policy {sampler.version.name} did not arrive in the sampler: for one token of the probe prompt the sampler "
            f"says {gap.sampler:.6f} and the learner {gap.learner:.6f} (difference {gap.largest:.3g} nats, mean "
            f"{gap.mean:.3g} over {gap.tokens} tokens; sampler.sync_tolerance is {tolerance:g}); raise the tolerance "
            f"only if the engines compute in bfloat16"
        )
    logger.info(
        "policy %s arrived: sampler and learner differ by %.2g nats at most, %.2g on average (%d tokens)",
        sampler.version.name, gap.largest, gap.mean, gap.tokens,
    )  # fmt: skip
    return gap
