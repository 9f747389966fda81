"""Problems of reasoning-gym: their tasks' own scorers decide, in a process that can be killed."""

import pytest

from data.sources import load_source
from pipeline.config import DataConfig, RewardConfig, SourceConfig
from pipeline.types import Problem
from rewards.procedural import TaskScorer

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


@pytest.fixture(scope="module")
def scorer():
    scorer = TaskScorer(30.0)
    yield scorer
    scorer.close()


def problems(*tasks, limit=4):
    return load_source(SourceConfig(name="reasoning_gym", tasks=tasks, limit=limit), DataConfig(), 0)


def test_any_right_answer_counts_not_only_the_stored_one(scorer):
    # A countdown problem is solved by any expression of the numbers with the target as its value.
    found = problems("countdown", limit=1)[0]
    entry = found.meta["reasoning_gym"]["entry"]
    numbers, target = entry["metadata"]["numbers"], entry["metadata"]["target"]
    swapped = f"({found.answer})"
    texts = [f"\\boxed{{{found.answer}}}", f"\\boxed{{{swapped}}}", f"\\boxed{{{numbers[0]}}}", "I do not know."]
    verdicts = scorer.judge_many([(found, text, "stop") for text in texts])
    assert numbers[0] != target
    assert [verdict.status for verdict in verdicts] == ["correct", "correct", "incorrect", "no_answer"]


def test_a_scorer_that_raises_leaves_the_rollout_unscored(scorer):
    broken = Problem(problem_id="p", problem="?", answer="1", meta={"reasoning_gym": {"task": "no such", "entry": {}}})
    (verdict,) = scorer.judge_many([(broken, "\\boxed{1}", "stop")])
    assert verdict.status == "error"
    assert "no such" in verdict.rule


def test_golds_of_tasks_are_checked_by_their_scorers():
    from stages.base import gold_check

    found = problems("basic_arithmetic", "countdown")
    assert gold_check(RewardConfig(workers=1))(found) == [None] * 4
