"""Which problems a step draws: a pure function of seed, round, step and pass rates."""

from collections import Counter

import pytest

from data.curriculum import problem_weights, problems_for_step, refill_count, refill_problems
from pipeline.config import DataConfig, SourceConfig
from pipeline.config.data import CurriculumConfig
from pipeline.types import Problem

PROBLEMS = [Problem(problem_id=f"p{i:02d}", problem=f"{i}?", answer="1", source="embedded") for i in range(20)]


def draw(step, *, problems=PROBLEMS, round_=1, count=4, history=None, config=None, seed=0, steps_before=0):
    drawn = problems_for_step(
        problems, seed=seed, round_=round_, step=step, count=count, history=history, config=config or DataConfig(),
        steps_before=steps_before,
    )  # fmt: skip
    return [problem.problem_id for problem in drawn]


def with_curriculum(**fields):
    return DataConfig(curriculum=CurriculumConfig(**fields))


def test_a_step_depends_on_nothing_but_its_arguments():
    later_first = [draw(3), draw(1), draw(2)]
    assert later_first == [draw(3), draw(1), draw(2)]
    assert draw(3, problems=list(reversed(PROBLEMS))) == draw(3)
    assert draw(1) != draw(1, seed=1)


def test_an_epoch_shows_every_problem_once():
    # 20 problems, 4 a step: steps 1 to 5 are one epoch, 6 to 10 the next.
    for first in (1, 6):
        epoch = [id_ for step in range(first, first + 5) for id_ in draw(step)]
        assert sorted(epoch) == [p.problem_id for p in PROBLEMS]


def test_a_step_never_holds_a_problem_twice_even_over_the_end_of_an_epoch():
    # 20 problems, 6 a step: step 4 straddles the first two epochs.
    drawn = [draw(step, count=6) for step in range(1, 31)]
    assert all(len(set(ids)) == 6 for ids in drawn)
    # 30 steps x 6 = 180 draws = 9 epochs of 20: nobody is drawn more than once too often.
    counts = Counter(id_ for ids in drawn for id_ in ids)
    assert set(counts.values()) <= {8, 9, 10}


def test_without_history_the_rounds_are_one_walk():
    assert draw(1, round_=2, steps_before=5) == draw(6)


def test_with_history_each_round_walks_anew():
    history = {p.problem_id: 0.5 for p in PROBLEMS}
    assert draw(1, round_=2, history=history) != draw(1, round_=3, history=history)


def test_problems_outside_the_window_come_back_as_often_as_revisit_says():
    history = {p.problem_id: 0.5 if i < 10 else 1.0 for i, p in enumerate(PROBLEMS)}
    config = with_curriculum(window=(0.1, 0.9), revisit=0.2)
    counts = Counter(id_ for step in range(1, 61) for id_ in draw(step, history=history, config=config))
    inside = [counts[p.problem_id] for p in PROBLEMS[:10]]
    outside = [counts[p.problem_id] for p in PROBLEMS[10:]]
    # 60 x 4 = 240 draws; an epoch has 10 + 10 x 0.2 = 12 draws: 20 epochs; each inside 20 times, each outside 4.
    assert all(19 <= n <= 21 for n in inside)
    assert all(3 <= n <= 5 for n in outside)


def test_revisit_zero_drops_and_unknown_problems_stay():
    history = {PROBLEMS[0].problem_id: 1.0}
    config = with_curriculum(window=(0.1, 0.9), revisit=0.0)
    drawn = {id_ for step in range(1, 20) for id_ in draw(step, history=history, config=config)}
    assert drawn == {p.problem_id for p in PROBLEMS[1:]}


def test_too_few_problems_in_the_window_is_one_line():
    history = {p.problem_id: 1.0 for p in PROBLEMS[:18]}
    with pytest.raises(ValueError, match=r"needs 4 distinct problems but 2 of 20.*data\.curriculum\.window"):
        draw(1, history=history, config=with_curriculum(window=(0.1, 0.9), revisit=0.0))


def test_mixed_prefers_problems_that_are_solved_half_the_time():
    history = {"p00": 0.5, "p01": 0.25, "p02": 1.0}
    weights = problem_weights(PROBLEMS[:4], history, with_curriculum(prefer="mixed", revisit=0.1))
    # 4 p (1 - p): 0.5 gives 1, 0.25 gives 0.75, 1.0 gives 0 and so the floor 0.1; unknown is 1.
    assert weights == {"p00": 1.0, "p01": 0.75, "p02": 0.1, "p03": 1.0}


def test_source_weights_set_the_mixture():
    config = DataConfig(sources=(SourceConfig(name="svamp", weight=3.0), SourceConfig(name="math500")))
    problems = [Problem(problem_id=f"s{i}", problem="", answer="", source="svamp") for i in range(10)]
    problems += [Problem(problem_id=f"m{i}", problem="", answer="", source="math500") for i in range(10)]
    counts = Counter(id_[0] for step in range(1, 101) for id_ in draw(step, problems=problems, config=config))
    # 400 draws, 3 : 1 between sets of one size: 300 and 100.
    assert abs(counts["s"] - 300) <= 10
    assert abs(counts["m"] - 100) <= 10


def test_refill_draws_others_and_always_the_same():
    first = [p.problem_id for p in refill_problems(PROBLEMS, seed=0, round_=1, step=2, drawn=draw(2), count=5)]
    again = [p.problem_id for p in refill_problems(PROBLEMS[::-1], seed=0, round_=1, step=2, drawn=draw(2), count=5)]
    assert first == again
    assert len(first) == 5
    assert not set(first) & set(draw(2))
    assert len(refill_problems(PROBLEMS, seed=0, round_=1, step=2, drawn=draw(2), count=50)) == 16


@pytest.mark.parametrize(
    ("wanted", "mixed", "drawn", "budget", "expected"),
    [
        (32, 16, 32, 3.0, 32),  # 16 missing, every second is mixed: 32 more
        (32, 32, 32, 3.0, 0),  # enough
        (32, 8, 32, 1.0, 0),  # refill is off
        (32, 8, 32, 2.0, 32),  # 24 / (8/32) = 96, but the budget leaves 2 x 32 - 32 = 32
        (4, 0, 4, 10.0, 32),  # nothing mixed yet: 4 / (1/8) = 32
        (4, 0, 40, 10.0, 0),  # the budget is spent
    ],
)
def test_refill_count(wanted, mixed, drawn, budget, expected):
    assert refill_count(wanted=wanted, mixed=mixed, drawn=drawn, budget=budget) == expected
