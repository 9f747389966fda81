"""When two number literals are the same answer: exact rational arithmetic, and the roundings that writing allows."""

from __future__ import annotations

from fractions import Fraction

from rewards.literals import Number

SIGNIFICANT = 6
"""Digits that a decimal needs before it may stand for an exact gold: 0.142857 for 1/7, but not 0.14."""


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
        return rounded(answer.value, gold.decimals) == gold.value
    if gold.form == "fraction" and answer.form == "decimal" and answer.digits >= SIGNIFICANT and not gold.percent:
        return rounded(gold.value, answer.decimals) == answer.value
    return False


def rounded(value: Fraction, decimals: int) -> Fraction:
    """The value rounded to that many decimals, halves away from zero."""
    whole = (abs(value) * 10**decimals + Fraction(1, 2)).__floor__()
    return Fraction(whole if value >= 0 else -whole, 10**decimals)
