"""Attention over tokens laid end to end, after an ``AttentionPlan``: prompts once, each completion sees its prompt and itself.

Plugged into the model through transformers' attention interface, as the sampler's is. The linear layers run on the
flat tokens, so no pad is ever computed there; only attention itself works on rectangles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from pipeline.batching import AttentionPlan

ATTENTION = "grpoflow_plan"
"""The name under which the attention is registered."""
SHORT = 128
"""Longest row, in tokens, whose scores are computed whole on a CPU."""


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """An ``AttentionPlan`` on a device. ``branch_mask`` bool [S, 1, K, Lp + K]: what a completion's tokens see."""

    causal_rows: Tensor
    branch_rows: Tensor
    branch_prompts: Tensor
    branch_mask: Tensor
    output_index: Tensor


def plan_tensors(plan: AttentionPlan, device: torch.device, unused: int = 0) -> PlanTensors:
    """The plan's index arrays as tensors, and the mask of the shared prompts' completions.

    ``unused`` tokens behind the plan's are seen by none, and get what the first token sees.
    """
    rows, width = plan.branch_rows.shape
    longest = int(plan.prompt_lengths.max()) if rows else 0
    lengths = torch.as_tensor(plan.prompt_lengths, device=device)
    seen_prompt = torch.arange(longest, device=device)[None] < lengths[:, None]  # [S, Lp]
    causal = torch.ones((width, width), dtype=torch.bool, device=device).tril()
    mask = torch.cat([seen_prompt[:, None].expand(rows, width, longest), causal.expand(rows, width, width)], dim=2)
    return PlanTensors(
        causal_rows=torch.as_tensor(plan.causal_rows, device=device),
        branch_rows=torch.as_tensor(plan.branch_rows, device=device),
        branch_prompts=torch.as_tensor(plan.branch_prompts, device=device),
        branch_mask=mask[:, None],
        output_index=pad(torch.as_tensor(plan.output_index, device=device), (0, unused)),
    )


def plan_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: PlanTensors | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, C, heads, head_dim] from query [1, heads, C, head_dim]; the interface of transformers' attention functions."""
    if plan is None:
        raise ValueError(f"{type(module).__name__} does not pass the learner's attention plan on")
    groups = query.shape[1] // key.shape[1]
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [C, heads, head_dim]
    causal = [_rows(states, plan.causal_rows) for states in (query, key, value)]
    outputs = [_attend(causal[0], causal[1], causal[2], groups, scaling, None)]
    if plan.branch_rows.numel():
        longest = plan.branch_mask.shape[3] - plan.branch_rows.shape[1]
        own = [_rows(states, plan.branch_rows) for states in (query, key, value)]
        prompts = [states[:, :, :longest][plan.branch_prompts] for states in causal[1:]]
        keys, values = (torch.cat(pair, dim=2) for pair in zip(prompts, own[1:], strict=True))
        outputs.append(_attend(own[0], keys, values, groups, scaling, plan.branch_mask))
    flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])
    return flat.index_select(0, plan.output_index)[None], None


def _rows(states: Tensor, rows: Tensor) -> Tensor:
    """[R, heads, L, head_dim] of the tokens in a rectangle of positions [R, L]."""
    return states.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, groups: int, scaling: float | None, mask: Tensor | None
) -> Tensor:
    """[R, heads, T, head_dim]; ``mask`` None is causal.

    On a CPU short rows are several times faster as plain products than in the fused kernel, and their scores fit.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tokens = query.shape[2]
    if query.device.type == "cpu" and query.dtype != torch.bfloat16 and key.shape[2] <= SHORT:
        if mask is None:
            mask = torch.ones((tokens, tokens), dtype=torch.bool).tril()[None, None]
        return _ShortAttention.apply(query, key, value, mask, scale)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)


class _ShortAttention(torch.autograd.Function):
    """softmax(scale Q K^T + mask) V with the queries of a group of heads in one product, and its gradient by hand."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        rows, heads, tokens, width = query.shape
        kv_heads, columns = key.shape[1:3]
        grouped = query.reshape(rows * kv_heads, -1, width)  # [R kv, heads/kv T, head_dim]
        keys, values = (states.reshape(rows * kv_heads, columns, width) for states in (key, value))
        scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(scale)
        scores.view(rows, heads, tokens, columns).masked_fill_(~mask, -torch.inf)
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(grouped, keys, values, weights)
        ctx.shapes, ctx.scale = (query.shape, key.shape), scale
        return torch.bmm(weights, values).view(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grouped, keys, values, weights = ctx.saved_tensors
        query_shape, key_shape = ctx.shapes
        grad = grad.reshape(grouped.shape)
        grad_value = torch.bmm(weights.transpose(1, 2), grad)
        change = torch.bmm(grad, values.transpose(1, 2))  # by the weights, then by the scores
        change = torch._softmax_backward_data(change, weights, -1, weights.dtype).mul_(ctx.scale)
        grad_query = torch.bmm(change, keys)
        grad_key = torch.bmm(change.transpose(1, 2), grouped)
        return grad_query.view(query_shape), grad_key.view(key_shape), grad_value.view(key_shape), None, None


def register_plan_attention() -> None:
    """Make the attention known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, plan_attention)
