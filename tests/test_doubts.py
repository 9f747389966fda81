"""What to doubt: each sentence appears when its reason is there, and not otherwise."""

from __future__ import annotations

import pytest

from eval.doubts import doubts
from eval.gather import Evaluation

CALM = {
    "reward": 0.5, "correct": 0.5, "unscored_share": 0.0, "gap_mean": 1e-6, "zero_variance_share": 0.1,
}  # fmt: skip


class Run:
    """What ``doubts`` reads of a run; nothing to doubt unless a test says so."""

    def __init__(self, evaluations=(), steps=(), reward_models=(), events=()):
        self.evaluations, self.steps = list(evaluations), [{**CALM, **step} for step in steps]
        self.reward_models, self.events = list(reward_models), list(events)
        self.recipe = {"seed": 5}
        self.benchmarks = list(dict.fromkeys(e.benchmark for e in self.evaluations))


def evaluation(problems=1000, half=0.01, **shares):
    """pass@1 of 0.5 with an interval of ``half`` to both sides, and shares of the completions."""
    row = {"value": 0.5, "low": 0.5 - half, "high": 0.5 + half, "n_problems": problems}
    measures = {("pass@k", 1, "all"): row}
    measures |= {(name, None, "all"): {"value": value} for name, value in shares.items()}
    return Evaluation("round-01", "sums", "evaluate/round-01", measures)


def test_one_seed_is_always_doubted_and_a_calm_run_nothing_else():
    calm = doubts(Run([evaluation()], [{}] * 8, [{"model": "outcome", "auc": 0.9}]))
    assert len(calm) == 1 and "seed 5" in calm[0]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(), "No evaluation is complete"),
        (Run([evaluation(problems=40)]), "40 problems give pass@1 within ±1.0 points"),
        (Run([evaluation(half=0.08)]), "within ±8.0 points"),
        (Run([evaluation(unscored_share=0.03)]), "3.0 % of the completions have no verdict"),
        (Run([evaluation(truncated_share=0.25)]), "25.0 % of the completions were cut"),
        (Run([evaluation()], [{}, {"unscored_share": 0.2}]), "up to 20.0 % of a step's completions were unscored"),
        (Run([evaluation()], [{"gap_mean": 0.1}]), "differ by up to 0.100 nats"),
        (Run([evaluation()], [{"zero_variance_share": 0.8}]), "80 % of the groups had equal rewards"),
        (
            Run([evaluation()], reward_models=[{"model": "outcome", "auc": 0.9}, {"model": "outcome", "auc": 0.51}]),
            "ends at 0.51",
        ),
        (
            Run([evaluation()], events=[{"times": 3, "severity": "warning", "kind": "kl", "message": "too far"}]),
            "3 × warning (kl), the last: too far",
        ),
    ],
)
def test_each_reason_has_its_sentence(run, words):
    assert any(words in line for line in doubts(run)), doubts(run)


def test_a_reward_that_rises_while_correctness_falls_is_called_out():
    steps = [{"reward": 0.1 * i, "correct": 0.5 - 0.05 * i} for i in range(8)]
    # quarters of 2 steps: reward 0.05 to 0.65, correct 0.475 to 0.175
    assert any(
        "rose from 0.05 to 0.65" in line and "fell from 47.5 to 17.5 %" in line for line in doubts(Run(steps=steps))
    )
    both = [{"reward": 0.1 * i, "correct": 0.05 * i} for i in range(8)]
    assert not any("rose from" in line for line in doubts(Run(steps=both)))


def test_contaminated_problems_are_named_with_their_accuracy():
    found = evaluation()
    found.measures["pass@k", 1, "contaminated=yes"] = {"value": 0.9, "n_problems": 7}
    assert any("7 problems are flagged as contaminated" in line and "90.0 %" in line for line in doubts(Run([found])))
