"""Logprobs and entropy of given tokens from hidden states, a chunk of the vocabulary head at a time.

The float32 logits of all tokens [N, V] never exist: forward and backward both compute them a chunk at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.products import linear, multiply

CHUNK_ELEMENTS = 1 << 22
"""Logits held at a time (16 MiB in float32): large enough for full speed, small beside the activations."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """(logprobs [N] with gradient, entropy [N] without), in float32 or the wider type of the states.

    Of softmax((hidden W^T + bias) / temperature): ``hidden`` [N, D], ``weight`` [V, D], ``targets`` [N]. The gradient of
    token n's logprob by its logits is (onehot - probabilities) / temperature.
    """
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = linear(hidden, weight, bias).to(_wide(hidden.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        step = max(1, CHUNK_ELEMENTS // weight.shape[0])
        logprobs = torch.empty(count, dtype=_wide(hidden.dtype), device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, count, step):
            part = slice(start, start + step)
            logits = _logits(hidden[part], weight, bias, temperature)
            normaliser[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - normaliser[part]
            # -sum p log p = normaliser - sum p logit; a logit of -inf has p = 0 and counts nothing.
            probabilities = (logits - normaliser[part, None]).exp_()
            entropy[part] = normaliser[part] - probabilities.mul_(logits).nan_to_num_(0.0, None, 0.0).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.temperature, ctx.step = temperature, step
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        for start in range(0, hidden.shape[0], ctx.step):
            part = slice(start, start + ctx.step)
            scale = (grad[part] / ctx.temperature)[:, None]
            logits = _logits(hidden[part], weight, bias, ctx.temperature)
            change = logits.sub_(normaliser[part, None]).exp_().mul_(-scale)
            change.scatter_add_(1, targets[part, None], scale)
            change = change.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = multiply(change, weight)
            if grad_weight is not None:
                grad_weight.addmm_(change.t(), hidden[part])
            if grad_bias is not None:
                grad_bias += change.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None
