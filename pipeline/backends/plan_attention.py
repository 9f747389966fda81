"""Attention over tokens laid end to end, after an ``AttentionPlan``: prompts once, each completion sees its prompt and itself.

Plugged into the model through transformers' attention interface, as the sampler's is. The linear layers run on the
flat tokens, so no pad is ever computed there; only attention itself works on rectangles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pipeline.batching import AttentionPlan

ATTENTION = "grpoflow_plan"
"""The name under which the attention is registered."""


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """An ``AttentionPlan`` on a device. ``branch_mask`` bool [S, 1, K, Lp + K]: what a completion's tokens see."""

    causal_rows: Tensor
    branch_rows: Tensor
    branch_prompts: Tensor
    branch_mask: Tensor
    output_index: Tensor


def plan_tensors(plan: AttentionPlan, device: torch.device) -> PlanTensors:
    """The plan's index arrays as tensors, and the mask of the shared prompts' completions."""
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
        output_index=torch.as_tensor(plan.output_index, device=device),
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
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)


def register_plan_attention() -> None:
    """Make the attention known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, plan_attention)
