"""Training a scalar head and its backbone: pointwise on labels, or pairwise within a problem."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.backends.policy_model import without_dropout
from pipeline.config import RewardModelConfig
from pipeline.protocols import Progress, no_progress
from rewards.scalar import Marked, ScalarModel, batches

if TYPE_CHECKING:
    import torch

MAX_GRADIENT_NORM = 1.0
"""The whole gradient is shortened to this length where it is longer."""


def fit(
    model: ScalarModel,
    rows: Sequence[Marked],
    config: RewardModelConfig,
    *,
    seed: int,
    pairwise: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train with Adam (no weight decay) on ``rows``; returns the loss of the first and the last tenth of the steps.

    Pointwise: cross-entropy, averaged over all positions of a step. Pairwise: Bradley-Terry, -log sigmoid(better -
    worse), averaged over the pairs of a problem and then over problems; rows of a problem stay in one step.
    """
    plan = [step for epoch in range(config.epochs) for step in _steps(rows, config.batch_size, pairwise, seed, epoch)]
    with _trainable(model, config, seed):
        losses = _train(model, plan, config, pairwise, progress or no_progress)
    tenth = max(1, len(losses) // 10)
    return {
        "steps": len(plan),
        "tokens": sum(len(row.token_ids) for step in plan for row in step),
        "loss_first": sum(losses[:tenth]) / tenth if losses else None,
        "loss_last": sum(losses[-tenth:]) / tenth if losses else None,
    }


def _train(
    model: ScalarModel, plan: Sequence[Sequence[Marked]], config: RewardModelConfig, pairwise: bool, progress: Progress
) -> list[float]:
    """One optimizer step for each element of ``plan``; returns their losses."""
    import torch

    warmup = math.ceil(config.warmup_share * len(plan))
    head, backbone = (
        [model.classifier.score.weight],
        [p for p in model.classifier.base_model.parameters() if p.requires_grad],
    )
    optimizer = torch.optim.AdamW(
        [{"params": backbone, "peak": config.lr}, {"params": head, "peak": config.head_lr}], weight_decay=0.0
    )
    losses = []
    for number, step in enumerate(plan):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, (number + 1) / max(1, warmup))
        loss = _backward(model, step, config.token_budget, pairwise)
        norm = float(torch.nn.utils.clip_grad_norm_([*head, *backbone], MAX_GRADIENT_NORM))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise RuntimeError(
                f"reward model: loss {loss:.4g} and gradient norm {norm:.4g} in step {number + 1} of {len(plan)}: lower "
                f"reward_model.lr"
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        progress(number + 1, len(plan), f"loss {loss:.3f}")
    return losses


@contextmanager
def _trainable(model: ScalarModel, config: RewardModelConfig, seed: int) -> Iterator[None]:
    """With LoRA's additions, which are merged into the weights at the end, and recomputed activations, as configured."""
    import torch

    classifier = model.classifier
    if config.lora_rank:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules="all-linear"
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            adapted: Any = get_peft_model(classifier.base_model, lora)
        setattr(classifier, classifier.base_model_prefix, adapted)
    if config.gradient_checkpointing:
        without_dropout(classifier)
        classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        classifier.train()  # transformers recomputes in training mode only
    yield
    if config.gradient_checkpointing:
        classifier.eval().gradient_checkpointing_disable()
    if config.lora_rank:
        setattr(classifier, classifier.base_model_prefix, adapted.merge_and_unload())


def _steps(rows: Sequence[Marked], batch_size: int, pairwise: bool, seed: int, epoch: int) -> Iterator[list[Marked]]:
    """Rows in an order drawn from (seed, epoch), ``batch_size`` a step; with ``pairwise`` whole problems that have pairs."""
    units: list[list[Marked]] = [[row] for row in rows]
    if pairwise:
        problems: dict[str, list[Marked]] = {}
        for row in rows:
            problems.setdefault(row.problem_id, []).append(row)
        units = [unit for unit in problems.values() if len({row.targets[0] for row in unit}) > 1]
    random.Random(f"{seed}/{epoch}").shuffle(units)
    step: list[Marked] = []
    for unit in units:
        step += unit
        if len(step) >= batch_size:
            yield step
            step = []
    if step:
        yield step


def _backward(model: ScalarModel, step: Sequence[Marked], token_budget: int, pairwise: bool) -> float:
    """Add the gradient of the step's loss, in forward passes of at most ``token_budget`` tokens; returns the loss."""
    import torch

    parts = [[step[i] for i in part] for part in batches([len(row.token_ids) for row in step], token_budget)]
    if pairwise:
        return _backward_pairs(model, parts)
    total, count = 0.0, sum(len(row.positions) for row in step)
    for part in parts:
        values = model.values(part)
        targets = torch.tensor([target for row in part for target in row.targets], device=values.device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(values, targets, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


def _backward_pairs(model: ScalarModel, parts: Sequence[Sequence[Marked]]) -> float:
    """Pairs may lie in different forward passes: the loss is differentiated by the scores first, then each pass by itself."""
    import torch

    rows = [row for part in parts for row in part]
    if len(parts) == 1:
        loss = pairwise_loss(model.values(rows), rows)
        loss.backward()
        return loss.item()
    with torch.no_grad():
        scores = torch.cat([model.values(part) for part in parts])
    scores.requires_grad_()
    loss = pairwise_loss(scores, rows)
    (slopes,) = torch.autograd.grad(loss, scores)
    start = 0
    for part in parts:
        model.values(part).backward(slopes[start : start + len(part)])
        start += len(part)
    return loss.item()


def pairwise_loss(scores: torch.Tensor, rows: Sequence[Marked]) -> torch.Tensor:
    """Mean over problems of the mean over their (better, worse) pairs of -log sigmoid(better - worse); scores [B].

    Source: Bradley-Terry as in arXiv 2203.02155, eq. 1.
    """
    import torch

    members: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(row.problem_id, []).append(index)
    losses = []
    for indices in members.values():
        targets = torch.tensor([rows[index].targets[0] for index in indices], device=scores.device)
        better, worse = torch.where(targets[:, None] > targets[None, :])
        if len(better):
            own = scores[torch.tensor(indices, device=scores.device)]
            losses.append(torch.nn.functional.softplus(own[worse] - own[better]).mean())
    return torch.stack(losses).mean()
