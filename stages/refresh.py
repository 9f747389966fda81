"""Refresh, the end of a round: the policy becomes the next round's reference, the reward models learn the new rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.protocols import Learner
from pipeline.rundir import StageContext
from pipeline.types import StageResult
from stages import reward_model
from stages.checkpoint import save_checkpoint


def run(context: StageContext, learner: Learner, round_: int, relabel: Callable[[], dict[str, Any]]) -> StageResult:
    """Save the policy as ``checkpoints/round-XX``; train the reward models of this name where the recipe has them.

    ``relabel`` does so for the process reward model, which needs the new policy's sampler.
    """
    name, recipe = f"round-{round_:02d}", context.recipe
    save_checkpoint(context, learner, name, optimizer=True)
    outputs, metrics = {"policy": f"checkpoints/{name}"}, {}
    if recipe.has_reward_model:
        metrics.update(reward_model.refresh(context, round_))
        outputs["reward_model"] = f"checkpoints/reward-model-{round_:02d}"
    if recipe.has_process_model:
        metrics.update({f"process/{key}": value for key, value in relabel().items()})
        outputs["process_model"] = f"checkpoints/process-model-{round_:02d}"
    return StageResult(context.key, outputs, metrics)
