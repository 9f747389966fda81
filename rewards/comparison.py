"""Comparison of two cleaned answers by rules; single expressions that need sympy go to the caller's ``leaf``."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from rewards.bombs import why_refused
from rewards.literals import Number, parse_literal

Leaf = Callable[[str, str], bool]
"""``leaf(gold, answer)``: are two expressions equal? May raise ``GoldUnparsable``."""


class Undecided(Exception):
    """The comparison needs sympy, which this process does not load."""


class GoldUnparsable(Exception):
    """Nothing can be read from the gold answer, so nothing can be judged against it."""


def needs_worker(gold: str, answer: str) -> bool:
    """The leaf of a process that must not load sympy."""
    raise Undecided


def compare(gold: str, answer: str, leaf: Leaf = needs_worker) -> tuple[bool, str]:
    """(equal, the rule that decided) of two cleaned answers."""
    if without_blanks(gold) == without_blanks(answer):
        return True, "equal strings"
    refused = why_refused(answer) or why_refused(gold)
    if refused:
        return False, refused
    gold_number, answer_number = parse_literal(gold), parse_literal(answer)
    if gold_number is not None:
        if answer_number is None:
            return False, "the gold is a number, the answer is none"
        return same_number(gold_number, answer_number), "number literals"
    return leaf(gold, answer), "sympy"


def without_blanks(text: str) -> str:
    return re.sub(r"\s+", "", text)


def same_number(gold: Number, answer: Number) -> bool:
    """Exact equality, with the roundings that the way of writing allows and no others."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.value == answer.value:
        return True
    if gold.percent != answer.percent:
        percent, bare = (gold, answer) if gold.percent else (answer, gold)
        return abs(bare.value) >= 1 and percent.value * 100 == bare.value
    if gold.form == "decimal" and answer.form == "fraction" and not gold.percent:
        return _rounded(answer, gold.decimals) == gold.value
    if gold.form == "fraction" and answer.form == "decimal" and answer.digits >= 6 and not gold.percent:
        return _rounded(gold, answer.decimals) == answer.value
    return False


def _rounded(number: Number, decimals: int) -> Fraction:
    """The value rounded half away from zero to that many decimals."""
    scaled = abs(number.value) * 10**decimals
    whole = (scaled + Fraction(1, 2)).__floor__()
    return Fraction(whole if number.value >= 0 else -whole, 10**decimals)
