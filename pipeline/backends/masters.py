"""float32 master weights and AdamW over them, for a module whose own weights may be bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.backends.learner_state import pick
from pipeline.config import LearnerConfig
from pipeline.protocols import NotFinite

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Masters:
    """The trained weights in float32 by parameter name, their gradients, and their optimizer.

    In float32 they are the module's own parameters. For bfloat16 they are copies: gradients are added up in float32 as
    each micro-batch's arrive, and after a step the module gets the rounded weights.
    """

    def __init__(self, model: nn.Module, config: LearnerConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.separate = dtype != torch.float32
        self.weights: dict[str, Tensor] = dict(self.parameters)
        if self.separate:
            for name, parameter in self.parameters.items():
                self.weights[name] = parameter.detach().clone()
                parameter.register_post_accumulate_grad_hook(_moves_gradient_to(self.weights[name]))
            # Parameters only: rounding the rotary frequencies too would move every position.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """A fresh AdamW; matrices decay, vectors (norms, biases) do not."""
        matrices = [w for w in self.weights.values() if w.dim() > 1]
        vectors = [w for w in self.weights.values() if w.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=self.config.betas, fused=True
        )

    def clear_gradients(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def step(self, lr: float) -> float:
        """Clip, update, and return the gradient's norm before clipping. NotFinite, weights untouched, if it is not
        finite."""
        for weight in self.weights.values():
            if weight.grad is None:  # nothing was run: a zero gradient still is a step for the moments
                weight.grad = torch.zeros_like(weight)
        norm = torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.config.max_grad_norm)
        if not torch.isfinite(norm):
            raise NotFinite(
                f"the gradient's norm is {float(norm)}: no update was made; look at the step's loss inputs (rewards, "
                f"logprobs) in the store, or lower the learning rate",
                float(norm),
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.publish()
        self.clear_gradients()
        return float(norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the module."""
        if self.separate:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.weights[name])

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor]) -> None:
        """Start again from these values with a fresh optimizer, in place: a sampler that shares the module sees them."""
        for name, weight in self.weights.items():
            weight.copy_(values[name])
        self.publish()
        self.reset_optimizer()

    def exact(self) -> dict[str, Tensor]:
        """The trained weights at full precision where the module's are all that is rounded: LoRA's additions."""
        return self.weights if self.config.lora_rank else {}

    def state(self) -> dict[str, Tensor]:
        """The moments, and the masters where the checkpoint's own weights do not hold them exactly."""
        kept = self.separate or self.config.lora_rank
        tensors = {f"master/{name}": w for name, w in self.weights.items()} if kept else {}
        for name, weight in self.weights.items():
            moments = self.optimizer.state.get(weight, {})
            tensors |= {f"{kind}/{name}": moments[kind] for kind in MOMENTS if kind in moments}
        return tensors

    def restore(self, tensors: Mapping[str, Tensor], directory: Path) -> None:
        """Continue from ``state``; the weights that the checkpoint holds exactly have been taken already."""
        if self.separate or self.config.lora_rank:
            self.take({name: pick(tensors, "master", name, directory) for name in self.weights})
        if not any(name.startswith("step/") for name in tensors):
            return  # saved before the first step
        for name, weight in self.weights.items():
            moments = {kind: pick(tensors, kind, name, directory).to(weight.device) for kind in MOMENTS}
            self.optimizer.state[weight] = {kind: tensor.clone() for kind, tensor in moments.items()}


def _moves_gradient_to(master: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move
