"""Supervised fine-tuning: a stage that is cut off goes on where its last checkpoint stands, and ends in the same bits."""

import logging

import pytest

from pipeline import store
from pipeline.backends.torch_learner import TorchLearner
from pipeline.config import SFTConfig
from pipeline.rundir import RunPaths, StageContext
from stages import sft
from tests.learner_cases import rollouts, tiny_learner_recipe, tiny_policy
from tests.same_run import rows, weights

RECIPE = tiny_learner_recipe("keep_checkpoints=2")
CONFIG = SFTConfig(steps=11, batch_size=4, lr=1e-2, warmup_steps=2, checkpoint_every=3)
PAIRS = rollouts()


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the product may catch it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("base"), RECIPE)


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    paths = RunPaths(tmp_path_factory.mktemp("straight"), "run")
    return paths, train(paths, base)


def train(paths, base, die_after=None):
    """The stage with a fresh learner; returns its result and the numbers of the steps that it took."""
    steps = []

    def progress(done, total, note):
        steps.append(done)
        if done == die_after:
            raise Killed

    context = StageContext(RECIPE, paths, "sft", progress)
    try:
        result = sft.run(context, TorchLearner(RECIPE, base), PAIRS, CONFIG, "warm-start")
    except Killed:
        return None, steps
    return result, steps


def assert_like(straight, paths, result):
    reference, (expected, _) = straight
    assert weights(paths.checkpoint("warm-start")) == weights(reference.checkpoint("warm-start"))
    row_id = ("stage", "step")
    assert rows(paths, "updates", row_id) == rows(reference, "updates", row_id)
    assert result == expected
    assert [path.name for path in paths.checkpoint("").iterdir()] == ["warm-start"]


def test_its_checkpoints_go_when_it_ends_and_every_step_is_a_row(straight):
    paths, (result, steps) = straight
    assert steps == list(range(1, 12))
    assert store.read(paths, "updates", "sft", ["step"]).column("step").to_pylist() == steps
    assert [path.name for path in paths.checkpoint("").iterdir()] == ["warm-start"]
    assert result.metrics["steps"] == 11


@pytest.mark.parametrize(("die_after", "first"), [(2, 1), (3, 1), (4, 4), (8, 7), (11, 10)])
def test_cut_off_anywhere_it_goes_on_from_the_last_checkpoint(straight, base, tmp_path, die_after, first):
    # Checkpoints are after steps 3, 6 and 9; one falls due only when the step has been told, so step 3 itself repeats.
    paths = RunPaths(tmp_path, "run")
    train(paths, base, die_after)
    result, steps = train(paths, base)
    assert steps[0] == first
    assert_like(straight, paths, result)


def test_it_is_cut_off_again_and_again(straight, base, tmp_path):
    paths = RunPaths(tmp_path, "run")
    for die_after in (5, 5, 7, 10):
        train(paths, base, die_after)
    result, steps = train(paths, base)
    assert steps == [10, 11]
    assert_like(straight, paths, result)


def test_damaged_checkpoints_are_passed_over_with_a_warning(straight, base, tmp_path, caplog):
    paths = RunPaths(tmp_path, "run")
    train(paths, base, 10)
    kept = [paths.checkpoint(f"warm-start-step-00000{step}") for step in (6, 9)]
    assert sorted(paths.checkpoint("").iterdir()) == kept
    damage(kept[1])
    with caplog.at_level(logging.WARNING):
        _, steps = train(paths, base, 8)
    assert steps == [7, 8]
    assert "warm-start-step-000009 is damaged" in caplog.text
    damage(kept[0])
    result, steps = train(paths, base)
    assert steps[0] == 1
    assert_like(straight, paths, result)


def test_a_stage_that_died_before_its_result_was_written_takes_no_step_again(straight, base, tmp_path):
    paths = RunPaths(tmp_path, "run")
    train(paths, base)
    result, steps = train(paths, base)
    assert steps == []
    assert_like(straight, paths, result)


def damage(checkpoint):
    state = checkpoint / "learner" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
