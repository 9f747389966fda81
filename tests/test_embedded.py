"""The generator of word problems: what it states is true, and training tells nothing about the held-out numbers."""

import re
from collections import Counter

import pytest

from data.embedded import FAMILIES, LEVELS, generate, worked_solution
from pipeline.config import EmbeddedData

CONFIG = EmbeddedData(train=1000, heldout=200)


@pytest.fixture(scope="module")
def problems():
    return generate(CONFIG, 0)


def numbers(problem):
    return tuple(sorted(int(n) for n in re.findall(r"\d+", problem.problem)))


def test_splits_share_no_problem_and_no_operands(problems):
    train = [p for p in problems if p.split == "train"]
    heldout = [p for p in problems if p.split == "heldout"]
    assert (len(train), len(heldout)) == (1000, 200)
    assert not {p.problem for p in train} & {p.problem for p in heldout}
    assert not {numbers(p) for p in train} & {numbers(p) for p in heldout}


def test_families_and_levels_come_in_equal_shares_in_both_splits(problems):
    assert len(FAMILIES) >= 8
    for split, each in (("train", 20), ("heldout", 4)):  # 1000 / (10 x 5) and 200 / (10 x 5)
        cells = Counter((p.subject, p.level) for p in problems if p.split == split)
        assert set(cells) == {(f.name, level) for f in FAMILIES for level in (1, 2, 3, 4, 5)}
        assert set(cells.values()) == {each}


def test_numbers_keep_to_their_level(problems):
    for problem in problems:
        low, high = LEVELS[problem.level]
        assert all(low <= n <= high for n in numbers(problem))


def test_each_line_of_a_solution_is_true_and_the_last_boxes_the_answer(problems):
    for problem in problems:
        *sums, boxed = problem.solution.split("\n")
        assert boxed == f"\\boxed{{{problem.answer}}}"
        assert len(sums) == 2
        results = []
        for line in sums:
            a, sign, b = re.match(r"(\d+)([+-])(\d+)", line).groups()
            results.append(int(a) + int(b) if sign == "+" else int(a) - int(b))
            assert line.endswith(f"so {results[-1]}" if ":" in line else f"={results[-1]}")
            columns = re.findall(r"(\d+)([+-])(\d)(?:([+-])1)?=(\d+)", line.partition(":")[2])
            for top, sign, bottom, carry, value in columns:
                step = int(bottom) + bool(carry)
                assert int(value) == (int(top) + step if sign == "+" else int(top) - step)
        assert results[-1] == int(problem.answer) > 0


def test_the_story_is_what_the_solution_computes():
    texts = {f.name: (f.text.format(x="Ann", y="Bob", z="Eve", t="pens", a=50, b=20, c=5), f) for f in FAMILIES}
    expected = {
        "total": 75,  # 50 + 20 + 5
        "loss": 25,  # 50 - 20 - 5
        "gain-loss": 65,  # 50 + 20 - 5
        "loss-gain": 35,  # 50 - 20 + 5
        "more": 120,  # Ann 50, Bob 50 + 20
        "fewer": 80,  # Ann 50, Bob 50 - 20
        "twice-less": 80,  # 2 x 50 - 20
        "boxes": 120,  # 50 + 50 + 20
        "change": 25,  # 50 - (20 + 5)
        "comparison": 65,  # 50 + 20 - 5
    }
    assert set(texts) == set(expected)
    for name, (_, family) in texts.items():
        solution = worked_solution(family.sums(*(50, 20, 5)[: family.numbers]), careful=False)
        assert solution.endswith(f"\\boxed{{{expected[name]}}}"), name


def test_columns_carry_and_borrow():
    # 345 + 278: 5+8 = 13 carries, 4+7+1 = 12 carries, 3+2+1 = 6; 623 - 87: 13-7 = 6 borrows, 11... 12-8-1 = 3 borrows
    sums = ((345, "+", 278), (623, "-", 87))
    first, second, boxed = worked_solution(sums, careful=True).split("\n")
    assert first == "345+278: 5+8=13 4+7+1=12 3+2+1=6 so 623"
    assert second == "623-87: 13-7=6 12-8-1=3 6-0-1=5 so 536"
    assert boxed == r"\boxed{536}"


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    small = EmbeddedData(train=50, heldout=10)
    assert generate(small, 3) == generate(small, 3)
    assert {p.problem for p in generate(small, 3)} != {p.problem for p in generate(small, 4)}


def test_the_careful_share_is_the_share_of_solutions_in_columns():
    careful = {
        share: sum(":" in p.solution for p in generate(EmbeddedData(train=400, heldout=4, careful_share=share), 0))
        for share in (0.0, 0.5, 1.0)
    }
    assert (careful[0.0], careful[1.0]) == (0, 404)
    assert 162 <= careful[0.5] <= 242  # 202 expected, four standard deviations of sqrt(404 / 4) = 10 on either side


def test_too_many_problems_for_the_numbers_there_are_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"lower data\.embedded\.train") as error:
        generate(EmbeddedData(train=20000, heldout=4, levels=1), 0)
    assert "\n" not in str(error.value)
