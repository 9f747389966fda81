"""Where the policy stands: what is loaded, what is replayed, and that nothing damaged is used."""

import pytest

from flows import engines as module
from flows.engines import Engines
from pipeline.config import load_recipe
from pipeline.rundir import RunPaths
from stages.checkpoint import new_checkpoint


class Learner:
    """Notes what it is asked to load."""

    def __init__(self):
        self.loaded, self.references = [], []

    def load(self, directory, *, optimizer):
        self.loaded.append((directory.name, optimizer))

    def load_reference(self, directory):
        self.references.append(directory.name)


@pytest.fixture
def stand(tmp_path, monkeypatch):
    """Engines over checkpoints warm-start and round-01-step-0002 of rounds of four steps, and the steps replayed."""
    recipe = load_recipe("embedded", ["grpo.steps=4", "grpo.rounds=2", "checkpoint_every=2"])
    paths = RunPaths(tmp_path, "run")
    for name in ("warm-start", "round-01-step-0002"):
        with new_checkpoint(paths, name) as partial:
            (partial / "model.safetensors").write_text(name)
    replayed = []
    monkeypatch.setattr(module.update, "run", lambda context, learner, round_, step: replayed.append((round_, step)))
    engines = Engines(recipe, paths, None)
    engines._learner = Learner()
    return engines, replayed


def damage(engines, name):
    (engines.paths.checkpoint(name) / "model.safetensors").write_text("xxxx")


def test_going_forward_takes_the_newest_checkpoint_and_replays_only_what_is_behind_it(stand):
    engines, replayed = stand
    engines.policy_of("warm-start")  # what RFT samples from before every step
    engines.policy_after(3)
    assert engines._learner.loaded == [("warm-start", False), ("round-01-step-0002", True)]
    assert replayed == [(1, 3)]
    engines.policy_after(3)
    assert len(engines._learner.loaded) == 2


def test_a_damaged_checkpoint_is_passed_over_and_recorded_updates_take_its_place(stand):
    engines, replayed = stand
    damage(engines, "round-01-step-0002")
    engines.policy_after(0)
    engines.policy_after(3)
    assert engines._learner.loaded == [("warm-start", False)]
    assert replayed == [(1, 1), (1, 2), (1, 3)]


def test_a_damaged_checkpoint_is_never_a_reference_nor_a_start(stand):
    engines, _ = stand
    damage(engines, "warm-start")
    for use in (lambda: engines.hold_reference(1), lambda: engines.policy_from("warm-start")):
        with pytest.raises(ValueError, match=r"'warm-start' is damaged .* --resume-from sft"):
            use()
    assert engines._learner.loaded == engines._learner.references == []
