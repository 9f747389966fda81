"""A causal language model with a scalar head: what outcome and process reward models share.

On disk it is a Hugging Face sequence classifier with one label (config.json, model.safetensors, tokenizer), which loads
anywhere. Scores are logits: ``1 / (1 + exp(-score))`` is the probability of being correct.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config import ModelConfig
from pipeline.models import load_tokenizer
from pipeline.protocols import Progress, no_progress

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "bfloat16"]
TOKEN_BUDGET = 4096
"""Tokens, padding included, in one forward pass of scoring."""


@dataclass(frozen=True, slots=True)
class Marked:
    """One token sequence (prompt and completion), the positions of it that are scored, and a target in [0, 1] each."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    targets: Sequence[float] = ()
    problem_id: str = ""


class ScalarModel:
    """Backbone and head on one device. ``dtype`` is that of the passes; weights and scores are float32."""

    def __init__(self, classifier: Any, tokenizer: Any, dtype: Dtype = "float32") -> None:
        self.classifier, self.tokenizer, self.dtype = classifier, tokenizer, dtype

    @classmethod
    def load(
        cls, directory: Path, *, train: bool = False, device: str | None = None, dtype: Dtype = "float32"
    ) -> ScalarModel:
        """A policy's folder with a head of zeros (every score 0), or a folder that ``save`` wrote.

        Weights in float32, no dropout. ``device`` None is the GPU where there is one. ValueError for a model whose
        architecture has no sequence classifier in transformers.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        from pipeline.products import use_onednn

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
        use_onednn(classifier)
        return cls(classifier, load_tokenizer(directory, ModelConfig(name=str(directory))), dtype)

    def save(self, directory: Path) -> None:
        """Write weights, configuration and tokenizer into ``directory``."""
        directory.mkdir(parents=True, exist_ok=True)
        with _quiet():
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
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            hidden = self.classifier.base_model(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        at = at.to(self.device)
        return self.classifier.score(hidden[at[:, 0], at[:, 1]].float()).squeeze(-1)  # [B, T, H] -> [N]

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


KIND_FILE = "reward_model.json"


def write_kind(directory: Path, kind: str, **details: Any) -> None:
    """Note beside the weights what their scores mean."""
    (directory / KIND_FILE).write_text(json.dumps({"kind": kind, **details}, indent=1), encoding="utf-8")


def read_kind(directory: Path, kind: str) -> dict[str, Any]:
    """What ``write_kind`` noted. ValueError for a folder without it, or of another kind."""
    file = directory / KIND_FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if found.get("kind") != kind:
        raise ValueError(
            f"{directory} holds no {kind} reward model ({KIND_FILE} says {found.get('kind', 'nothing')!r}): "
            f"train one with train_{kind}_model"
        )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and table of missing weights: that a policy has no scalar head is expected."""
    from transformers.utils import logging as transformers_logging

    before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()


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
