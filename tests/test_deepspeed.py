"""DeepSpeed for real: two ranks on the CPU over gloo, against the torch learner on the same rollouts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.backends.deepspeed_learner import DeepSpeedLearner
from pipeline.backends.learner_state import read_state
from pipeline.backends.nodes import SECRET, free_port
from pipeline.backends.rank_group import RankGroup
from pipeline.backends.torch_learner import TorchLearner
from pipeline.types import TrainSequence
from tests.learner_cases import rollouts, tiny_learner_recipe, tiny_policy

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]
pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'grpoflow[deepspeed]'")

BACKEND = ["learner.backend=deepspeed", "learner.micro_batch_tokens=24"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), tiny_learner_recipe())


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A DeepSpeed learner of two ranks, reopened from the same folder by each test."""
    recipe = tiny_learner_recipe(*BACKEND, "learner.ranks=2", f"learner.zero_stage={request.param}")
    learner = DeepSpeedLearner(recipe, folder, tmp_path_factory.mktemp("scratch"))
    yield learner
    learner.close()


def _weights(learner: TorchLearner | DeepSpeedLearner, directory: Path, *, optimizer: bool = False) -> dict:
    directory.mkdir(exist_ok=True)
    learner.save(directory, optimizer=optimizer)
    return load_file(directory / "model.safetensors")


def _apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_three_steps_end_in_torchs_weights(ranks: DeepSpeedLearner, folder: Path, tmp_path: Path) -> None:
    recipe = tiny_learner_recipe(*BACKEND)
    single = TorchLearner(recipe, folder)
    ranks.load(folder, optimizer=False)
    for seed in range(3):
        expected = single.step(rollouts(seed=seed), recipe.grpo.objective, 1e-3)
        got = ranks.step(rollouts(seed=seed), recipe.grpo.objective, 1e-3)
        timing = {name for name in expected if name.startswith("seconds_")}
        assert got.keys() == expected.keys()
        for name in expected.keys() - timing:
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert _apart(_weights(single, tmp_path / "one"), _weights(ranks, tmp_path / "two")) < 1e-5


