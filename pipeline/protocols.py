"""What a sampler and a learner are to the stages; the engines behind them live in ``pipeline.backends``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.types import Completion, TrainSequence

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from pipeline.config import ObjectiveConfig

Progress = Callable[[int, int, str], None]
"""``progress(done, total, note)``; called often, so the receiver throttles. Raising from it cancels the work."""


def no_progress(done: int, total: int, note: str = "") -> None:
    """The progress of a caller who does not look."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. ``temperature`` 0 is greedy; logits are divided by it before the softmax."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """Which weights an engine holds: our name for them, and a checksum of what the engine itself reports."""

    name: str
    checksum: str


class EngineDied(RuntimeError):
    """A sampling engine is gone, and its last lines say why; the next ``load_policy`` starts a fresh one."""


class NotFinite(RuntimeError):
    """A gradient's norm is no number (``value``): the learner made no update, or lost its weights with it."""

    def __init__(self, message: str, value: float) -> None:
        super().__init__(message)
        self.value = value


class Sampler(Protocol):
    """Token ids in, token ids out. One instance lives as long as a round."""

    version: PolicyVersion

    def load_policy(self, source: Path | nn.Module, name: str) -> PolicyVersion:
        """Hold these weights (a checkpoint folder, or a live module), reset every cache, report the checksum."""
        ...

    def sample(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[Sequence[int]],
        progress: Progress = no_progress,
    ) -> list[list[Completion]]:
        """One list of completions a prompt, one completion a seed: ``out[p][g]`` was drawn with ``seeds[p][g]``."""
        ...

    def close(self) -> None:
        """Give back memory and processes. May be called twice."""
        ...


class Learner(Protocol):
    """Holds the policy's weights and its optimizer; may also hold the frozen reference policy."""

    def logprobs(self, sequences: Sequence[TrainSequence], temperature: float = 1.0) -> list[np.ndarray]:
        """float32 [T] a sequence: the policy's logprobs of its completion tokens."""
        ...

    def load_reference(self, directory: Path | None) -> None:
        """Hold this checkpoint as the reference policy; None lets it go."""
        ...

    def reference_logprobs(self, sequences: Sequence[TrainSequence], temperature: float = 1.0) -> list[np.ndarray]:
        """As ``logprobs``, by the reference policy."""
        ...

    def step(self, sequences: Sequence[TrainSequence], objective: ObjectiveConfig, lr: float) -> dict[str, float]:
        """Exactly one optimizer step over all sequences, whatever their number; returns the step's metrics."""
        ...

    def live_policy(self) -> nn.Module | None:
        """The module itself where sampler and learner share a process, else None (then sync by checkpoint)."""
        ...

    def save(self, directory: Path, *, optimizer: bool = True) -> None:
        """Write weights in Hugging Face format (and optimizer and RNG state beside them) into an existing folder."""
        ...

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Continue from what ``save`` wrote. With ``optimizer=False`` only the weights, and a fresh optimizer."""
        ...

    def close(self) -> None:
        """Give back memory and processes. May be called twice."""
        ...


Metrics = dict[str, Any]
