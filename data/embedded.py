"""The embedded problem set: two-step word problems with worked solutions, a pure function of (configuration, seed).

Solutions come in two styles: quick ones state each sum at once, careful ones work it out column by column with carries.
A small policy gets quick sums wrong and careful ones right, so there is something for reinforcement learning to find.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import EmbeddedData
from pipeline.seeds import content_id, derive_seed
from pipeline.types import Problem

NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("pens", "cards", "coins", "books", "shells", "beads")
LEVELS = {1: (10, 49), 2: (10, 69), 3: (10, 99), 4: (20, 149), 5: (50, 199)}
"""Level to the smallest and the largest number in a problem's text."""
LARGEST_RESULT = 999
ATTEMPTS = 10_000
"""Draws for one problem before the operand space counts as exhausted."""

Sum = tuple[int, str, int]
"""Left operand, "+" or "-", right operand."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of story: its text, how many numbers it names, and the two sums that answer it."""

    name: str
    text: str
    numbers: int
    sums: Callable[..., tuple[Sum, Sum]]


def _chain(first: str, second: str) -> Callable[[int, int, int], tuple[Sum, Sum]]:
    """(a first b) second c."""

    def sums(a: int, b: int, c: int) -> tuple[Sum, Sum]:
        return (a, first, b), (_value((a, first, b)), second, c)

    return sums


FAMILIES = (
    Family("total", "{x} has {a} {t}, {y} has {b} and {z} has {c}. How many in all?", 3, _chain("+", "+")),
    Family("loss", "{x} had {a} {t}, lost {b} and sold {c}. How many are left?", 3, _chain("-", "-")),
    Family("gain-loss", "{x} had {a} {t}, got {b} and lost {c}. How many are left?", 3, _chain("+", "-")),
    Family("loss-gain", "{x} had {a} {t}, sold {b} and got {c}. How many now?", 3, _chain("-", "+")),
    Family(
        "more",
        "{x} has {a} {t}. {y} has {b} more. How many in all?",
        2,
        lambda a, b: ((a, "+", b), (a + b, "+", a)),
    ),
    Family(
        "fewer",
        "{x} has {a} {t}. {y} has {b} fewer. How many in all?",
        2,
        lambda a, b: ((a, "-", b), (a - b, "+", a)),
    ),
    Family(
        "twice-less",
        "{x} has {a} {t}. {y} had twice as many and lost {b}. How many has {y}?",
        2,
        lambda a, b: ((a, "+", a), (a + a, "-", b)),
    ),
    Family(
        "boxes",
        "Two boxes hold {a} {t} each, a third holds {b}. How many in all?",
        2,
        lambda a, b: ((a, "+", a), (a + a, "+", b)),
    ),
    Family(
        "change",
        "{x} buys {t} for {b} and a bag for {c}, and pays {a}. How much is left?",
        3,
        lambda a, b, c: ((b, "+", c), (a, "-", b + c)),
    ),
    Family(
        "comparison",
        "{x} has {a} old and {b} new {t}. {y} has {c}. How many more has {x}?",
        3,
        _chain("+", "-"),
    ),
)


def generate(config: EmbeddedData, seed: int) -> list[Problem]:
    """``config.heldout`` and ``config.train`` problems, families and levels in equal shares, in shuffled order.

    No two problems have the same numbers in their text, whatever the order, so training and held-out problems share
    neither a problem nor a set of operands. Raises ValueError when there are not enough sets of operands.
    """
    rng = random.Random(derive_seed(seed, "embedded problems"))
    used: set[tuple[int, ...]] = set()
    problems = []
    for split, count in (("heldout", config.heldout), ("train", config.train)):
        made = [_problem(i, split, config, rng, used=used) for i in range(count)]
        rng.shuffle(made)
        problems += made
    return problems


def _problem(
    index: int, split: str, config: EmbeddedData, rng: random.Random, *, used: set[tuple[int, ...]]
) -> Problem:
    family = FAMILIES[index % len(FAMILIES)]
    level = index // len(FAMILIES) % config.levels + 1
    numbers = _operands(family, level, rng, used)
    x, y, z = rng.sample(NAMES, 3)
    letters = dict(zip("abc", numbers, strict=False))
    text = family.text.format(x=x, y=y, z=z, t=rng.choice(THINGS), **letters)
    sums = family.sums(*numbers)
    answer = _value(sums[1])
    careful = rng.random() < config.careful_share
    return Problem(
        problem_id=content_id(text.casefold()),
        problem=text,
        answer=str(answer),
        solution=worked_solution(sums, careful=careful),
        level=level,
        subject=family.name,
        source="embedded",
        split="heldout" if split == "heldout" else "train",
    )


def _operands(family: Family, level: int, rng: random.Random, used: set[tuple[int, ...]]) -> tuple[int, ...]:
    low, high = LEVELS[level]
    for _ in range(ATTEMPTS):
        numbers = tuple(rng.randint(low, high) for _ in range(family.numbers))
        first, second = family.sums(*numbers)
        key = tuple(sorted(numbers))
        if key not in used and _value(first) > 0 and 0 < _value(second) <= LARGEST_RESULT:
            used.add(key)
            return numbers
    raise ValueError(
        f"the embedded generator found no unused numbers for a level-{level} problem of family {family.name!r} after "
        f"{len(used)} problems: lower data.embedded.train or data.embedded.heldout"
    )


def worked_solution(sums: tuple[Sum, ...], *, careful: bool) -> str:
    """One line a sum and the boxed result of the last one, without a newline at the end."""
    write = _columns if careful else _at_once
    return "\n".join([*(write(s) for s in sums), f"\\boxed{{{_value(sums[-1])}}}"])


def _at_once(s: Sum) -> str:
    """``345+278=623``. No spaces: in a vocabulary of single digits each of them would be a token."""
    return f"{s[0]}{s[1]}{s[2]}={_value(s)}"


def _columns(s: Sum) -> str:
    """``345+278: 5+8=13 4+7+1=12 3+2+1=6 so 623``, the ones first; differences borrow: ``12-8-1=3``."""
    left, sign, right = s
    width = max(len(str(left)), len(str(right)))
    columns = []
    carry = 0
    for a, b in zip(reversed(f"{left:0{width}d}"), reversed(f"{right:0{width}d}"), strict=True):
        top, bottom = int(a), int(b)
        if sign == "-" and top < bottom + carry:
            top += 10
        value = top + bottom + carry if sign == "+" else top - bottom - carry
        columns.append(f"{top}{sign}{bottom}{f'{sign}1' if carry else ''}={value}")
        carry = int(value >= 10) if sign == "+" else int(top >= 10)
    return f"{left}{sign}{right}: {' '.join(columns)} so {_value(s)}"


def _value(s: Sum) -> int:
    return s[0] + s[2] if s[1] == "+" else s[0] - s[2]
