"""Supervised fine-tuning: the warm start on worked solutions, and the regeneration on rejection-sampled completions."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import lru_cache

from pipeline import store
from pipeline.config import SFTConfig
from pipeline.protocols import Learner
from pipeline.rows import update_row
from pipeline.rundir import StageContext
from pipeline.types import StageResult, TrainSequence
from stages.checkpoint import save_checkpoint
from stages.update import mean_metrics, scheduled_lr

LOG_EVERY = 10


def run(
    context: StageContext, learner: Learner, pairs: Sequence[TrainSequence], config: SFTConfig, checkpoint: str
) -> StageResult:
    """Train on prompt and completion pairs, loss on the completions only, and save the checkpoint."""
    if config.steps and not pairs:
        raise ValueError(
            f"{context.key}: no training pairs: none of the selected problems has a solution; "
            f"add solutions to the data (data.sources columns.solution) or set {context.key}'s steps to 0"
        )
    objective = context.recipe.grpo.objective.model_copy(update={"algorithm": "sft", "temperature": 1.0})
    rows, started, tokens = [], time.monotonic(), 0.0
    for step in range(config.steps):
        batch = [pairs[i] for i in batch_indices(len(pairs), config.batch_size, step, context.seed("order"))]
        lr = scheduled_lr(config.lr, step, config.steps, config.warmup_steps, config.schedule)
        metrics = learner.step(batch, objective, lr)
        rows.append(update_row(context.paths.run_id, context.key, None, step + 1, metrics))
        tokens += metrics["tokens"]
        if context.progress:
            rate = tokens / (time.monotonic() - started)
            context.progress(step + 1, config.steps, f"loss {metrics['loss']:.3f} {rate:,.0f} tok/s")
    if not store.has(context.paths, "updates", context.key) and rows:
        store.append(context.paths, "updates", context.key, rows)
    save_checkpoint(context, learner, checkpoint, optimizer=False)
    last = mean_metrics([{"loss": row["loss"]} for row in rows[-LOG_EVERY:]]) if rows else {}
    return StageResult(
        context.key,
        outputs={"checkpoint": f"checkpoints/{checkpoint}"},
        metrics={**last, "steps": config.steps, "pairs": len(pairs), "tokens": tokens},
    )


def batch_indices(count: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Which pairs make up a step: every pair once an epoch, each epoch in its own order, a function of the step alone."""
    indices = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, count)
        indices.append(_permutation(count, seed, epoch)[offset])
    return indices


@lru_cache(maxsize=1)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
