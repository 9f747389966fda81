"""What a completion is weighed with, by algorithm: the unified paradigm's gradient coefficients (arXiv 2402.03300)."""

from __future__ import annotations

from pipeline.config import GRPOConfig, ObjectiveConfig
from pipeline.types import Reward
from stages.update import weigh

GROUPS = ["a", "a", "a", "b", "b", "b"]


def weights(algorithm, verdicts):
    """``weigh`` of rewards that are 1 for a correct completion, 0 for a wrong one, None for an unscored one."""
    rewards = [
        Reward(
            str(i),
            None if v is None else float(v),
            v,
            "error" if v is None else "correct" if v else "incorrect",
            None,
            {},
        )
        for i, v in enumerate(verdicts)
    ]
    return weigh(rewards, GROUPS, GRPOConfig(objective=ObjectiveConfig(algorithm=algorithm)))


def test_rft_pays_every_correct_completion_whatever_its_group():
    found = weights("rft", [True, False, False, True, True, True])
    assert found.values.tolist() == [1, 0, 0, 1, 1, 1]
    assert not found.zero_variance.any()
    assert weights("online_rft", [True, False, None, True, True, True]).values.tolist() == [1, 0, 0, 1, 1, 1]


def test_an_unscored_completion_stays_unscored_under_every_algorithm():
    for algorithm in ("grpo", "rft", "online_rft", "dpo"):
        found = weights(algorithm, [True, False, None, True, False, False])
        assert found.scored.tolist() == [True, True, False, True, True, True] and found.values[2] == 0


def test_dpo_pairs_within_a_group_and_grpo_has_no_signal_where_all_are_right():
    assert weights("dpo", [True, False, False, True, True, True]).values.tolist() == [1, -1, 0, 0, 0, 0]
    grpo = weights("grpo", [True, False, False, True, True, True])
    assert grpo.values[3:].tolist() == [0, 0, 0] and grpo.zero_variance.tolist() == [False] * 3 + [True] * 3
    assert grpo.values[0] > 0 > grpo.values[1]
