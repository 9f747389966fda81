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

from pipeline.protocols import SamplingParams

_BLOCK = 128


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
    """Token ids int64 [n] and their logprobs float32 [n] from logits [n, V]; ``uniforms`` float64 [n] (None: greedy)."""
    logits = logits.float()
    if params.temperature == 0:
        ids = logits.argmax(-1)
        return ids, torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]
    if uniforms is None:
        raise ValueError("sampling at a temperature above 0 needs one uniform a row, got none")
    if params.temperature != 1.0:
        logits = logits / params.temperature
    logprobs = torch.log_softmax(restrict_support(logits, params), -1)
    ids = _inverse_cdf(logprobs.exp(), uniforms)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


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


def _inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative probability exceeds the uniform: never a token of probability 0."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Summed in float32 the probabilities miss 1 by an ulp or so: scale the uniform, and stay below the total.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
