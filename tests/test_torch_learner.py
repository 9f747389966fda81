"""The torch learner: same numbers as the straightforward computation, exactly one step, exact continuation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.backends.torch_learner import TorchLearner
from pipeline.models import weights_checksum
from tests.learner_cases import plain_logprobs, rollouts, tiny_learner_recipe, tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), tiny_learner_recipe())


def _learner(folder: Path, *overrides: str) -> TorchLearner:
    return TorchLearner(tiny_learner_recipe(*overrides), folder)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [16, 60, 8192])
def test_logprobs_equal_those_of_each_sequence_alone(folder: Path, temperature: float, budget: int) -> None:
    learner = _learner(folder, f"learner.micro_batch_tokens={budget}")
    sequences = rollouts()
    got = learner.logprobs(sequences, temperature)
    for sequence, ours in zip(sequences, got, strict=True):
        expected = plain_logprobs(learner.live_policy(), sequence, temperature).detach().numpy()
        np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_a_loaded_checkpoint_continues_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    recipe = tiny_learner_recipe()
    straight = TorchLearner(recipe, folder)
    for step in range(2):
        straight.step(rollouts(seed=step), recipe.grpo.objective, 1e-3)
    straight.save(tmp_path)
    resumed = TorchLearner(recipe, folder)
    resumed.load(tmp_path)
    for learner in (straight, resumed):
        learner.step(rollouts(seed=2), recipe.grpo.objective, 1e-3)
    assert weights_checksum(straight.live_policy()) == weights_checksum(resumed.live_policy())


def test_equal_state_saves_equal_bytes(folder: Path, tmp_path: Path) -> None:
    recipe = tiny_learner_recipe()
    files = []
    for name in ("a", "b"):
        learner = TorchLearner(recipe, folder)
        learner.step(rollouts(), recipe.grpo.objective, 1e-3)
        (tmp_path / name).mkdir()
        learner.save(tmp_path / name)
        found = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        files.append({str(p.relative_to(tmp_path / name)): p.read_bytes() for p in found})
    assert files[0] == files[1]


def test_loading_weights_alone_starts_a_fresh_optimizer_in_the_same_module(folder: Path) -> None:
    recipe = tiny_learner_recipe()
    learner = TorchLearner(recipe, folder)
    module, before = learner.live_policy(), weights_checksum(learner.live_policy())
    first = learner.step(rollouts(), recipe.grpo.objective, 1e-3)
    after = weights_checksum(module)
    assert after != before
    learner.load(folder, optimizer=False)
    assert learner.live_policy() is module and weights_checksum(module) == before
    assert learner.step(rollouts(), recipe.grpo.objective, 1e-3)["loss"] == first["loss"]
    assert weights_checksum(module) == after


def test_a_checkpoint_without_optimizer_says_so(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="optimizer=False"):
        _learner(folder).load(folder)


def test_sft_lowers_the_loss_of_completions_it_was_shown(folder: Path) -> None:
    recipe = tiny_learner_recipe()
    learner = TorchLearner(recipe, folder)
    objective = recipe.grpo.objective.model_copy(update={"algorithm": "sft"})
    pairs = rollouts()
    # The loss is the mean negative log-likelihood of the completions' tokens.
    tokens = torch.cat([plain_logprobs(learner.live_policy(), s, 1.0) for s in pairs])
    losses = [learner.step(pairs, objective, 1e-2)["loss"] for _ in range(5)]
    assert losses[0] == pytest.approx(-float(tokens.mean().detach()), rel=1e-5)
    assert losses[-1] < losses[0] - 0.5
