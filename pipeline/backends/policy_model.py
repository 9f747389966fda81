"""The trainable policy as a module: loaded in float32, without dropout, with LoRA's additions where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.backends.forward import choose_layout, planned_attention
from pipeline.config import LearnerConfig, Recipe
from pipeline.models import load_model
from pipeline.products import use_onednn
from pipeline.seeds import derive_seed

ADAPTER = "policy"
BASE, LORA_A, LORA_B = ".base_layer.", f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."


def open_policy(recipe: Recipe, directory: Path, device: torch.device, *, as_stored: bool = False) -> Any:
    """The checkpoint's model, ready to be trained: its trained parameters ask for gradients, the others do not.

    Float32, or as the file has it, see ``load_model``.
    """
    model = load_model(directory, recipe.model, device=str(device), train=True, as_stored=as_stored)
    without_dropout(model)
    if recipe.learner.lora_rank:
        _add_lora(model, recipe.learner, derive_seed(recipe.seed, "lora"))
        use_onednn(model)
    if recipe.learner.gradient_checkpointing:
        _recompute_activations(model)
    # transformers recomputes activations in training mode only, so that mode is on exactly then.
    model.train(recipe.learner.gradient_checkpointing)
    return model


def _recompute_activations(model: Any) -> None:
    options: dict[str, Any] = {"use_reentrant": False}
    if choose_layout(model) == "shared":  # the recomputation runs in the backward pass, and needs the same attention
        options["context_fn"] = lambda: (nullcontext(), planned_attention(model.config))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def without_dropout(model: Any) -> None:
    """Updates and logprobs must be of one and the same policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _add_lora(model: Any, config: LearnerConfig, seed: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=linear, lora_dropout=0.0)
    inject_adapter_in_model(lora, model, adapter_name=ADAPTER)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(LORA_A in name or LORA_B in name)
        if LORA_A in name:  # B is zero, so that the policy starts as it was
            drawn = torch.randn(parameter.shape, generator=draw) * parameter.shape[1] ** -0.5
            parameter.data.copy_(drawn)


def plain_name(name: str) -> str:
    """A weight's name in the plain model, without LoRA."""
    return name.replace(BASE, ".")


def whole_weights(weights: Mapping[str, Tensor], config: LearnerConfig) -> dict[str, Tensor]:
    """The weights under the names of the plain model; LoRA's additions are merged into copies, the base untouched.

    W = W_base + (alpha / rank) B A, computed in float32 and rounded once.
    """
    merged = {}
    for name, weight in weights.items():
        if LORA_A in name or LORA_B in name:
            continue
        plain = plain_name(name)
        stem = name.split(BASE)[0]
        down, up = weights.get(f"{stem}{LORA_A}weight"), weights.get(f"{stem}{LORA_B}weight")
        if name.endswith(f"{BASE}weight") and down is not None and up is not None:
            change = (up.float() @ down.float()) * (config.lora_alpha / config.lora_rank)
            weight = (weight.float() + change.to(weight.device)).to(weight.dtype)
        merged[plain] = weight
    return merged


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights, under their plain names, into a policy in place; LoRA's additions are left as they are."""
    for name, parameter in model.named_parameters():
        if LORA_A not in name and LORA_B not in name:
            parameter.copy_(weights[plain_name(name)])