def test_logprobs_come_back_in_order(ranks: DeepSpeedLearner, folder: Path) -> None:
    ranks.load(folder, optimizer=False)
    single = TorchLearner(tiny_learner_recipe(*BACKEND), folder)
    empty = TrainSequence("empty", "group-0", (5, 6), ())
    sequences = [*rollouts()[::-1], empty]
    ranks.load_reference(folder)
    for ours, reference, expected in zip(
        ranks.logprobs(sequences, 0.7), ranks.reference_logprobs(sequences, 0.7), single.logprobs(sequences, 0.7),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(ours, expected, atol=1e-6)
        np.testing.assert_allclose(reference, expected, atol=1e-6)
    ranks.load_reference(None)
    with pytest.raises(ValueError, match="load_reference"):
        ranks.reference_logprobs(sequences)


@pytest.mark.parametrize("kept", [0, 1])
def test_ranks_without_work_take_the_step_too(ranks: DeepSpeedLearner, folder: Path, tmp_path: Path, kept: int) -> None:
    """One sequence: the second rank is empty. None (all advantages 0, no KL): both are, and only the moments move."""
    recipe = tiny_learner_recipe(*BACKEND)
    objective = recipe.grpo.objective.model_copy(update={"kl_coefficient": 0.0})
    single = TorchLearner(recipe, folder)
    ranks.load(folder, optimizer=False)
    sequences = [
        TrainSequence(
            s.sequence_id, s.group_id, s.prompt_token_ids, s.completion_token_ids,
            advantages=s.advantages if i < kept else np.zeros_like(s.advantages),
        )
        for i, s in enumerate(rollouts())
    ]  # fmt: skip
    for batch in (rollouts(seed=5), sequences, []):
        single.step(batch, objective, 1e-3)
        ranks.step(batch, objective, 1e-3)
    # AdamW turns the rounding of a gradient near 0 into a share of the learning rate, and here most are near 0.
    assert _apart(_weights(single, tmp_path / "one"), _weights(ranks, tmp_path / "two")) < 5e-5


def test_checkpoints_continue_under_another_backend(ranks: DeepSpeedLearner, folder: Path, tmp_path: Path) -> None:
    recipe = tiny_learner_recipe(*BACKEND)
    objective = recipe.grpo.objective
    ranks.load(folder, optimizer=False)
    for seed in range(2):
        ranks.step(rollouts(seed=seed), objective, 1e-3)
    _weights(ranks, tmp_path / "zero", optimizer=True)
    single = TorchLearner(recipe, folder)
    single.load(tmp_path / "zero")
    for learner in (ranks, single):
        learner.step(rollouts(seed=7), objective, 1e-3)
    _weights(single, tmp_path / "torch", optimizer=True)
    ranks.load(tmp_path / "torch")
    for learner in (ranks, single):
        learner.step(rollouts(seed=8), objective, 1e-3)
    assert _apart(_weights(ranks, tmp_path / "a"), _weights(single, tmp_path / "b")) < 1e-5


def test_a_bad_array_is_refused_before_the_ranks_see_it(ranks: DeepSpeedLearner, folder: Path) -> None:
    ranks.load(folder, optimizer=False)
    bad = TrainSequence("s1", "g", (5,), (6, 7), advantages=np.ones(3, dtype=np.float32))
    objective = tiny_learner_recipe().grpo.objective.model_copy(update={"kl_coefficient": 0.0})
    with pytest.raises(ValueError, match="'s1': 3 advantages for 2 completion tokens"):
        ranks.step([bad], objective, 1e-3)
    assert np.isfinite(ranks.step(rollouts(), objective, 1e-3)["loss"])


@pytest.mark.parametrize(
    "settings",
    [["learner.ranks=3", "learner.zero_stage=3", "learner.offload_optimizer=true"],
     ["learner.ranks=1", "learner.zero_stage=2", "model.dtype=bfloat16"],
     ["learner.ranks=2", "learner.zero_stage=3", "learner.lora_rank=2"]],
    ids=["three ranks offloaded", "one rank bfloat16", "lora"],
)  # fmt: skip
def test_other_settings_resume_where_torch_stands(folder: Path, tmp_path: Path, settings: list[str]) -> None:
    recipe = tiny_learner_recipe(*BACKEND, *settings)
    objective = recipe.grpo.objective
    single = TorchLearner(recipe, folder)
    single.step(rollouts(seed=0), objective, 1e-3)
    _weights(single, tmp_path / "start", optimizer=True)
    learner = DeepSpeedLearner(recipe, folder, tmp_path)
    try:
        learner.load(tmp_path / "start")
        for seed in (1, 2):
            expected = single.step(rollouts(seed=seed), objective, 1e-3)
            got = learner.step(rollouts(seed=seed), objective, 1e-3)
        tolerance = 1e-5 if recipe.model.dtype == "float32" else 1e-2
        assert got["loss"] == pytest.approx(expected["loss"], rel=50 * tolerance)
        assert _apart(_weights(single, tmp_path / "one"), _weights(learner, tmp_path / "two")) < tolerance
    finally:
        learner.close()


def test_bfloat16_parts_keep_the_files_float32_weights(folder: Path, tmp_path: Path) -> None:
    """ZeRO-3 shares a float32 file out as bfloat16; its masters must be the file's weights all the same."""
    recipe = tiny_learner_recipe(*BACKEND, "learner.ranks=2", "learner.zero_stage=3", "model.dtype=bfloat16")
    learner = DeepSpeedLearner(recipe, folder, tmp_path)
    try:
        rounded = _weights(learner, tmp_path / "start", optimizer=True)
        single = TorchLearner(recipe, folder)
        for one in (single, learner):
            one.step(rollouts(), recipe.grpo.objective, 1e-3)
        assert _apart(_weights(single, tmp_path / "one"), _weights(learner, tmp_path / "two")) < 1e-2
    finally:
        learner.close()
    state, stored = read_state(tmp_path / "start"), load_file(folder / "model.safetensors")
    assert stored.keys() == rounded.keys() and any(name.startswith("master/") for name in state)
    for name, weight in stored.items():
        assert torch.equal(state[f"master/{name}"], weight)
        assert torch.equal(rounded[name], weight.bfloat16())


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_two_machines_end_in_one_machines_weights(
    ranks: DeepSpeedLearner, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second machine joins from 127.0.0.1 at 127.0.0.2, in another folder; one rank each, bit for bit."""
    monkeypatch.setenv(SECRET, "a secret of the tests")
    endpoint = f"127.0.0.2:{free_port('127.0.0.2')}"
    settings = ["learner.ranks=2", "learner.nodes=2", "learner.zero_stage=2", f"learner.rendezvous={endpoint}"]
    recipe = tiny_learner_recipe(*BACKEND, *settings)
    joins = f"from pipeline.backends.nodes import join; join({endpoint!r})"
    with subprocess.Popen([sys.executable, "-c", joins], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as other:
        try:
            learner = DeepSpeedLearner(recipe, folder, tmp_path)
            try:
                ranks.load(folder, optimizer=False)
                for seed in range(2):
                    for one in (ranks, learner):
                        one.step(rollouts(seed=seed), recipe.grpo.objective, 1e-3)
                assert _apart(_weights(ranks, tmp_path / "one"), _weights(learner, tmp_path / "two")) == 0
            finally:
                learner.close()
            assert other.stdout is not None
            said = [other.stdout.readline() for _ in range(4)]
        finally:
            other.kill()
    assert "starting 1 ranks as machine 2 of 2" in said[1]
    assert "learner has closed" in said[2] or "ranks have ended" in said[2]
    assert "waiting for a run" in said[3]  # ready for the next learner


def test_a_rank_that_dies_is_one_error(tmp_path: Path) -> None:
    group = RankGroup("tests.dying_rank", 2, tmp_path, {"OMP_NUM_THREADS": "1"})
    assert group.call("echo", [(1,), (2,)]) == [1, 2]
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed in fail: KeyError: 'second'"):
        group.call("fail", [("first",), ("second",)])
    with pytest.raises(RuntimeError, match="closed"):
        group.call("echo", [(1,), (2,)])
    group.close()
    group = RankGroup("tests.dying_rank", 2, tmp_path, {"OMP_NUM_THREADS": "1"})
    with pytest.raises(RuntimeError, match=r"(?s)died in die.*last words"):
        group.call("die", [(0,), (1,)])
