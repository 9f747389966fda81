"""Supervised fine-tuning: the warm start on worked solutions, and the regeneration on rejection-sampled completions."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pipeline import store
from pipeline.config import SFTConfig
from pipeline.protocols import Learner
from pipeline.rows import update_row
from pipeline.rundir import StageContext
from pipeline.types import StageResult, TrainSequence
from stages.checkpoint import inner_checkpoint, is_intact, prune_step_checkpoints, save_checkpoint
from stages.update import mean_metrics, scheduled_lr

logger = logging.getLogger(__name__)

LOG_EVERY = 10


def run(
    context: StageContext, learner: Learner, pairs: Sequence[TrainSequence], config: SFTConfig, checkpoint: str
) -> StageResult:
    """Train on prompt and completion pairs, loss on the completions only, and save the checkpoint.

    A step is a function of the state before it and its number: a stage that was cut off goes on from its newest intact
    checkpoint and ends in the same weights bit for bit.
    """
    if config.steps and not pairs:
        raise ValueError(
            f"{context.key}: no training pairs: none of the selected problems has a solution; "
            f"add solutions to the data (data.sources columns.solution) or set {context.key}'s steps to 0"
        )
    objective = context.recipe.grpo.objective.model_copy(update={"algorithm": "sft", "temperature": 1.0})
    rows, started, tokens = [], time.monotonic(), 0.0
    for step in range(_start(context, learner, config, checkpoint), config.steps):
        batch = [pairs[i] for i in batch_indices(len(pairs), config.batch_size, step, context.seed("order"))]
        lr = scheduled_lr(config.lr, step, config.steps, config.warmup_steps, config.schedule)
        metrics = learner.step(batch, objective, lr)
        rows.append(update_row(context.paths.run_id, context.key, None, step + 1, metrics))
        tokens += metrics["tokens"]
        if context.progress:
            rate = tokens / (time.monotonic() - started)
            context.progress(step + 1, config.steps, f"loss {metrics['loss']:.3f} {rate:,.0f} tok/s")
        if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.steps:
            _record(context, rows)
            save_checkpoint(context, learner, inner_checkpoint(checkpoint, step + 1), optimizer=True)
            prune_step_checkpoints(context.paths, context.recipe.keep_checkpoints, of=checkpoint)
    _record(context, rows)
    save_checkpoint(context, learner, checkpoint, optimizer=False)
    prune_step_checkpoints(context.paths, 0, of=checkpoint)
    return StageResult(
        context.key,
        outputs={"checkpoint": f"checkpoints/{checkpoint}"},
        metrics={**_measured(context), "steps": config.steps, "pairs": len(pairs)},
    )


def _start(context: StageContext, learner: Learner, config: SFTConfig, checkpoint: str) -> int:
    """Steps that an earlier attempt has behind it, with the learner brought there; 0 for the first attempt."""
    if is_intact(context.paths.checkpoint(checkpoint)):
        return config.steps
    for step in reversed(range(config.checkpoint_every, config.steps, config.checkpoint_every)):
        directory = context.paths.checkpoint(inner_checkpoint(checkpoint, step))
        if is_intact(directory):
            logger.info("%s goes on after step %d of %d", context.key, step, config.steps)
            learner.load(directory, optimizer=True)
            return step
        if directory.is_dir():
            logger.warning("checkpoint %s is damaged; going back to the one before it", directory.name)
    return 0


def _record(context: StageContext, rows: Sequence[dict[str, Any]]) -> None:
    """Append the rows that no earlier attempt recorded. Before each checkpoint: none is missing when it is loaded."""
    recorded = len(store.read(context.paths, "updates", context.key, ["step"]))
    new = [row for row in rows if row["step"] > recorded]
    if new:
        store.append(context.paths, "updates", context.key, new, part=recorded)


def _measured(context: StageContext) -> dict[str, float]:
    """Tokens of the whole stage and the mean loss of its last steps, from the recorded rows."""
    rows = store.read(context.paths, "updates", context.key, ["loss", "tokens"]).to_pylist()
    last = mean_metrics([{"loss": row["loss"]} for row in rows[-LOG_EVERY:]])
    return {**last, "tokens": sum(row["tokens"] for row in rows)}


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
