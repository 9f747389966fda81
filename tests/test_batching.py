"""Micro-batches stay in their budget and hold everything once; layouts are the same tokens in another order."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.batching import Layout, cost, micro_batches, pack, preference_pairs
from pipeline.types import TrainSequence
from tests.learner_cases import rollouts

LAYOUTS: list[Layout] = ["shared", "packed", "padded"]


def _sequence(
    prompt: tuple[int, ...], completion: tuple[int, ...], group: str = "g", sign: float = 0.0
) -> TrainSequence:
    advantages = np.full(len(completion), sign, dtype=np.float32)
    return TrainSequence("s", group, prompt, completion, advantages=advantages)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 20, 45, 10_000])
def test_every_sequence_is_in_one_micro_batch_within_the_budget(layout: Layout, budget: int) -> None:
    sequences = rollouts(groups=5)
    batches = micro_batches(sequences, range(len(sequences)), budget, layout=layout)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    assert all(len(batch) == 1 or cost(sequences, batch, layout) <= budget for batch in batches)
    assert [pack(sequences, batch, layout=layout).input_ids.size for batch in batches] == [
        cost(sequences, batch, layout) for batch in batches
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_longest_come_first(layout: Layout) -> None:
    sequences = rollouts(groups=5)
    batches = micro_batches(sequences, range(len(sequences)), 40, layout=layout)
    longest = [
        max(len(sequences[i].prompt_token_ids) + len(sequences[i].completion_token_ids) for i in b) for b in batches
    ]
    assert longest == sorted(longest, reverse=True)


def test_groups_are_never_parted_when_asked() -> None:
    sequences = rollouts(groups=4)
    batches = micro_batches(sequences, range(len(sequences)), 1, layout="packed", by_group=True)
    assert sorted(sorted(batch) for batch in batches) == [[4 * g + k for k in range(4)] for g in range(4)]


def test_costs_by_hand() -> None:
    sequences = [_sequence((7, 8), (1, 2, 3)), _sequence((7, 8), (4,)), _sequence((9,), (5, 6))]
    # inputs leave out each completion's last token: runs 2, 0, 1; prompts 2 + 2 + 1, shared 2 + 1
    assert cost(sequences, [0, 1, 2], "packed") == 8
    assert cost(sequences, [0, 1, 2], "shared") == 6
    assert cost(sequences, [0, 1, 2], "padded") == 12  # three rows of 4


def test_a_shared_prompt_by_hand() -> None:
    batch = pack([_sequence((7, 8), (1, 2)), _sequence((7, 8), (3,))], [0, 1], layout="shared")
    assert batch.input_ids.tolist() == [[7, 8, 1]] and batch.position_ids.tolist() == [[0, 1, 2]]
    assert batch.predictors.tolist() == [1, 2, 1] and batch.targets.tolist() == [1, 2, 3]
    assert batch.sequence.tolist() == [0, 0, 1] and batch.lengths.tolist() == [2, 1]


def test_a_padded_batch_by_hand() -> None:
    batch = pack([_sequence((7, 8), (1, 2)), _sequence((9,), (3,))], [1, 0], layout="padded")
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[True, False, False], [True, True, True]]
    # row 0: 9, which predicts 3; row 1: 7 8 1, whose flat positions 4 and 5 predict 1 and 2
    assert batch.predictors.tolist() == [0, 4, 5] and batch.targets.tolist() == [3, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_predictor_stands_right_before_its_target(layout: Layout) -> None:
    sequences = rollouts(groups=3)
    members = [5, 0, 11, 2, 3]
    batch = pack(sequences, members, layout=layout)
    ids, positions = batch.input_ids.ravel(), batch.position_ids.ravel()
    at = 0
    for i in members:
        whole = [*sequences[i].prompt_token_ids, *sequences[i].completion_token_ids]
        for n in range(len(sequences[i].completion_token_ids)):
            place = len(sequences[i].prompt_token_ids) - 1 + n
            assert ids[batch.predictors[at]] == whole[place] and positions[batch.predictors[at]] == place
            assert batch.targets[at] == whole[place + 1]
            at += 1
    assert at == len(batch.targets)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        pack([_sequence((), (1,))], [0], layout="packed")


def test_preference_pairs_are_kth_chosen_with_kth_rejected() -> None:
    signs = [1.0, -1.0, 0.0, -1.0, 1.0]
    sequences = [_sequence((1,), (2,), sign=sign) for sign in signs]
    assert preference_pairs(sequences, range(5)).tolist() == [[0, 1], [4, 3]]
    with pytest.raises(ValueError, match="1 chosen and 0 rejected"):
        preference_pairs(sequences, [0])
