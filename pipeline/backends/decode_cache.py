"""The key/value cache of the transformers sampler, and the attention that reads it.

One block of memory [layers, 2, slots, kv_heads, capacity, head_dim], allocated once a call. Running completions always
occupy rows 0..n-1, so that a layer's keys are a view and nothing is gathered; a row that finishes is overwritten by the
last one. Keys are left-aligned: column j of a row is its token j.

The attention is plugged into the model through transformers' attention interface, so any causal LM that uses the
interface works as it is (grouped heads, sliding window, rotary scaling, logit soft caps). It multiplies the queries of a
group of heads at once instead of repeating the keys for each. In float32 on the CPU it gives a row the same bits
whatever the other rows and however long the padding: lengths are multiples of CHUNK, and values are summed a chunk at
a time, so that a longer batch only adds exact zeros. The fused kernels for the CPU do not do that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ATTENTION = "grpoflow"
"""The name under which the attention is registered."""
CHUNK = 64
"""Columns whose values are summed in one product. One product over all columns would round by the batch's length."""


class PromptStates:
    """Keys and values of prompts that were prefilled together, left-padded to one length: what completions fork from.

    ``keys[layer]`` and ``values[layer]`` are [P, kv_heads, T, head_dim].
    """

    def __init__(self, lengths: torch.Tensor, padded: int) -> None:
        self.lengths = lengths
        self.padded = padded
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._masks: dict[int | None, torch.Tensor] = {}

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's keys and values [P, kv_heads, T, head_dim]."""
        if layer != len(self.keys):
            raise ValueError(
                f"attention layer {layer} came when layer {len(self.keys)} was expected: layers share states"
            )
        self.keys.append(key)
        self.values.append(value)
        return key, value

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[P, 1, T, T], added to the scores: causal, within the window, and blind to the padding on the left."""
        if window not in self._masks:
            column = torch.arange(self.padded, device=self.lengths.device)
            seen = (column[None, :] <= column[:, None])[None]
            if window is not None:
                seen = seen & (column[None, :] > column[:, None] - window)[None]
            seen = seen & (column[None, :] >= (self.padded - self.lengths)[:, None])[:, None, :]
            self._masks[window] = _additive(seen, dtype)[:, None]
        return self._masks[window]


class SlotCache:
    """Keys and values of the running completions, and for each step where they write and what they see."""

    def __init__(self, states: PromptStates, slots: int, capacity: int) -> None:
        capacity = round_up(capacity, CHUNK)
        heads, _, width = states.keys[0].shape[1:]
        first = states.keys[0]
        # Zeros, not empty: a masked column has weight 0, and 0 times a stray NaN is NaN.
        self.block = torch.zeros(
            (len(states.keys), 2, slots, heads, capacity, width), dtype=first.dtype, device=first.device
        )
        self.slots = slots
        self._rows = torch.arange(slots, device=first.device)
        self._column = torch.arange(capacity, device=first.device)
        self.count = 0
        self._position = self._rows[:0]
        self._length = 0
        self._masks: dict[int | None, torch.Tensor] = {}

    def fork(self, states: PromptStates, prompt: int, rows: slice) -> None:
        """Copy one prompt's states into these rows."""
        length = int(states.lengths[prompt])
        for layer, (key, value) in enumerate(zip(states.keys, states.values, strict=True)):
            self.block[layer, 0, rows, :, :length] = key[prompt, :, states.padded - length :]
            self.block[layer, 1, rows, :, :length] = value[prompt, :, states.padded - length :]

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``source`` over rows ``target``."""
        self.block[:, :, target, :, :length] = self.block[:, :, source, :, :length]

    def begin_step(self, position: torch.Tensor, length: int) -> None:
        """One token a row comes next: row i writes column ``position[i]``; no row sees column ``length`` or later."""
        self.count = position.shape[0]
        self._position = position
        self._length = round_up(length, CHUNK)
        self._masks = {}

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values [N >= n, kv_heads, 1, head_dim]; views [n, kv_heads, L, head_dim], L a
        multiple of CHUNK (what a row does not see of them is masked)."""
        n = self.count
        rows = self._rows[:n]
        keys, values = self.block[layer, 0], self.block[layer, 1]
        keys[rows, :, self._position] = key[:n, :, 0]
        values[rows, :, self._position] = value[:n, :, 0]
        return keys[:n, :, : self._length], values[:n, :, : self._length]

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[n, 1, 1, L], added to the scores: each row sees its own tokens, within the window."""
        if window not in self._masks:
            column = self._column[: self._length]
            seen = column <= self._position[:, None]
            if window is not None:
                seen = seen & (column > self._position[:, None] - window)
            self._masks[window] = _additive(seen, dtype)[:, None, None]
        return self._masks[window]


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where seen, else the lowest number: not -inf, since a padding query sees nothing and would become NaN."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: SlotCache | PromptStates | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[B, T, heads, head_dim] from query [B, heads, T, head_dim]; the interface of transformers' attention functions.

    Rows of the query beyond the cache's rows are padding and come back as zeros.
    """
    if cache is None:
        raise ValueError(f"{type(module).__name__} does not pass the sampler's cache on; use sampler.engine = 'vllm'")
    if kwargs.get("s_aux") is not None:
        raise ValueError(
            f"{type(module).__name__} has attention sinks, which the transformers sampler does not compute"
        )
    batch, heads, tokens, width = query.shape
    keys, values = cache.update(getattr(module, "layer_idx"), key, value)  # noqa: B009
    rows, groups = keys.shape[:2]
    scale = width**-0.5 if scaling is None else scaling
    grouped = (query[:rows] * scale).reshape(rows, groups, heads // groups * tokens, width)
    scores = torch.matmul(grouped, keys.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    mask = cache.mask(sliding_window, scores.dtype)
    split = scores.view(rows, groups, heads // groups, tokens, keys.shape[2])
    split += mask[:, :, None]
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    mixed = _mix(weights, values).view(rows, heads, tokens, values.shape[3]).transpose(1, 2)
    if rows < batch:
        mixed = torch.cat([mixed, mixed.new_zeros((batch - rows, *mixed.shape[1:]))])
    return mixed.contiguous(), None


def _mix(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[n, kv_heads, queries, head_dim]: weights [n, kv_heads, queries, L] times values [n, kv_heads, L, head_dim]."""
    length = values.shape[2]
    if length <= CHUNK or values.dtype != torch.float32 or values.device.type != "cpu":
        return torch.matmul(weights, values)
    left, right = weights.flatten(0, 1), values.flatten(0, 1)
    mixed = torch.bmm(left[..., :CHUNK], right[:, :CHUNK])
    for start in range(CHUNK, length, CHUNK):
        mixed.baddbmm_(left[..., start : start + CHUNK], right[:, start : start + CHUNK])
    return mixed.unflatten(0, weights.shape[:2])


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def register_attention() -> None:
    """Make the attention known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, slot_attention)
