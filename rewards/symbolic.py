"""Equality of two expressions by math-verify's reading and sympy. Only in worker processes: it may hang or need any memory."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from rewards.comparison import GoldUnparsable
from rewards.literals import parse_literal
from rewards.numbers import SIGNIFICANT, rounded

POINTS = 3
"""Positive real points at which two expressions with variables must agree."""
DIGITS = 40
CLOSE = sympy.Float("1e-12")
CLOSE_CONSTANT = sympy.Float("1e-25")
"""Constants are worked out to 40 digits, so what differs only in the 13th is told apart."""
COMPLEX = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")


def equal(gold: str, answer: str) -> bool:
    """Are two cleaned expressions equal? Raises ``GoldUnparsable`` when math-verify reads nothing from the gold."""
    wanted = _read(gold)
    if wanted is None:
        raise GoldUnparsable(gold)
    given = _read(answer)
    if given is None:
        return False
    if COMPLEX.search(gold):
        wanted, given = (value.subs(sympy.Symbol("i"), sympy.I) for value in (wanted, given))
    if isinstance(wanted, sympy.Eq) and isinstance(given, sympy.Eq):
        return _same_equation(wanted, given)
    if isinstance(wanted, sympy.Expr) and isinstance(given, sympy.Expr):
        return _same_expression(wanted, given, answer)
    if isinstance(wanted, sympy.Expr) or isinstance(given, sympy.Expr):
        return False
    return bool(verify([wanted], [given], timeout_seconds=None, allow_set_relation_comp=True))


@lru_cache(maxsize=512)
def _read(text: str) -> Any:
    """The sympy object that math-verify reads from a cleaned answer, None when it reads nothing."""
    found = parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
    return next((value for value in found if not isinstance(value, str)), None)


def _same_expression(gold: sympy.Expr, answer: sympy.Expr, written: str) -> bool:
    if gold == answer:
        return True
    names = gold.free_symbols | answer.free_symbols
    if not names:
        return _same_constant(gold, answer, written)
    agreed = 0
    for point in _points(names):
        left, right = (_at(value, point) for value in (gold, answer))
        if left is None or right is None:
            continue
        if not _near(left, right, CLOSE):
            return False
        agreed += 1
        if agreed == POINTS:
            return True
    return False


def _same_constant(gold: sympy.Expr, answer: sympy.Expr, written: str) -> bool:
    """Exact, or a decimal of enough digits that is the gold rounded to its decimals."""
    left, right = _at(gold, {}), _at(answer, {})
    if left is None or right is None:
        return False
    decimal = parse_literal(written)
    if decimal is not None and decimal.form == "decimal":
        if decimal.digits < SIGNIFICANT or not left.is_real:
            return False
        value = Fraction(str(sympy.Float(left, DIGITS)))
        return rounded(value, decimal.decimals) == decimal.value
    return _near(left, right, CLOSE if answer.atoms(sympy.Float) or gold.atoms(sympy.Float) else CLOSE_CONSTANT)


def _same_equation(gold: sympy.Eq, answer: sympy.Eq) -> bool:
    """Proportional after all is moved to one side; what holds everywhere matches nothing."""
    left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    names = left.free_symbols | right.free_symbols
    ratios = []
    for point in _points(names):
        values = [_at(side, point) for side in (left, right)]
        if any(value is None for value in values) or abs(values[0]) < CLOSE or abs(values[1]) < CLOSE:
            continue
        ratios.append(values[0] / values[1])
        if len(ratios) > POINTS:
            return all(_near(ratio, ratios[0], CLOSE) for ratio in ratios)
    return False


def _points(names: set[sympy.Symbol]) -> Any:
    """Random positive values for the variables, the same in every run."""
    rng = random.Random(20260101)
    ordered = sorted(names, key=str)
    for _ in range(12):
        yield {name: sympy.Float(rng.uniform(0.3, 2.7), DIGITS) for name in ordered}


def _at(value: sympy.Expr, point: dict[sympy.Symbol, sympy.Float]) -> Any:
    """The number at a point to 40 digits, None where there is none."""
    number = value.subs(point).evalf(DIGITS) if point else value.doit().evalf(DIGITS)
    return number if number.is_number and number.is_finite and not number.has(sympy.nan, sympy.zoo, sympy.oo) else None


def _near(left: Any, right: Any, tolerance: sympy.Float) -> bool:
    return bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))
