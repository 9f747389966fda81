"""Refresh, the end of a round: the policy becomes the next round's reference, the reward model learns the new rollouts."""

from __future__ import annotations

from pipeline.protocols import Learner
from pipeline.rundir import StageContext
from pipeline.types import StageResult
from stages import reward_model
from stages.checkpoint import save_checkpoint


def run(context: StageContext, learner: Learner, round_: int) -> StageResult:
    """Save the policy as ``checkpoints/round-XX``; train ``reward-model-XX`` where the recipe pays by one."""
    name = f"round-{round_:02d}"
    save_checkpoint(context, learner, name, optimizer=True)
    learned = bool(context.recipe.rewards.weights.get("reward_model"))
    metrics = reward_model.refresh(context, round_) if learned else {}
    outputs = {"policy": f"checkpoints/{name}"}
    if learned:
        outputs["reward_model"] = f"checkpoints/reward-model-{round_:02d}"
    return StageResult(context.key, outputs, metrics)
