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
from pipeline.backends.objective_step import (
    accumulate,
    active_members,
    check_arrays,
    plan_batches,
    step_count,
    step_metrics,
)
from pipeline.backends.policy_model import copy_weights, open_policy, whole_weights
from pipeline.backends.scoring import score
from pipeline.config import ObjectiveConfig, Recipe
from pipeline.models import load_model, load_tokenizer
from pipeline.types import TrainSequence


class TorchLearner:
    """``pipeline.protocols.Learner``. Nothing in a step is drawn at random (no dropout), so its state is weights and
    moments alone: a loaded checkpoint continues bit for bit on the CPU at equal threads."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self._recipe = recipe
        self._device = choose_device(recipe.runtime.device)
        self._tokenizer = load_tokenizer(directory, recipe.model)
        self._model: Any = open_policy(recipe, directory, self._device)
        self._layout = choose_layout(self._model)
        self._forward = PolicyForward(self._model)
        self._masters = Masters(self._model, recipe.learner, getattr(torch, recipe.model.dtype))
        self._reference: Any = None
        self._merged: Any = None
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
        check_arrays(sequences, objective)
        count = step_count(sequences, objective)
        members = active_members(sequences, objective)
        budget = self._recipe.learner.micro_batch_tokens
        batches = plan_batches(sequences, members, objective, self._layout, budget)
        self._masters.clear_gradients()
        planned = time.perf_counter()
        total = accumulate(
            self._forward, lambda loss: loss.backward(), sequences, batches, objective,
            count=count, layout=self._layout, device=self._device,
        )  # fmt: skip
        sums, added = total.plain(), time.perf_counter()  # numbers: a GPU has finished
        norm = self._masters.step(lr)
        parts = {"seconds_forward_backward": added - planned, "seconds_optimizer": time.perf_counter() - added}
        metrics = step_metrics(sums, sequences, members, objective, count) | parts
        metrics |= {"grad_norm": norm, "lr": lr, "seconds_logprobs": self._scoring_seconds}
        self._scoring_seconds = 0.0
        return metrics | {"seconds_update": time.perf_counter() - started}

    def live_policy(self) -> nn.Module | None:
        """The module itself: a sampler that holds it sees every later update. Under LoRA a merged copy, as of now."""
        if not self._recipe.learner.lora_rank:
            return self._model
        if self._merged is None:
            self._merged = load_model(self._tokenizer.name_or_path, self._recipe.model, device=str(self._device))
        copy_weights(self._merged, self._weights())
        return self._merged

    def save(self, directory: Path, *, optimizer: bool = True) -> None:
        """Weights (in the recipe's dtype, LoRA merged), configuration and tokenizer; with ``optimizer`` the state too."""
        self._model.save_pretrained(directory, state_dict=self._weights())
        self._tokenizer.save_pretrained(directory)
        if optimizer:
            write_state(directory, self._masters.state() | self._base())

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Take a checkpoint's weights in place; continue its optimizer, or start a fresh one (and fresh additions)."""
        state = read_state(directory) if optimizer else None
        fresh = open_policy(self._recipe, directory, self._device)
        if state is not None and self._recipe.learner.lora_rank:
            copy_weights(
                fresh, {name.removeprefix("base/"): t for name, t in state.items() if name.startswith("base/")}
            )
        with torch.no_grad():
            for old, new in zip(self._model.parameters(), fresh.parameters(), strict=True):
                old.copy_(new)
        self._masters.take(dict(fresh.named_parameters()))
        if state is not None:
            self._masters.restore(state, directory)

    def close(self) -> None:
        """Let policy, reference and optimizer go."""
        self._reference = self._merged = self._model = self._forward = self._masters = None  # type: ignore[assignment]

    def _weights(self) -> dict[str, torch.Tensor]:
        weights = {name: p.detach() for name, p in self._model.named_parameters()}
        return whole_weights(weights | self._masters.exact(), self._recipe.learner)

    def _base(self) -> dict[str, torch.Tensor]:
        """Under LoRA, the weights below the additions: the checkpoint's own have them merged in."""
        if not self._recipe.learner.lora_rank:
            return {}
        names = dict(self._model.named_parameters())
        frozen = {name: p for name, p in names.items() if not p.requires_grad}
        return {f"base/{name}": w for name, w in whole_weights(frozen, self._recipe.learner).items()}

    def _score(
        self, forward: PolicyForward, sequences: Sequence[TrainSequence], temperature: float
    ) -> list[np.ndarray]:
        started = time.perf_counter()
        budget = self._recipe.learner.micro_batch_tokens
        out = score(forward, sequences, temperature, layout=self._layout, budget=budget)
        self._scoring_seconds += time.perf_counter() - started
        return out


def choose_device(name: str) -> torch.device:
    """ "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
