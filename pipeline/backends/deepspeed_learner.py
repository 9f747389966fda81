"""The learner over several processes: DeepSpeed ZeRO 1, 2 or 3, each rank a child process that stays up for the round.

Micro-batches are planned here, as for one process, and dealt out: losses and gradients are those of the torch learner.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.backends.objective_step import (
    active_members,
    check_arrays,
    join_sums,
    plan_batches,
    step_count,
    step_metrics,
)
from pipeline.backends.rank_group import RankGroup
from pipeline.batching import Layout, micro_batches
from pipeline.config import ObjectiveConfig, Recipe
from pipeline.protocols import NotFinite
from pipeline.types import TrainSequence


class DeepSpeedLearner:
    """``pipeline.protocols.Learner`` over ``learner.ranks`` processes, whose output goes to a file in ``scratch``."""

    def __init__(self, recipe: Recipe, directory: Path, scratch: Path) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(
                'learner.backend is "deepspeed", which is not installed: pip install "grpoflow[deepspeed]"; or set '
                'learner.backend = "torch"'
            )
        cpu = recipe.runtime.device == "cpu" or not torch.cuda.is_available()
        nodes, here = recipe.learner.nodes, recipe.learner.ranks // recipe.learner.nodes
        if not cpu and torch.cuda.device_count() < here:
            raise ValueError(
                f"learner.ranks is {recipe.learner.ranks} on {nodes} machines but {torch.cuda.device_count()} GPUs are "
                f"visible here: each rank takes one; lower learner.ranks, or set runtime.device = 'cpu'"
            )
        self._recipe, self._ranks = recipe, recipe.learner.ranks
        threads = max(1, recipe.runtime.threads // here)
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if cpu:
            environment["DS_ACCELERATOR"] = "cpu"
        self._group = RankGroup(
            "pipeline.backends.deepspeed_rank",
            self._ranks,
            scratch,
            environment,
            nodes,
            recipe.learner.rendezvous or "",
        )
        self._scoring_seconds, self._has_reference = 0.0, False
        self._layout: Layout = self._all("open", recipe, directory.absolute(), False)[0]

    def logprobs(self, sequences: Sequence[TrainSequence], temperature: float = 1.0) -> list[np.ndarray]:
        """float32 [T] a sequence, by the policy as it is now."""
        return self._score("logprobs", sequences, temperature)

    def load_reference(self, directory: Path | None) -> None:
        """Hold this checkpoint as the reference policy; None lets it go."""
        self._all("load_reference", directory and directory.absolute())
        self._has_reference = directory is not None

    def reference_logprobs(self, sequences: Sequence[TrainSequence], temperature: float = 1.0) -> list[np.ndarray]:
        """float32 [T] a sequence, by the reference policy."""
        if not self._has_reference:
            raise ValueError("the learner holds no reference policy: call load_reference first")
        return self._score("reference_logprobs", sequences, temperature)

    def step(self, sequences: Sequence[TrainSequence], objective: ObjectiveConfig, lr: float) -> dict[str, float]:
        """One AdamW step on the objective's loss over all sequences of all ranks; see ``TorchLearner.step``."""
        started = time.perf_counter()
        check_arrays(sequences, objective)  # an error in a rank would take the group down
        count = step_count(sequences, objective)
        members = active_members(sequences, objective)
        budget = self._recipe.learner.micro_batch_tokens
        dealt = self._deal(sequences, plan_batches(sequences, members, objective, self._layout, budget))
        passes = max(1, *map(len, dealt))
        answers = self._group.call("step", [(batches, objective, lr, count, passes) for batches in dealt])
        norm = answers[0][1]
        if not np.isfinite(norm):
            raise NotFinite(f"the gradient's norm is {norm}: the weights are lost; load the last checkpoint", norm)
        total = join_sums([sums for sums, _, _ in answers])
        metrics = step_metrics(total, sequences, members, objective, count)
        metrics |= {name: max(parts[name] for _, _, parts in answers) for name in answers[0][2]}
        metrics |= {"grad_norm": norm, "lr": lr, "seconds_logprobs": self._scoring_seconds}
        self._scoring_seconds = 0.0
        return metrics | {"seconds_update": time.perf_counter() - started}

    def live_policy(self) -> nn.Module | None:
        """None: the weights are in other processes."""
        return None

    def save(self, directory: Path, *, optimizer: bool = True) -> None:
        """Whole weights and state as the torch learner writes them: either backend with any ranks continues from it."""
        self._all("save", directory.absolute(), optimizer)

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Take a checkpoint's weights and continue its optimizer, or start a fresh one."""
        self._all("open", self._recipe, directory.absolute(), optimizer)

    def close(self) -> None:
        """End the ranks. May be called twice."""
        self._group.close()

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        return self._group.call(name, [arguments] * self._ranks)

    def _deal(
        self, sequences: Sequence[TrainSequence], batches: Sequence[Sequence[int]]
    ) -> list[list[list[TrainSequence]]]:
        """Micro-batches a rank: they come longest first, so that dealing them in turn shares the work out evenly."""
        return [
            [[sequences[i] for i in batch] for batch in batches[rank :: self._ranks]] for rank in range(self._ranks)
        ]

    def _score(self, name: str, sequences: Sequence[TrainSequence], temperature: float) -> list[np.ndarray]:
        started = time.perf_counter()
        out = [np.zeros(len(s.completion_token_ids), dtype=np.float32) for s in sequences]
        members = [i for i, s in enumerate(sequences) if len(s.completion_token_ids)]
        batches = micro_batches(sequences, members, self._recipe.learner.micro_batch_tokens, layout=self._layout)
        dealt = self._deal(sequences, batches)
        passes = max(map(len, dealt))
        answers = self._group.call(name, [(part, temperature, passes) for part in dealt])
        for rank, scored in enumerate(answers):
            order = [i for batch in batches[rank :: self._ranks] for i in batch]
            for i, logprobs in zip(order, scored, strict=True):
                out[i] = logprobs
        self._scoring_seconds += time.perf_counter() - started
        return out
