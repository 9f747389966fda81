"""Equality of two expressions by math-verify's reading and sympy. Only in worker processes: it may hang or need any memory."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from rewards.comparison import GoldUnparsable
from rewards.literals import parse_literal
from rewards.numbers import SIGNIFICANT, rounded
from rewards.units import TRIGONOMETRIC

# Units are stripped before, by rules that see a variable t is no tonne: math-verify reads x^2 s as x^2 otherwise.
READING = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="all", equations=False
    )
)
POINTS = 3
"""Positive real points at which two expressions with variables must agree."""
DIGITS = 40
CLOSE = sympy.Float("1e-12")
CLOSE_CONSTANT = sympy.Float("1e-25")
"""Constants are worked out to 40 digits, so what differs only in the 13th is told apart."""
ANGLE = re.compile(r"(\d+(?:\.\d+)?|[a-z])\s*\^\s*\\circ")
MATRICES = (sympy.MatrixBase, sympy.MatrixExpr)
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
        wanted, given = _with_unit(wanted), _with_unit(given)
    if isinstance(wanted, sympy.Eq) and isinstance(given, sympy.Eq):
        return _same_equation(wanted, given)
    if isinstance(wanted, sympy.Expr) and isinstance(given, sympy.Expr):
        return _same_expression(wanted, given, answer)
    if isinstance(wanted, MATRICES) and isinstance(given, MATRICES):
        return _same_matrix(wanted, given)
    if isinstance(wanted, sympy.Expr) or isinstance(given, sympy.Expr):
        return False
    solved = _solution(wanted), _solution(given)
    if solved[0] is not None and solved[1] is not None:
        names = {symbol.name for value in (wanted, given) for symbol in value.free_symbols}
        return len(names) < 2 and bool(solved[0] == solved[1])
    return bool(verify([wanted], [given], timeout_seconds=None, allow_set_relation_comp=True))


@lru_cache(maxsize=512)
def _read(text: str) -> Any:
    """The sympy object that math-verify reads from a cleaned answer, None when it reads nothing."""
    if TRIGONOMETRIC.search(text):
        text = ANGLE.sub(r"(\\frac{\\pi}{180}\\cdot \1)", text)
    found = parse(rf"\boxed{{{text}}}", [READING], parsing_timeout=None)
    return next((value for value in found if not isinstance(value, str)), None)


def _same_matrix(gold: Any, answer: Any) -> bool:
    left, right = sympy.Matrix(gold.doit()), sympy.Matrix(answer.doit())
    return left.shape == right.shape and all(
        _same_expression(wanted, given, str(given)) for wanted, given in zip(left.flat(), right.flat(), strict=True)
    )


def _solution(value: Any) -> Any:
    """The set of real numbers that an inequality in one variable, or a set, describes; None for anything else."""
    if isinstance(value, sympy.Set):
        return value
    names = {symbol.name for symbol in value.free_symbols}
    if len(names) != 1 or not isinstance(value, (sympy.core.relational.Relational, sympy.And, sympy.Or)):
        return None
    try:
        return value.as_set()
    except NotImplementedError:
        return None


def _with_unit(value: Any) -> Any:
    """With every variable named i, whatever sympy assumes of it, replaced by the imaginary unit."""
    return value.subs({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"})


def _same_expression(gold: sympy.Expr, answer: sympy.Expr, written: str) -> bool:
    if gold == answer:
        return True
    names = _names(gold, answer)
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
    gold, answer = gold.doit(), answer.doit()
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    decimal = parse_literal(written)
    digits = DIGITS if decimal is None else DIGITS + decimal.digits
    left, right = _at(gold, {}, digits), _at(answer, {}, digits)
    if left is None or right is None:
        return False
    if decimal is not None and decimal.form == "decimal":
        if decimal.digits < SIGNIFICANT or not left.is_real:
            return False
        return rounded(Fraction(str(left)), decimal.decimals) == decimal.value
    return _near(left, right, CLOSE if answer.atoms(sympy.Float) or gold.atoms(sympy.Float) else CLOSE_CONSTANT)


def _same_equation(gold: sympy.Eq, answer: sympy.Eq) -> bool:
    """Proportional after all is moved to one side; what holds everywhere matches nothing."""
    left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    names = _names(left, right)
    ratios = []
    for point in _points(names):
        values = [_at(side, point) for side in (left, right)]
        if any(value is None for value in values) or abs(values[0]) < CLOSE or abs(values[1]) < CLOSE:
            continue
        ratios.append(values[0] / values[1])
        if len(ratios) > POINTS:
            return all(_near(ratio, ratios[0], CLOSE) for ratio in ratios)
    return False


def _names(*values: sympy.Expr) -> list[str]:
    return sorted({symbol.name for value in values for symbol in value.free_symbols})


def _points(names: list[str]) -> Iterator[dict[str, sympy.Float]]:
    """Random positive values for the variables, the same in every run."""
    rng = random.Random(20260101)
    for _ in range(12):
        yield {name: sympy.Float(rng.uniform(0.3, 2.7), DIGITS) for name in names}


def _at(value: sympy.Expr, point: dict[str, sympy.Float], digits: int = DIGITS) -> Any:
    """The number at a point, None where there is none. Variables go by name: sympy's assumptions on them may differ."""
    number = value.subs({symbol: point[symbol.name] for symbol in value.free_symbols}).evalf(digits)
    return number if number.is_number and number.is_finite and not number.has(sympy.nan, sympy.zoo, sympy.oo) else None


def _near(left: Any, right: Any, tolerance: sympy.Float) -> bool:
    return bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))
