"""How one token is drawn: temperature, min-p, top-k, top-p, and a counter-based random stream a completion.

The order is min-p, top-k, top-p (vLLM's), each over what the one before left; ties at a threshold stay. The returned
logprobs are those of the distribution that was sampled, renormalised over what was left. Temperature 0 is greedy: the
likeliest token, and the logprob of the distribution at temperature 1 (greedy's own would always be 0); top-p, top-k
and min-p then change nothing and are not applied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from pipeline.protocols import SamplingParams

_BLOCK = 128
_BLOCK_SIZE = 512
"""Tokens of a vocabulary among which one is searched at once."""


class UniformStream:
    """Uniforms in [0, 1) that depend on (seed, position) alone: numpy's Philox, drawn a block at a time."""

    __slots__ = ("_block", "_generator")

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self._block = np.empty(0)

    def draw(self, position: int) -> float:
        """The uniform of this position; positions are asked for in order, from 0."""
        offset = position % _BLOCK
        if offset == 0:
            self._block = self._generator.random(_BLOCK)
        return self._block[offset]


def draw_uniforms(streams: Sequence[UniformStream], positions: np.ndarray) -> np.ndarray:
    """float64 [n]: each row's uniform at its own position."""
    pairs = zip(streams, positions.tolist(), strict=True)
    return np.fromiter((stream.draw(position) for stream, position in pairs), dtype=np.float64, count=len(streams))


def pick_tokens(
    logits: torch.Tensor, params: SamplingParams, uniforms: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [n] and their logprobs float32 [n] from logits [n, V]; ``uniforms`` float64 [n] (None: greedy).

    ValueError for logits that are no distribution: NaN, infinite, or all impossible.
    """
    logits = logits.float()
    if params.temperature == 0:
        ids = logits.argmax(-1)
        return ids, _numbers(torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0])
    if uniforms is None:
        raise ValueError("sampling at a temperature above 0 needs one uniform a row, got none")
    if params.temperature != 1.0:
        logits = logits / params.temperature
    probabilities = torch.softmax(restrict_support(logits, params), -1)
    _numbers(probabilities[:, 0])  # one that is none makes its row so
    ids = _draw(probabilities, uniforms)
    return ids, probabilities.gather(-1, ids[:, None])[:, 0].log()


def _numbers(values: torch.Tensor) -> torch.Tensor:
    if values.isnan().any():
        raise ValueError(
            "the policy's logits are not numbers: its weights are lost. Continue from an earlier checkpoint, with a lower "
            "learning rate (grpo.lr) or learner.max_grad_norm"
        )
    return values


def restrict_support(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[n, V] logits with -inf where min-p, top-k or top-p leave a token out; ``logits`` are already tempered."""
    if params.min_p > 0.0:
        floor = logits.amax(-1, keepdim=True) + float(np.log(params.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ordered, index = logits.sort(-1)  # ascending, so that the sum below a token is what top-p compares
        below = torch.softmax(ordered, -1).cumsum(-1, dtype=torch.float64)
        dropped = below <= 1.0 - params.top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(dropped.scatter(-1, index, dropped), -torch.inf)
    return logits


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the first index at which the running sum of ``weights`` [n, V], in float64, exceeds that share of the whole
    sum that ``uniforms`` [n] name; never one of weight 0.

    In a large vocabulary a block is drawn first, and then one of its tokens: running sums of all would cost more than
    the softmax. A block's sum is in float32, as the weights are.
    """
    size = weights.shape[-1]
    if size > _BLOCK_SIZE:
        blocks = functional.pad(weights, (0, -size % _BLOCK_SIZE)).unflatten(-1, (-1, _BLOCK_SIZE))
        sums = blocks.sum(-1).double()
        block = _draw(sums, uniforms)[:, None]
        here, upto = sums.gather(-1, block), sums.cumsum(-1).gather(-1, block)
        rest = (uniforms[:, None] * sums.sum(-1, keepdim=True) - (upto - here)) / here
        inside = blocks[torch.arange(len(weights), device=weights.device), block[:, 0]]
        return block[:, 0] * _BLOCK_SIZE + _draw(inside, rest[:, 0].clamp_(0.0, 1.0))
    running = weights.cumsum(-1, dtype=torch.float64)
    total = running[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, target[:, None], right=True)[:, 0]
