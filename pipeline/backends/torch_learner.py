"""The learner in this process: one device, float32 master weights, the module shared with a transformers sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.backends.forward import PolicyForward, choose_layout
from pipeline.backends.learner_state import read_state, write_state
from pipeline.backends.masters import Masters
from pipeline.backends.objective_step import accumulate, active_members, step_count, step_metrics
from pipeline.backends.scoring import score
from pipeline.config import ObjectiveConfig, Recipe
from pipeline.models import load_model, load_tokenizer, save_model
from pipeline.types import TrainSequence


class TorchLearner:
    """``pipeline.protocols.Learner``. Nothing in a step is drawn at random (no dropout), so its state is weights and
    moments alone: a loaded checkpoint continues bit for bit on the CPU at equal threads."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self._recipe = recipe
        name = recipe.runtime.device
        self._device = torch.device(
            "cuda" if name != "cpu" and torch.cuda.is_available() else name.replace("auto", "cpu")
        )
        self._tokenizer = load_tokenizer(directory, recipe.model)
        self._model: Any = load_model(directory, recipe.model, device=str(self._device), train=True)
        prepare_training(self._model, recipe.learner.gradient_checkpointing)
        self._layout = choose_layout(self._model)
        self._forward = PolicyForward(self._model)
        self._masters = Masters(self._model, recipe.learner, getattr(torch, recipe.model.dtype))
        self._reference: Any = None
        self._scoring_seconds = 0.0

    def logprobs(self, sequences: Sequence[TrainSequence], temperature: float = 1.0) -> list[np.ndarray]:
        """float32 [T] a sequence, by the policy as it is now."""
        return self._score(self._forward, sequences, temperature)

    def load_reference(self, directory: Path | None) -> None:
        """Hold this checkpoint as the reference policy; None lets it go."""
        self._reference = None
        if directory is not None:
            model = load_model(directory, self._recipe.model, device=str(self._device))
            self._reference = PolicyForward(model)

    def reference_logprobs(self, sequences: Sequence[TrainSequence], temperature: float = 1.0) -> list[np.ndarray]:
        """float32 [T] a sequence, by the reference policy."""
        if self._reference is None:
            raise ValueError("the learner holds no reference policy: call load_reference first")
        return self._score(self._reference, sequences, temperature)

    def step(self, sequences: Sequence[TrainSequence], objective: ObjectiveConfig, lr: float) -> dict[str, float]:
        """One AdamW step on the objective's loss over all sequences; metrics as in the ``updates`` table.

        Its result does not depend on the micro-batch size or the order of the sequences (beyond float rounding).
        """
        started = time.perf_counter()
        count = step_count(sequences, objective)
        members = active_members(sequences, objective)
        self._masters.clear_gradients()
        total = accumulate(
            self._forward, lambda loss: loss.backward(), sequences, members, objective, count=count,
            layout=self._layout, budget=self._recipe.learner.micro_batch_tokens, device=self._device,
        )  # fmt: skip
        norm = self._masters.step(lr)
        metrics = step_metrics(total, sequences, members, objective, count)
        metrics |= {"grad_norm": norm, "lr": lr, "seconds_logprobs": self._scoring_seconds}
        self._scoring_seconds = 0.0
        return metrics | {"seconds_update": time.perf_counter() - started}

    def live_policy(self) -> nn.Module | None:
        """The module itself: a sampler that holds it sees every later update."""
        return self._model

    def save(self, directory: Path, *, optimizer: bool = True) -> None:
        """Weights (in the recipe's dtype), configuration and tokenizer; with ``optimizer`` the state beside them."""
        save_model(self._model, self._tokenizer, directory)
        if optimizer:
            write_state(directory, self._masters.state(), {"backend": "torch"})

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Take a checkpoint's weights in place; continue its optimizer, or start a fresh one."""
        state = read_state(directory) if optimizer else None
        fresh = load_model(directory, self._recipe.model, device=str(self._device), train=True)
        self._masters.set_weights(dict(fresh.named_parameters()))
        self._masters.reset_optimizer()
        if state is not None:
            self._masters.restore(state[0], directory)

    def close(self) -> None:
        """Let policy, reference and optimizer go."""
        self._reference = self._model = self._forward = self._masters = None  # type: ignore[assignment]

    def _score(
        self, forward: PolicyForward, sequences: Sequence[TrainSequence], temperature: float
    ) -> list[np.ndarray]:
        started = time.perf_counter()
        budget = self._recipe.learner.micro_batch_tokens
        out = score(forward, sequences, temperature, layout=self._layout, budget=budget)
        self._scoring_seconds += time.perf_counter() - started
        return out


def prepare_training(model: Any, gradient_checkpointing: bool) -> None:
    """No dropout anywhere (updates and logprobs must be of one and the same policy); recomputation where asked for.

    transformers recomputes only in training mode, so that mode is on exactly then.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(model.config, name, 0.0):
            setattr(model.config, name, 0.0)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(gradient_checkpointing)
