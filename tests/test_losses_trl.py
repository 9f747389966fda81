"""Loss and gradient equal to those of TRL 1.16's own function on the same tensors, padded there, flat here."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.advantages import outcome_advantages
from pipeline.config import AdvantageConfig, ObjectiveConfig
from pipeline.losses import LossInputs, loss_count
from pipeline.losses_unified import objective_loss

trl_trainer = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="trl is not installed: pip install 'grpoflow[test]'"
)

LENGTHS = [3, 1, 6, 2]
MAX_TOKENS = 8
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.2}
CASES = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "sequence_mean"}),
    "bnpo at full batch": ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "constant"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregation": "token_mean", "clip_high": 0.28}),
    # TRL caps the ratio at epsilon_high itself, we at 1 + clip_high
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"surrogate": "cispo", "clip_high": 0.1, "aggregation": "token_mean"},
    ),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
    "two-sided clip": ({"loss_type": "grpo", "delta": 1.3}, {"delta": 1.3}),
}
KL = {
    "no KL": ({"beta": 0.0}, {"kl_coefficient": 0.0}),
    "KL": ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl_coefficient": 0.04}),
    "weighted KL": ({"beta": 0.04, "use_bias_correction_kl": True}, {"kl_coefficient": 0.04, "kl_weighted": True}),
}


def _draw(seed: int = 0) -> dict[str, Tensor]:
    """[B, T] float64 tensors as TRL has them; whatever stands in the padding must not matter."""
    draw = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal(scale: float) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) * scale

    old = -2 * torch.rand(shape, generator=draw, dtype=torch.float64) - 0.2
    mask = (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).long()
    return {
        "logprobs": (old + normal(0.3)).requires_grad_(), "old_per_token_logps": old, "completion_mask": mask,
        "ref_per_token_logps": old + normal(0.3), "advantages": normal(1.0)[:, 0],
    }  # fmt: skip


def _trl_loss(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """``GRPOTrainer._compute_loss`` with the model's part replaced by the given logprobs."""
    options = {"beta": 0.0, "use_bias_correction_kl": False, "delta": None, "importance_sampling_level": "token"}
    options |= CLIP | settings
    logprobs = tensors["logprobs"]
    trainer = SimpleNamespace(
        **options, args=SimpleNamespace(**options, steps_per_generation=1), aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
        vllm_importance_sampling_correction=False, max_completion_length=MAX_TOKENS,
        current_gradient_accumulation_steps=1, model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )  # fmt: skip
    mask = tensors["completion_mask"]
    ids = torch.zeros_like(mask)
    batch = {
        "prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "num_items_in_batch": mask.sum(),
        **{name: tensor for name, tensor in tensors.items() if name != "logprobs"},
    }  # fmt: skip
    return trl_trainer.GRPOTrainer._compute_loss(trainer, None, batch)


def _our_loss(tensors: dict[str, Tensor], config: ObjectiveConfig) -> Tensor:
    keep = tensors["completion_mask"].bool()
    lengths = torch.tensor(LENGTHS)
    data = LossInputs(
        logprobs=tensors["logprobs"][keep], old_logprobs=tensors["old_per_token_logps"][keep],
        ref_logprobs=tensors["ref_per_token_logps"][keep], lengths=lengths,
        advantages=tensors["advantages"].repeat_interleave(lengths), mask=torch.ones(sum(LENGTHS), dtype=torch.bool),
        sequence=torch.arange(len(LENGTHS)).repeat_interleave(lengths),
    )  # fmt: skip
    return objective_loss(data, config).loss / loss_count(LENGTHS, [False] * len(LENGTHS), config)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trl(case: str, kl: str, seed: int) -> None:
    tensors = _draw(seed)
    theirs = _trl_loss(tensors, CASES[case][0] | KL[kl][0])
    config = ObjectiveConfig(**{"max_tokens": MAX_TOKENS, **CASES[case][1], **KL[kl][1]})
    ours = _our_loss(tensors, config)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    expected, got = (torch.autograd.grad(loss, tensors["logprobs"])[0] for loss in (theirs, ours))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_advantages_equal_trls_formula() -> None:
    # TRL: (r - nanmean) / (Bessel-corrected nanstd + 1e-4), None as nan, then 0
    rewards = [1.0, 0.0, 0.5, None, 0.2, 0.9, 0.1, 0.4]
    table = torch.tensor([np.nan if r is None else r for r in rewards]).view(2, 4)
    std = trl_trainer.nanstd(table, dim=1)
    expected = torch.nan_to_num((table - table.nanmean(1, keepdim=True)) / (std[:, None] + 1e-4)).flatten()
    got = outcome_advantages(rewards, ["a"] * 4 + ["b"] * 4, AdvantageConfig(ddof=1, epsilon=1e-4)).values
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-7)
