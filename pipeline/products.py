"""Matrix products of float32 linear layers on the CPU, by oneDNN.

PyTorch hands them to MKL, which on AMD's processors runs at half the rate of oneDNN: 110 against 240 billion operations a
second on one core with 1,024 rows, 60 against 140 with 16 rows and packed weights. oneDNN also gives a row the same bits
whatever the number of rows, from two on. Elsewhere (a GPU, another type, a build of PyTorch without oneDNN) the layers
compute as PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

ROWS = 64
"""For so many rows weights are packed; others get the same bits."""


def linear(left: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left`` [..., K] W^T + bias, [..., N], for ``weight`` [N, K] and ``bias`` [N]; with gradient."""
    if not _by_onednn(left, weight) or left.shape[-1] != weight.shape[1]:
        return functional.linear(left, weight, bias)
    learns = left.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and learns:
        return _Linear.apply(left, weight, bias)
    return _product(left, weight, bias)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [M, K] times ``right`` [K, N], without gradient."""
    if not _by_onednn(left, right) or left.shape[-1] != right.shape[0]:
        return left @ right
    return _product(left, right.t(), None)


class Linear(nn.Linear):
    """``nn.Linear`` through ``linear``; inside ``packed`` the weights lie as oneDNN wants them."""

    packed: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is not None and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")):
            return _product(input, self.packed, self.bias)
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Let the model's linear layers compute by ``linear``: their class changes, and nothing else of them."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Keep the weights a second time meanwhile, packed: a quarter to a half faster with few rows, where no gradients are
    asked for. They must not change."""
    layers = [m for m in model.modules() if isinstance(m, Linear) and _by_onednn(m.weight, m.weight)]
    try:
        for layer in layers:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        yield
    finally:
        for layer in layers:
            layer.packed = None


@cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN is to multiply; everything unusual, errors too, is PyTorch's."""
    return (
        left.dtype == right.dtype == torch.float32
        and left.device.type == right.device.type == "cpu"
        and left.numel() > 0
        and right.numel() > 0
        and right.dim() == 2
        and _has_onednn()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
    )


def _product(left: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(left, weight)
        return _product(left, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, weight = ctx.saved_tensors
        need_left, need_weight, need_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        rows = left.reshape(-1, left.shape[-1])
        return (
            _product(flat, weight.t(), None).view(left.shape) if need_left else None,
            _product(flat.t(), rows.t(), None) if need_weight else None,
            flat.sum(0) if need_bias else None,
        )
