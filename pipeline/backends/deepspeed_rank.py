"""One rank of the DeepSpeed learner: ``python -m pipeline.backends.deepspeed_rank`` under torch's elastic launcher.

Every method is called on all ranks at once, and all of them run the same number of forward and backward passes: under
ZeRO these are collective calls. A rank with nothing to do runs a micro-batch of one token whose loss is 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.backends.forward import PolicyForward, choose_layout
from pipeline.backends.learner_state import read_state, write_state
from pipeline.backends.objective_step import PlainSums, StepSums, accumulate
from pipeline.backends.policy_model import open_policy, whole_weights
from pipeline.backends.rank_group import serve
from pipeline.backends.scoring import score_batches
from pipeline.backends.zero import (
    deepspeed_config,
    full_state,
    full_weights,
    optimizer_groups,
    restore_base,
    restore_exact,
    restore_masters,
    restore_moments,
    share_out,
)
from pipeline.batching import Layout, pack
from pipeline.config import ObjectiveConfig, Recipe
from pipeline.models import load_model, load_tokenizer
from pipeline.types import TrainSequence

Batches = Sequence[Sequence[TrainSequence]]
NOTHING = TrainSequence("nothing", "nothing", (0,), (0,))


class RankLearner:
    """The methods that ``DeepSpeedLearner`` calls."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._reference: Any = None

    def open(self, recipe: Recipe, directory: Path, optimizer: bool) -> Layout:
        """Hold a checkpoint's weights with its optimizer or a fresh one; says which layout the model can run."""
        import deepspeed

        self._recipe = recipe
        self._device = _device(recipe)
        self._stage = recipe.learner.zero_stage
        self._tokenizer = load_tokenizer(directory, recipe.model)
        state = read_state(directory) if optimizer else None
        if self._engine is not None:
            self._engine.destroy()
        shared = self._stage == 3
        model: Any = open_policy(recipe, directory, _loading_device(shared, self._device), as_stored=shared)
        exact = share_out(model, recipe) if shared else {}
        model.to(self._device)
        self._layout = choose_layout(model)
        # ZeRO keeps one flat copy of each group, so groups are made before it takes the parameters apart.
        adam = torch.optim.AdamW(optimizer_groups(model, recipe.learner), lr=0.0, betas=recipe.learner.betas)
        forward = PolicyForward(model)
        self._engine, *_ = deepspeed.initialize(model=forward, optimizer=adam, config=deepspeed_config(recipe, model))
        self._parameters = {name.removeprefix("model."): p for name, p in forward.named_parameters()}
        restore_exact(self._trained(), exact)
        if state is not None:
            if recipe.learner.lora_rank:
                restore_base(self._parameters, state, directory)
            restore_masters(self._trained(), state, directory, recipe)
            restore_moments(self._engine.optimizer, self._trained(), state, directory)
        return self._layout

    def logprobs(self, batches: Batches, temperature: float, passes: int) -> list[np.ndarray]:
        """float32 [T] a sequence, over the rank's micro-batches in order."""
        return self._score(self._engine, batches, temperature, passes)

    def load_reference(self, directory: Path | None) -> None:
        """Hold this checkpoint as the reference policy, shared out among the ranks under ZeRO-3."""
        self._reference = None
        if directory is None:
            return
        shared = self._stage == 3
        loading = str(_loading_device(shared, self._device))
        forward = PolicyForward(load_model(directory, self._recipe.model, device=loading, as_stored=shared))
        if shared:
            import deepspeed

            share_out(forward.model, self._recipe)
            config = deepspeed_config(self._recipe, forward.model)
            self._reference, *_ = deepspeed.initialize(model=forward.to(self._device), config=config)
            self._reference.eval()
        else:
            self._reference = forward

    def reference_logprobs(self, batches: Batches, temperature: float, passes: int) -> list[np.ndarray]:
        """float32 [T] a sequence, by the reference policy."""
        return self._score(self._reference, batches, temperature, passes)

    def step(
        self, batches: Batches, objective: ObjectiveConfig, lr: float, count: float, passes: int
    ) -> tuple[PlainSums, float, dict[str, float]]:
        """One optimizer step together with the other ranks; this rank's sums, the norm of the whole gradient, seconds."""
        started = time.perf_counter()
        world = torch.distributed.get_world_size()
        total = StepSums()
        for number in range(passes):
            self._engine.set_gradient_accumulation_boundary(number == passes - 1)
            if number < len(batches):
                part = accumulate(
                    self._engine, lambda loss: self._backward(loss * world), batches[number],
                    [range(len(batches[number]))], objective, count=count, layout=self._layout, device=self._device,
                )  # fmt: skip
                total.join(part)
            else:
                logprobs, _ = self._engine(pack([NOTHING], [0], layout=self._layout), 1.0)
                self._backward(logprobs.sum() * 0)
        sums, added = total.plain(), time.perf_counter()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        parts = {"seconds_forward_backward": added - started, "seconds_optimizer": time.perf_counter() - added}
        return sums, norm, parts

    def save(self, directory: Path, optimizer: bool) -> None:
        """Gather whole weights and state, which the first rank writes: any number of ranks can load them."""
        writes = torch.distributed.get_rank() == 0
        stored = full_weights(self._parameters, self._recipe, keep=writes)
        state = full_state(self._engine.optimizer, self._trained(), self._recipe, keep=writes) if optimizer else {}
        if writes:
            model = self._engine.module.model
            model.save_pretrained(directory, state_dict=whole_weights(stored, self._recipe.learner))
            self._tokenizer.save_pretrained(directory)
            if optimizer:
                write_state(directory, state | _base(stored, self._recipe))
        torch.distributed.barrier()

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self._parameters.items() if p.requires_grad}

    def _backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def _score(self, forward: Any, batches: Batches, temperature: float, passes: int) -> list[np.ndarray]:
        with torch.no_grad():
            out = score_batches(forward, batches, temperature, layout=self._layout)
            for _ in range(passes - len(batches)):
                forward(pack([NOTHING], [0], layout=self._layout), 1.0)
        return out


def _base(stored: Mapping[str, Tensor], recipe: Recipe) -> dict[str, Tensor]:
    """Under LoRA, the weights below the additions."""
    if not recipe.learner.lora_rank:
        return {}
    frozen = {name: w for name, w in stored.items() if ".lora_" not in name}
    return {f"base/{name}": w for name, w in whole_weights(frozen, recipe.learner).items()}


def _loading_device(shared: bool, device: torch.device) -> torch.device:
    """Weights that are to be shared out are read on the CPU: a whole model may not fit on a rank's device."""
    return torch.device("cpu") if shared else device


def _device(recipe: Recipe) -> torch.device:
    if recipe.runtime.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def main() -> None:
    """Join the other ranks, then serve."""
    import deepspeed

    cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if cpu:
        # DeepSpeed would compile its own all-reduce through shared memory first: minutes, and a compiler is needed.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if cpu else "nccl")
    serve(int(os.environ["RANK"]), RankLearner())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
