"""Loss and gradient do not depend on how a step is cut, ordered and laid out: float64 to 1e-10, float32 to rounding."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from pipeline.backends.forward import PolicyForward
from pipeline.backends.objective_step import accumulate, active_members, plan_batches, step_count, step_metrics
from pipeline.backends.policy_model import open_policy
from pipeline.batching import Layout
from pipeline.config import ObjectiveConfig
from pipeline.types import TrainSequence
from tests.learner_cases import plain_logprobs, rollouts, tiny_learner_recipe, tiny_policy

CPU = torch.device("cpu")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "paper": {},
    "gspo": {"ratio": "sequence", "kl_estimator": "k2"},
    "dapo": {"aggregation": "token_mean", "clip_high": 0.28, "kl_coefficient": 0.0, "mask_truncated": True},
    "dr_grpo": {"aggregation": "constant", "kl_weighted": True},
    "cispo": {"surrogate": "cispo", "aggregation": "token_mean", "mismatch": "sequence_mask"},
    "sft": {"algorithm": "sft"},
    "rft": {"algorithm": "rft"},
    "dpo": {"algorithm": "dpo"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), tiny_learner_recipe())


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def model(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny policy; in float64 its norms, which transformers computes in float32, are made to keep the type."""

    def forward(self: Qwen2RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(Qwen2RMSNorm, "forward", forward)
    return open_policy(tiny_learner_recipe(), folder, CPU).to(request.param)


def _sequences(objective: ObjectiveConfig) -> list[TrainSequence]:
    """Near the policy's own logprobs, so that ratios are on both sides of the clip; with signs for DPO."""
    sequences = rollouts(groups=4)
    if objective.algorithm in {"dpo", "rft"}:
        signs = [1.0, -1.0, 0.0, 0.0] if objective.algorithm == "dpo" else [1.0, 0.0, 1.0, 0.0]
        return [
            dataclasses.replace(s, advantages=np.full_like(s.advantages, signs[i % 4])) for i, s in enumerate(sequences)
        ]
    return sequences


def _gradient(
    model: Any, sequences: list[TrainSequence], objective: ObjectiveConfig, layout: Layout, budget: int
) -> tuple[float, torch.Tensor, dict[str, float]]:
    count, members = step_count(sequences, objective), active_members(sequences, objective)
    batches = plan_batches(sequences, members, objective, layout, budget)
    model.zero_grad()
    total = accumulate(
        PolicyForward(model), lambda loss: loss.backward(), sequences, batches, objective,
        count=count, layout=layout, device=CPU,
    )  # fmt: skip
    metrics = step_metrics(total.plain(), sequences, members, objective, count)
    return metrics["loss"], torch.cat([p.grad.flatten() for p in model.parameters()]), metrics


@pytest.mark.parametrize("name", OBJECTIVES)
def test_cut_order_and_layout_change_nothing(model: Any, name: str) -> None:
    objective = ObjectiveConfig(**OBJECTIVES[name])
    sequences = _sequences(objective)
    order = (
        np.random.default_rng(1).permutation(len(sequences)).tolist() if name != "dpo" else [*range(4, 16), *range(4)]
    )
    shuffled = [sequences[i] for i in order]
    loss, gradient, metrics = _gradient(model, sequences, objective, "padded", 1)
    double = gradient.dtype == torch.float64
    assert gradient.abs().max() > 1e-4
    for layout in ("shared", "packed", "padded"):
        for budget in (1, 40, 10_000):
            for given in (sequences, shuffled):
                other_loss, other, other_metrics = _gradient(model, given, objective, layout, budget)  # type: ignore[arg-type]
                assert other_loss == pytest.approx(loss, rel=1e-10 if double else 1e-5, abs=1e-10 if double else 1e-6)
                scale = gradient.abs().max()
                assert (other - gradient).abs().max() <= (1e-10 if double else 1e-5) * scale
                for key in metrics.keys() - {"input_tokens"}:
                    assert other_metrics[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


def test_gradient_is_that_of_the_formula_written_out(model: Any) -> None:
    """Paper's objective on whole sequences one by one: log-softmax of all logits, mean over tokens, mean over outputs."""
    objective = ObjectiveConfig(kl_coefficient=0.04)
    sequences = [dataclasses.replace(s, old_logprobs=None) for s in rollouts(groups=2)]
    loss, gradient, _ = _gradient(model, sequences, objective, "shared", 10_000)
    model.zero_grad()
    written = torch.zeros((), dtype=gradient.dtype)
    for s in sequences:
        logprobs = plain_logprobs(model, s, 1.0)
        difference = torch.as_tensor(s.ref_logprobs).to(logprobs.dtype) - logprobs
        ratio = (logprobs - logprobs.detach()).exp()
        tokens = -ratio * torch.as_tensor(s.advantages) + 0.04 * (difference.exp() - difference - 1)
        written = written + tokens.mean() / len(sequences)
    written.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    double = gradient.dtype == torch.float64
    assert loss == pytest.approx(float(written.detach()), rel=1e-9 if double else 1e-5)
    assert (gradient - expected).abs().max() <= (1e-9 if double else 1e-5) * expected.abs().max()


def test_sequences_without_signal_are_counted_but_not_run(model: Any) -> None:
    objective = ObjectiveConfig(kl_coefficient=0.0)
    sequences = rollouts()
    silent = [dataclasses.replace(s, advantages=np.zeros_like(s.advantages)) for s in rollouts(seed=1)]
    empty = TrainSequence("e", "g", (5,), (), **{n: np.zeros(0, np.float32) for n in ("advantages", "old_logprobs")})
    both = [*silent, *sequences, empty]
    assert active_members(both, objective) == list(range(12, 24))
    loss, gradient, metrics = _gradient(model, sequences, objective, "shared", 100)
    other_loss, other, others = _gradient(model, both, objective, "shared", 100)
    # 12 sequences of 25 carry the loss
    assert other_loss == pytest.approx(loss * 12 / 25, rel=1e-5)
    torch.testing.assert_close(other, gradient * 12 / 25, rtol=1e-4, atol=1e-6)
    assert others["skipped_sequences"] == 13 and others["sequences"] == 25 and others["entropy"] == metrics["entropy"]
    with_kl = objective.model_copy(update={"kl_coefficient": 0.1})
    assert active_members(both, with_kl) == list(range(24))


def test_masked_truncated_completions_leave_numerator_and_count(model: Any) -> None:
    objective = ObjectiveConfig(mask_truncated=True)
    sequences = rollouts()
    kept = [s for s in sequences if not s.truncated]
    loss, gradient, metrics = _gradient(model, sequences, objective, "shared", 100)
    other_loss, other, _ = _gradient(model, kept, objective, "shared", 100)
    assert loss == pytest.approx(other_loss, rel=1e-6)
    torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-7)
    assert metrics["truncated_share"] == 0.25 and metrics["sequences"] == 9
