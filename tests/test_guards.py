"""Guards: what crosses a limit, and what then happens: a warning, a stop, or the way back to an earlier policy."""

import math

import pytest

from flows.console import Display
from flows.engines import Engines
from flows.execute import execute
from flows.runs import open_run
from flows.status import stops
from pipeline import store
from pipeline.backends.masters import Masters
from pipeline.config import load_recipe
from pipeline.config.guards import GuardsConfig
from pipeline.events import RunStopped, record_event
from pipeline.protocols import NotFinite
from pipeline.rundir import RunPaths, StageContext, read_result, write_result
from pipeline.types import StageResult
from stages.checkpoint import new_checkpoint
from stages.guards import StepFigures, crossings, last_good, watch
from tests.same_run import compare
from tests.tiny import tiny_run

CALM = StepFigures(
    kl=0.1, entropy=0.5, length=20.0, truncated=0.1, sampler_gap=1e-3, gradient_norm=1.0, reward=0.5, correct=0.5
)


def changed(**figures):
    return StepFigures(**{name: figures.get(name, getattr(CALM, name)) for name in CALM.__slots__})


def crossed(config, now, recent=()):
    return [(found.guard, found.value) for found in crossings(config, now, CALM, [*recent, now])]


# -- what crosses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, []),
        ({"kl": 1.5}, [("kl", 1.5)]),
        ({"kl": 1.0}, []),  # the limit itself is allowed
        ({"entropy": 0.001}, [("entropy", 0.001)]),
        ({"length": 90.0}, [("length", 4.5)]),  # 90 / 20
        ({"length": 4.0}, [("length", 0.2)]),  # 4 / 20, below 1 / 4
        ({"truncated": 0.75}, [("truncated", 0.75)]),
        ({"sampler_gap": 0.2}, [("sampler_gap", 0.2)]),
        ({"gradient_norm": 101.0}, [("gradient_norm", 101.0)]),
        ({"kl": None, "entropy": None, "length": None, "sampler_gap": None}, []),
        ({"kl": 2.0, "truncated": 1.0}, [("kl", 2.0), ("truncated", 1.0)]),
    ],
)
def test_a_figure_past_its_limit_crosses_and_one_that_is_missing_does_not(figures, expected):
    assert crossed(GuardsConfig(), changed(**figures)) == expected


def test_a_guard_that_is_off_sees_nothing():
    assert crossed(GuardsConfig(off=("kl",)), changed(kl=9.0)) == []


def test_a_reward_that_rises_while_correctness_falls_crosses_once_the_window_is_full():
    config = GuardsConfig(window=4, hacking=0.1)
    steps = [
        changed(reward=r, correct=c) for r, c in [(0.4, 0.6), (0.5, 0.5), (0.6, 0.4), (0.7, 0.3)]
    ]  # halves: reward 0.45 to 0.65, correct 0.55 to 0.35: a fall of 0.2
    assert crossed(config, steps[3], steps[:3]) == [("hacking", pytest.approx(0.2))]
    assert crossed(config, steps[3], steps[1:3]) == []
    assert crossed(GuardsConfig(window=4, hacking=0.25), steps[3], steps[:3]) == []
    falling = [changed(reward=0.5, correct=step.correct) for step in steps]  # a reward that does not rise is no hacking
    assert crossed(config, falling[3], falling[:3]) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('guards.stop=["kll"]', r"guards\.stop\.0 is 'kll'"),
        ("guards.off=[\"kl\"]\nguards.stop=['kl']", r"guards\.off and guards\.stop both name 'kl'"),
        ('guards.off=["non_finite"]', r"guards\.off names 'non_finite'"),
        ("timeouts.rolout=3", "rolout"),
        ("timeouts.rollout=0", r"timeouts\.rollout is 0"),
    ],
)
def test_a_mistake_in_a_limit_is_named(override, words):
    with pytest.raises(ValueError, match=words):
        load_recipe("embedded", override.split("\n"))


# -- where the way back leads ---------------------------------------------------------------------------------------


@pytest.fixture
def steps(tmp_path):
    """Two rounds of six steps with checkpoints every two; ``done(n, back)`` completes update n, undone when back is given."""
    recipe = load_recipe("embedded", ["grpo.steps=6", "grpo.rounds=2", "checkpoint_every=2"])
    paths = RunPaths(tmp_path, "run")

    def done(number, back=None):
        key = f"round-{(number - 1) // 6 + 1:02d}/step-{(number - 1) % 6 + 1:04d}/update"
        write_result(paths, StageResult(key, metrics={} if back is None else {"went_back_to": back}))

    return StageContext(recipe, paths, "round-01/step-0006/update"), done


