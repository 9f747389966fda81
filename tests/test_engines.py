"""Where the policy stands: what is loaded, what is replayed, and that nothing damaged is used."""

import pytest

from flows import engines as module
from flows.console import Display
from flows.engines import Engines
from flows.workflow import Workflow
from pipeline.config import load_recipe
from pipeline.protocols import EngineDied, PolicyVersion, SamplingParams
from pipeline.rundir import RunPaths
from pipeline.types import Completion, StageResult
from stages.checkpoint import new_checkpoint


class Learner:
    """Notes what it is asked to load."""

    def __init__(self):
        self.loaded, self.references = [], []

    def load(self, directory, *, optimizer):
        self.loaded.append((directory.name, optimizer))

    def load_reference(self, directory):
        self.references.append(directory.name)

    def live_policy(self):
        return "the live module"


class MortalSampler:
    """Its engine dies in the first calls, as many as it is told."""

    def __init__(self, deaths):
        self.deaths, self.policies = deaths, []
        self.version = PolicyVersion("none", "")

    def load_policy(self, source, name):
        self.policies.append((source, name))
        self.version = PolicyVersion(name, "")

    def sample(self, prompts, params, seeds):
        if self.deaths:
            self.deaths -= 1
            self.version = PolicyVersion("none", "")
            raise EngineDied("vLLM engine 0 ended by SIGKILL; its last lines (vllm-0.log):\nout of memory")
        assert self.version.name != "none"
        return [[Completion((7,), (-0.5,), "stop") for _ in group] for group in seeds]


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


@pytest.fixture
def sampled(stand, monkeypatch):
    """Runs a stage that samples once from the warm start, with a sampler that dies so many times; and what it saw."""
    engines, _ = stand
    probed = []
    monkeypatch.setattr(Engines, "_probe_prompt", [5])
    monkeypatch.setattr(module, "check_gap", lambda sampler, *_: probed.append(sampler.version.name))

    def run(deaths):
        engines._sampler = MortalSampler(deaths)

        def body(context):
            (group,) = engines.sampler("warm-start").sample([[5]], SamplingParams(4), [[1, 2]])
            return StageResult(context.key, metrics={"completions": len(group)})

        return Workflow(engines.recipe, engines.paths, Display(1, quiet=True)).stage("evaluate/warm-start", body)

    return run, engines, probed


def test_a_stage_whose_sampling_engine_dies_runs_once_more_with_weights_sent_and_proved_again(sampled, caplog):
    run, engines, probed = sampled
    result = run(1)
    assert result.metrics == {"completions": 2}
    assert engines._sampler.policies == [("the live module", "warm-start")] * 2
    assert probed == ["warm-start"] * 2
    assert engines.paths.result_file("evaluate/warm-start").is_file()
    assert "out of memory; once more with a fresh engine" in caplog.text


def test_a_second_death_ends_the_run_with_the_engine_s_last_lines_and_the_stage_stays_open(sampled):
    run, engines, _ = sampled
    with pytest.raises(EngineDied, match=r"ended by SIGKILL; its last lines(.|\n)*out of memory"):
        run(2)
    assert len(engines._sampler.policies) == 2
    assert not engines.paths.result_file("evaluate/warm-start").exists()
