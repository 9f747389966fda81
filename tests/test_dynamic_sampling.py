"""Difficulty from recorded rollouts, and steps that draw on until enough groups have a signal."""

import json
from types import SimpleNamespace

import pytest

from data.difficulty import pass_rates
from pipeline import store
from pipeline.config import load_recipe
from pipeline.protocols import PolicyVersion
from pipeline.rundir import RunPaths, StageContext, write_atomic
from pipeline.types import Completion, Problem, Reward
from stages import probe, refill
from stages.curriculum import known_pass_rates, step_problems
from stages.rollout import read_rollouts
from tests.synthetic_run import synthetic_run
from tests.tiny import tiny_run

PROBLEMS = [
    Problem(problem_id=f"p{i:02d}", problem="?", answer="1", source="embedded", prompt_token_ids=(i,))
    for i in range(40)
]
RECIPE = ["grpo.problems_per_step=4", "grpo.group_size=4", "grpo.steps=2", "grpo.minibatches=1"]


class ScriptedSampler:
    """Completions are the prompt's token and the sample's index; remembers which prompts it was given."""

    version = PolicyVersion("policy", "sum")

    def __init__(self):
        self.prompts = []

    def sample(self, prompt_token_ids, params, seeds, progress):
        self.prompts += [ids[0] for ids in prompt_token_ids]
        return [
            [Completion([ids[0], index], [-0.5, -0.5], "stop") for index in range(len(row))]
            for ids, row in zip(prompt_token_ids, seeds, strict=True)
        ]


class ScriptedScorer:
    """Problems with an id divisible by three are solved half the time, the others never."""

    def verify(self, problems, rollouts):
        return [
            Reward(
                r.rollout_id, 1.0, r.completion_token_ids[0] % 3 == 0 and r.sample_index % 2 == 0, "correct", "1", {}
            )
            for r in rollouts
        ]


TOKENIZER = SimpleNamespace(batch_decode=lambda rows, skip_special_tokens: ["x"] * len(rows))


def context_of(root, *changes, key="round-01/step-0001/rollout"):
    recipe = load_recipe("embedded", [*RECIPE, *changes])
    paths = RunPaths(root, "run")
    write_atomic(paths.recipe_file, json.dumps({"run_id": "run", "recipe": recipe.model_dump(mode="json")}))
    return StageContext(recipe, paths, key)


def refilled(root, budget):
    context = context_of(root, f"data.curriculum.refill_budget={budget}")
    sampler = ScriptedSampler()
    first = step_problems(context, PROBLEMS, 1, 1)
    return context, sampler, refill.run(context, sampler, TOKENIZER, ScriptedScorer(), first, PROBLEMS, 1, 1)


def test_a_step_is_filled_up_with_mixed_groups(tmp_path):
    context, sampler, result = refilled(tmp_path, 8)
    mixed = {n for n in sampler.prompts if n % 3 == 0}
    assert len(mixed) >= 4
    assert result.metrics["mixed"] == len(mixed)
    # Each problem is put once, and everything sampled is recorded.
    assert len(set(sampler.prompts)) == len(sampler.prompts) == result.metrics["groups"]
    rollouts = read_rollouts(context.paths, context.key)
    assert len(rollouts) == 4 * len(sampler.prompts)
    assert len({r.group_id for r in rollouts}) == len(sampler.prompts)


def test_the_budget_ends_the_search(tmp_path):
    _, sampler, result = refilled(tmp_path, 1.5)
    # 1.5 x 4 problems a step.
    assert len(sampler.prompts) <= 6
    assert result.metrics["groups"] == len(sampler.prompts)


def test_a_step_that_is_run_again_samples_nothing_twice(tmp_path):
    _, sampler, result = refilled(tmp_path, 8)
    _, again, same = refilled(tmp_path, 8)
    assert again.prompts == []
    assert same.metrics == result.metrics
    other = refilled(tmp_path.parent / f"{tmp_path.name}-other", 8)[1]
    assert other.prompts == sampler.prompts


def test_the_pass_rate_is_of_the_last_round_that_put_the_problem(tmp_path):
    paths = synthetic_run(tmp_path)
    connection = store.connect(paths.run_id, root=tmp_path)
    rows = connection.execute(
        "SELECT problem_id, round, correct FROM rollouts JOIN rewards USING (rollout_id) "
        "WHERE purpose = 'train' AND correct IS NOT NULL"
    ).fetchall()
    for before, rounds in ((2, [1]), (3, [2, 1])):
        expected = {}
        for problem in {row[0] for row in rows}:
            for round_ in rounds:
                verdicts = [correct for id_, r, correct in rows if (id_, r) == (problem, round_)]
                if verdicts:
                    expected[problem] = sum(verdicts) / len(verdicts)
                    break
        assert expected
        assert pass_rates(connection, before) == pytest.approx(expected)
    assert pass_rates(connection, 1) == {}


def test_history_comes_from_other_runs_until_the_run_has_its_own(tmp_path):
    synthetic_run(tmp_path, "old")
    changes = ['data.curriculum.history=["old"]', 'data.curriculum.prefer="mixed"']
    context = context_of(tmp_path, *changes)
    known = known_pass_rates(context, 1)
    assert known == pass_rates(store.connect("old", root=tmp_path))
    # Without a window or a preference nobody asks the store.
    assert known_pass_rates(context_of(tmp_path, 'data.curriculum.history=["gone"]'), 1) is None
    with pytest.raises(FileNotFoundError, match="run 'gone' is not in"):
        known_pass_rates(context_of(tmp_path, 'data.curriculum.history=["gone"]', 'data.curriculum.prefer="mixed"'), 1)


class RecordingScorer(ScriptedScorer):
    """Scores as it verifies."""

    def score(self, problems, rollouts, progress=None):
        return self.verify(problems, rollouts)

    def take_events(self):
        return []


def test_a_probe_tells_the_first_round_the_pass_rates_and_samples_nothing_twice(tmp_path):
    changes = ["data.curriculum.window=[0.1, 0.9]", "data.curriculum.revisit=0", "data.curriculum.probe_samples=4"]
    context, first = context_of(tmp_path, *changes, key="probe"), ScriptedSampler()
    probe.run(context, first, TOKENIZER, RecordingScorer(), PROBLEMS)
    assert sorted(first.prompts) == list(range(40))
    again = ScriptedSampler()
    probe.run(context, again, TOKENIZER, RecordingScorer(), PROBLEMS)
    assert again.prompts == []
    assert {r.purpose for r in read_rollouts(context.paths, "probe")} == {"probe"}
    step = context_of(tmp_path, *changes)
    assert known_pass_rates(step, 1) == {f"p{i:02d}": 0.5 if i % 3 == 0 else 0.0 for i in range(40)}
    drawn = step_problems(step, PROBLEMS, 1, 1)
    assert all(int(problem.problem_id[1:]) % 3 == 0 for problem in drawn)


def test_a_probe_that_nothing_reads_is_refused():
    with pytest.raises(ValueError, match="probe_samples asks for pass rates that nothing reads"):
        load_recipe("embedded", ["data.curriculum.probe_samples=4"])


@pytest.mark.slow
def test_a_run_with_a_probe_has_its_stage(tmp_path):
    changes = ["data.curriculum.prefer='mixed'", "data.curriculum.probe_samples=2", "data.curriculum.probe_problems=6"]
    _, paths = tiny_run(tmp_path, *changes, "grpo.rounds=1", "grpo.steps=1")
    assert len(read_rollouts(paths, "probe")) == 12
    assert paths.result_file("probe").is_file()