def test_the_way_back_leads_to_the_last_checkpoint_before_the_policy_that_was_measured(steps):
    context, done = steps
    # Step 1 and 2 have none but the head of the round; step 4 measured the policy after 3, and 5 that after 4.
    assert [last_good(context, 1, step) for step in (1, 2, 3, 4, 5, 6)] == [0, 0, 0, 2, 2, 4]
    assert last_good(context, 2, 2) == 6
    done(5)
    done(6, back=4)  # the end of a round that was undone is still the head of the next
    assert [last_good(context, 2, step) for step in (1, 2, 3)] == [6, 6, 6]


def test_a_second_crossing_goes_back_further(steps):
    context, done = steps
    done(5, back=4)  # step 6 measures the policy after 4 again: the one before it is 2
    assert last_good(context, 1, 6) == 2


def test_undone_updates_are_neither_replayed_nor_taken_from_a_checkpoint_that_a_crash_left(steps):
    context, done = steps
    engines = Engines(context.recipe, context.paths, None)
    for name in ("warm-start", "round-01-step-0002", "round-01-step-0004"):
        with new_checkpoint(context.paths, name) as partial:
            (partial / "model.safetensors").write_text(name)
    done(3)
    assert engines._way_to(3) == (2, [3])
    done(4, back=2)
    done(5)
    assert engines._way_to(4) == (2, [])
    assert engines._way_to(5) == (2, [5])
    engines._at = 5
    done(6, back=5)
    assert engines._way_to(6) == (5, [])


def test_a_gradient_that_is_no_number_stops_the_run_or_goes_back(steps):
    context, _ = steps

    def broken():
        raise NotFinite("the gradient's norm is nan: no update was made", math.nan)

    with pytest.raises(RunStopped, match=r"round-01/step-0006/update: the gradient's norm is nan.*guards\.go_back"):
        watch(context, broken, 1, 6)
    recipe = load_recipe("embedded", ["grpo.steps=6", "checkpoint_every=2", 'guards.go_back=["non_finite"]'])
    told = []
    back = StageContext(recipe, context.paths, context.key, tell=told.append)
    assert watch(back, broken, 1, 6).metrics == {"lr_scale": 0.5, "times_back": 1, "went_back_to": 4}
    assert "gone back to the policy after update 4, learning rate x 0.5" in told[0].message
    infinite = watch(back, lambda: StageResult(context.key, metrics={"kl": math.inf, "loss": 1.0}), 1, 6)
    assert infinite.metrics == {"loss": 1.0, "lr_scale": 0.5, "times_back": 1, "went_back_to": 4}


def test_an_event_is_recorded_once_whatever_the_number_of_attempts(steps):
    context, _ = steps
    with pytest.raises(RunStopped) as stop:
        watch(context, lambda: StageResult(context.key, metrics={"kl": math.nan}), 1, 6)
    assert record_event(context.paths, context.key, stop.value.event)
    assert not record_event(context.paths, context.key, stop.value.event)
    (row,) = store.read(context.paths, "events").to_pylist()
    assert (row["stage"], row["round"], row["step"]) == (context.key, 1, 6)
    assert (row["kind"], row["severity"], row["value"]) == ("non_finite", "error", None)


# -- a run ----------------------------------------------------------------------------------------------------------

BACK = (
    "grpo.rounds=1", "grpo.steps=4", "checkpoint_every=1", "rewards.weights={verifier=1.0, format=0.1}",
    'guards.go_back=["kl"]', "guards.kl=1e-9",
)  # fmt: skip
"""The policy of a round's head has a KL of 0 to itself, that of the step after it has not: steps 2 and 4 cross."""


@pytest.fixture(scope="module")
def back(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("runs"), *BACK)[1]


def test_a_run_goes_back_and_on_with_a_smaller_learning_rate_and_keeps_every_rollout(back):
    updates = store.read(back, "updates").to_pylist()
    lr = [row["lr"] for row in updates if row["round"] is not None]
    # 1e-4 after a warmup of two steps, halved by step 2; step 4's halving would show in a fifth step
    assert lr == pytest.approx([0.5e-4, 1e-4, 0.5e-4, 0.5e-4])
    metrics = [read_result(back, f"round-01/step-{step:04d}/update").metrics for step in (1, 2, 3, 4)]
    assert [m.get("went_back_to") for m in metrics] == [None, 0, None, 0]
    assert [m.get("lr_scale") for m in metrics] == [None, 0.5, 0.5, 0.25]
    rollouts = [row for row in store.read(back, "rollouts").to_pylist() if row["purpose"] == "train"]
    assert len(rollouts) == 4 * 4 * 4
    weights = {row["step"]: row["policy_checksum"] for row in rollouts}
    assert weights[3] == weights[1] != weights[2]
    assert back.checkpoint("round-01").is_dir()


