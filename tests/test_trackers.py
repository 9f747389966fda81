"""Trackers: the same steps that the terminal shows, once each whatever happened, and nothing where none is named."""

import sys
from types import SimpleNamespace

import pytest

from flows.runs import open_run
from flows.trackers import Sink, Trackers, check_installed, given_before, trackers_of
from pipeline.config import load_recipe
from pipeline.rundir import RunPaths, read_result
from tests.tiny import tiny_recipe, tiny_run

TENSORBOARD = 'trackers=["tensorboard"]'


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(root):
    return tiny_run(root, TENSORBOARD)


def points(paths):
    """What TensorBoard reads in a run's folder: {name: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(paths.tracker("tensorboard")))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_every_step_and_evaluation_once(run):
    _, paths = run
    found = points(paths)
    # 2 rounds of 3 steps: the x-axis goes on counting in the second round.
    assert [step for step, _ in found["train/reward"]] == [1, 2, 3, 4, 5, 6]
    fourth = read_result(paths, "round-02/step-0001/reward").metrics["reward"]
    assert found["train/reward"][3] == (4, pytest.approx(fourth))
    assert [step for step, _ in found["evaluation/pass@1"]] == [0, 3, 6]
    final = read_result(paths, "evaluate/final").metrics["pass@1"][0]
    assert found["final/pass@1"] == [(6, pytest.approx(final))]


def test_a_run_that_is_started_again_logs_nothing_twice(run, root):
    _, paths = run
    before = points(paths)
    tiny_run(root, TENSORBOARD)
    assert points(paths) == before


def test_trackers_may_be_left_and_taken_up_while_a_run_goes_on(run, root):
    recipe, _ = run
    for change in ([], [TENSORBOARD]):
        same, _ = open_run("embedded", [*tiny_recipe(root), *change], "tiny", None, root)
        again, _ = open_run(None, [], "tiny", None, root)  # what `run --run-id tiny` continues with
        assert same.trackers == again.trackers == (("tensorboard",) if change else ())
        assert same.digest == recipe.digest


def test_a_tracker_that_is_not_installed_is_named_before_a_run_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"trackers has 'wandb', which is not installed: pip install wandb"):
        open_run("smoke", ['trackers=["wandb"]'], "mine", None, tmp_path)
    assert not list(tmp_path.iterdir())
    check_installed(load_recipe("smoke"))


def test_no_tracker_is_loaded_unless_the_recipe_names_it(tmp_path):
    recipe = load_recipe("smoke")
    assert recipe.trackers == ()
    with trackers_of(recipe, RunPaths(tmp_path, "mine")) as observers:
        assert observers == ()
    with pytest.raises(ValueError, match=r"trackers\.0 is 'mlflow'"):
        load_recipe("smoke", ['trackers=["mlflow"]'])


ROW = {"round": 2, "step": 1, "steps": 3, "reward": 0.5, "kl": None, "entropy": float("nan")}


def listing(file, seen):
    return Sink("list", lambda values, step, time: seen.append((values, step)), lambda: None, file)


def test_what_a_service_was_given_is_not_given_again_in_the_next_life(tmp_path):
    file, seen = tmp_path / "given.txt", []
    for _ in range(2):
        trackers = Trackers([listing(file, seen)], 2, 3)
        trackers.step(ROW)
        trackers.step({**ROW, "step": 2})
        trackers.evaluated("round-02", {"pass@1": [0.5, 0.4, 0.6], "completion_length": 7.0})
    # Only numbers travel: no KL of a loss without one, no value that is not finite.
    assert seen == [({"train/reward": 0.5}, 4), ({"train/reward": 0.5}, 5), ({"evaluation/pass@1": 0.5}, 6)]


def test_a_line_that_a_crash_cut_off_was_not_given(tmp_path):
    file = tmp_path / "given.txt"
    file.write_text("step 1\nstep 12")
    assert "step 12" not in given_before(file)
    assert file.read_text() == "step 1\n"


def test_a_tracker_that_fails_is_left_and_the_others_go_on(caplog):
    seen = []

    def broken(values, step, time):
        raise ConnectionError("no route to host")

    trackers = Trackers([Sink("broken", broken, lambda: None), listing(None, seen)], 2, 3)
    trackers.step(ROW)
    trackers.step({**ROW, "step": 2})
    assert [step for _, step in seen] == [4, 5]
    assert caplog.text.count("tracker broken is left") == 1


def test_wandb_is_told_the_run_and_asked_for_nothing_else(tmp_path, monkeypatch):
    calls, logged = {}, []
    run = SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: calls.update(ended=True)
    )
    fake = SimpleNamespace(init=lambda **given: calls.update(given) or run, Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake)
    recipe, paths = open_run("smoke", ['trackers=["wandb"]'], "mine", None, tmp_path)
    for _ in range(2):
        with trackers_of(recipe, paths) as (trackers,):
            trackers.step(ROW)
    assert logged == [((2 - 1) * recipe.grpo.steps + 1, {"train/reward": 0.5})]
    assert calls["ended"] and calls["resume"] == "allow" and calls["name"] == "mine"
    assert calls["settings"]["console"] == "off" and calls["settings"]["disable_code"]


def test_a_tracker_that_cannot_be_opened_is_one_line(tmp_path, monkeypatch):
    def refuse(**given):
        raise RuntimeError("no API key\nconfigured")

    fake = SimpleNamespace(init=refuse, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake)
    recipe, paths = open_run("smoke", ['trackers=["wandb"]'], "mine", None, tmp_path)
    with (
        pytest.raises(ValueError, match=r"trackers: wandb cannot be opened .*no API key configured"),
        trackers_of(recipe, paths),
    ):
        pass
