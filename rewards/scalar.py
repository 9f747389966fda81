"""A causal language model with a scalar head, and its training loop: what outcome and process reward models share.

On disk it is a Hugging Face sequence classifier with one label (config.json, model.safetensors, tokenizer), which loads
anywhere. Scores are logits: ``1 / (1 + exp(-score))`` is the probability of being correct.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import ModelConfig, RewardModelConfig
from pipeline.models import load_tokenizer
from pipeline.protocols import Progress, no_progress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TOKEN_BUDGET = 4096
"""Tokens, padding included, in one forward pass of scoring."""
MAX_GRADIENT_NORM = 1.0
"""The whole gradient is shortened to this length where it is longer."""


@dataclass(frozen=True, slots=True)
class Marked:
    """One token sequence (prompt and completion), the positions of it that are scored, and a target in [0, 1] each."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    targets: Sequence[float] = ()
    problem_id: str = ""


class ScalarModel:
    """Backbone and head on one device."""

    def __init__(self, classifier: Any, tokenizer: Any) -> None:
        self.classifier, self.tokenizer = classifier, tokenizer

    @classmethod
    def load(cls, directory: Path, *, train: bool = False, device: str | None = None) -> ScalarModel:
        """A policy's folder with a head of zeros (every score 0), or a folder that ``save`` wrote.

        Weights in float32, no dropout. ``device`` None is the GPU where there is one. ValueError for a model whose
        architecture has no sequence classifier in transformers.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        with torch.random.fork_rng(devices=[]), _quiet():  # a new head is filled from the global generator
            try:
                classifier, info = AutoModelForSequenceClassification.from_pretrained(
                    str(directory), num_labels=1, dtype=torch.float32, use_safetensors=True, output_loading_info=True
                )
            except ValueError as error:
                raise ValueError(
                    f"reward model from {directory}: transformers has no sequence classifier for this architecture "
                    f"({str(error).splitlines()[0]}); take another policy or remove rewards.weights.reward_model"
                ) from None
        if any(name.startswith("score.") for name in info["missing_keys"]):
            torch.nn.init.zeros_(classifier.score.weight)
        classifier.config.problem_type = "regression"
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        classifier = classifier.to(device).eval().requires_grad_(train)
        return cls(classifier, load_tokenizer(directory, ModelConfig(name=str(directory))))

    def save(self, directory: Path) -> None:
        """Write weights, configuration and tokenizer into ``directory``."""
        directory.mkdir(parents=True, exist_ok=True)
        self.classifier.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def values(self, rows: Sequence[Marked]) -> torch.Tensor:
        """float32 [N]: the scores at all positions of all rows, in order, in one padded forward pass."""
        import torch

        lengths = [len(row.token_ids) for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)  # [B, T]; what stands in the padding is never read
        for index, row in enumerate(rows):
            ids[index, : lengths[index]] = torch.as_tensor(row.token_ids)
        at = torch.tensor([(index, position) for index, row in enumerate(rows) for position in row.positions])
        # Padding comes last and attention is causal: no real token sees it, so no mask is needed.
        hidden = self.classifier.base_model(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        at = at.to(self.device)
        return self.classifier.score(hidden[at[:, 0], at[:, 1]]).squeeze(-1).float()  # [B, T, H] -> [N]

    @property
    def device(self) -> torch.device:
        return self.classifier.score.weight.device

    def score(self, rows: Sequence[Marked], progress: Progress | None = None) -> list[list[float]]:
        """The scores of each row at its positions, in order; rows without positions have none."""
        import torch

        scores: list[list[float]] = [[] for _ in rows]
        wanted = [index for index, row in enumerate(rows) if len(row.positions)]
        done = 0
        with torch.inference_mode():
            for batch in batches([len(rows[index].token_ids) for index in wanted], TOKEN_BUDGET):
                chosen = [wanted[index] for index in batch]
                values = iter(self.values([rows[index] for index in chosen]).tolist())
                for index in chosen:
                    scores[index] = [next(values) for _ in rows[index].positions]
                done += len(chosen)
                (progress or no_progress)(done, len(wanted), "reward model")
        return scores


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' table of missing weights: that a policy has no scalar head is expected."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices by falling length in batches of at most ``token_budget`` tokens, padding included.

    A sequence longer than the budget is a batch of its own. Example: lengths 3, 8, 4 with a budget of 8 give
    [[1], [2, 0]], since 2 x 4 = 8.
    """
    out: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if out and (len(out[-1]) + 1) * lengths[out[-1][0]] <= token_budget:
            out[-1].append(index)
        else:
            out.append([index])
    return out


Loss = Callable[["torch.Tensor", Sequence[Marked]], "torch.Tensor"]
"""From the scores of a step's rows to the step's loss."""


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
    import torch

    plan = [step for epoch in range(config.epochs) for step in _steps(rows, config.batch_size, pairwise, seed, epoch)]
    warmup = math.ceil(config.warmup_share * len(plan))
    head, backbone = [model.classifier.score.weight], list(model.classifier.base_model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": backbone, "peak": config.lr}, {"params": head, "peak": config.head_lr}], weight_decay=0.0
    )
    losses = []
    for number, step in enumerate(plan):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, (number + 1) / max(1, warmup))
        loss = _backward(model, step, config.token_budget, pairwise)
        torch.nn.utils.clip_grad_norm_([*head, *backbone], MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        if not math.isfinite(loss):
            raise RuntimeError(
                f"reward model: the loss is {loss} in step {number + 1} of {len(plan)}: lower reward_model.lr"
            )
        (progress or no_progress)(number + 1, len(plan), f"loss {loss:.3f}")
    tenth = max(1, len(losses) // 10)
    return {
        "steps": len(plan),
        "tokens": sum(len(row.token_ids) for step in plan for row in step),
        "loss_first": sum(losses[:tenth]) / tenth if losses else None,
        "loss_last": sum(losses[-tenth:]) / tenth if losses else None,
    }


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