def test_going_back_is_a_row_of_the_store_and_a_line_of_the_report(back):
    events = store.read(back, "events").to_pylist()
    assert [(row["kind"], row["severity"], row["step"]) for row in events] == [
        ("kl", "warning", 2),
        ("kl", "warning", 4),
    ]
    assert "2 × warning (kl), the last: KL(policy || reference) is" in back.report("report").read_text()


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_run_killed_around_a_step_back_ends_like_one_that_was_not(back, tmp_path, monkeypatch):
    for key in ("round-01/step-0002/update", "round-01/step-0003/update"):

        def dying(paths, result, key=key):
            if result.key == key:
                raise Killed
            write_result(paths, result)

        with monkeypatch.context() as patch:
            patch.setattr("flows.workflow.write_result", dying)
            with pytest.raises(Killed):
                tiny_run(tmp_path, *BACK)
        # What an attempt left whose decision was another: no later attempt may start from it.
        with new_checkpoint(RunPaths(tmp_path, "tiny"), "round-01-step-0002") as partial:
            (partial / "model.safetensors").write_text("of a crashed attempt")
    tiny_run(tmp_path, *BACK)
    found = compare(back, RunPaths(tmp_path, "tiny"))
    assert (found.rows_lost, found.rows_doubled, found.bits_differ) == (0, 0, 0), found.details[:5]


def test_a_stopped_run_stops_again_until_its_limit_is_changed_and_a_cost_target_stops_it_too(back):
    branch = ("guards.go_back=[]", 'guards.stop=["kl"]')
    with pytest.raises(
        RunStopped, match=r"step-0002/update: KL.*guards\.stop names kl; with that or the limit changed"
    ):
        tiny_run(back.root, *branch, resume_from="round-01/step-0001/rollout")

    def go_on(*overrides):
        recipe, paths = open_run(None, overrides, "tiny-r1", None, back.root)
        execute(recipe, paths, display=Display(1, quiet=True))

    with pytest.raises(RunStopped, match="KL"):
        go_on()
    with pytest.raises(RunStopped, match=r"costs\.tokens = 250: \d+ are sampled.*16 completions of round-01/step-0003"):
        go_on("guards.kl=1.0", "costs.tokens=250")
    child = RunPaths(back.root, "tiny-r1")
    assert read_result(child, "round-01/step-0002/update") is not None
    events = [(row["stage"], row["kind"], row["severity"]) for row in store.read(child, "events").to_pylist()]
    assert [event for event in events if event[0].startswith("round-01")] == [
        ("round-01/step-0002/update", "kl", "error"), ("round-01/step-0003/rollout", "costs.tokens", "error")
    ]  # fmt: skip
    assert ("recipe", "recipe", "info") in events
    left = ["round-01/step-0003/rollout", "round-01/refresh"]  # the stop of step 2 is over
    assert [line.partition(": ")[2][:18] for line in stops(child, left)] == ["costs.tokens = 250"]


def test_a_gradient_that_blows_up_is_recorded_and_the_run_goes_on_from_an_earlier_policy(back, monkeypatch):
    step, calls = Masters.step, []

    def blown_up(masters, lr):
        calls.append(lr)
        if len(calls) == 1:
            next(iter(masters.weights.values())).grad.fill_(math.nan)
        return step(masters, lr)

    monkeypatch.setattr(Masters, "step", blown_up)
    limits = ('guards.go_back=["non_finite"]', "guards.kl=9.0")
    _, child = tiny_run(back.root, *limits, resume_from="round-01/step-0003/rollout")
    metrics = read_result(child, "round-01/step-0003/update").metrics
    assert metrics == {"lr_scale": 0.25, "times_back": 2, "went_back_to": 0}  # step 2, which it inherits, went back too
    (row,) = [row for row in store.read(child, "updates").to_pylist() if (row["round"], row["step"]) == (1, 3)]
    assert math.isnan(row["grad_norm"])
    assert read_result(child, "evaluate/final") is not None
