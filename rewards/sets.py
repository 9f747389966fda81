"""Sets of real numbers as they are written: intervals, unions, inequalities, the line without some points."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

from rewards.literals import parse_literal
from rewards.structure import CALL, SYMBOL, bracketed, set_content, split_list

VARIABLE = re.compile(rf"\s*(?:{SYMBOL}|{CALL})\s*")
INFINITY = re.compile(r"\s*([-+]?)\s*(?:\\infty|∞|infinity|inf|oo)\s*")
COMPARISON = re.compile(r"<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])")
REALS = re.compile(
    r"\s*(?:\\mathbb\s*\{?\s*R\s*\}?|\\text\{\s*(?:all real numbers|all reals|real numbers)\s*\}|\\R)\s*"
)
MEMBER = re.compile(r"\s*([A-Za-z]|\\[a-z]+)\s*\\in(?![A-Za-z])\s*(.+)", re.DOTALL)
BUILDER = re.compile(r"\s*(?:[A-Za-z]|\\[a-z]+)\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*[|:](.+)", re.DOTALL)
OR = re.compile(r"\s*,?\s*(?:\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])|或)\s*")
AND = re.compile(r"\s*,?\s*(?:\\text\s*\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])|且)\s*")
UNION = re.compile(r"\\cup(?![A-Za-z])")
WITHOUT = re.compile(r"\\setminus(?![A-Za-z])|\\backslash(?![A-Za-z])|(?<=\})\s*-\s*(?=\\\{)")


@dataclass(frozen=True, slots=True)
class Interval:
    """Ends as text, "-oo" and "oo" for the infinite ones; a single point has equal closed ends."""

    low: str
    high: str
    low_closed: bool
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    """A union of intervals; ``variable`` when it was written as a condition on one."""

    intervals: tuple[Interval, ...]
    variable: str | None = None


def parse_set(text: str) -> RealSet | None:
    """The set a cleaned answer writes down, None when it is none or would have to be solved first.

    A pair ``(a, b)`` is read as an open interval: as a point it is compared end by end all the same.
    """
    if member := MEMBER.fullmatch(text):
        inner = parse_set(member[2])
        return inner and replace(inner, variable=member[1])
    content = set_content(text)
    if content is not None and (builder := BUILDER.fullmatch(content)):
        return parse_set(builder[1].strip())
    alternatives = [part for part in OR.split(text) if part]
    if len(alternatives) > 1:
        return _joined([parse_set(part) for part in alternatives])
    pieces = [piece.strip() for piece in UNION.split(text)]
    if len(pieces) > 1:
        return _joined([_points(piece) or parse_set(piece) for piece in pieces])
    if REALS.fullmatch(text):
        return RealSet((Interval("-oo", "oo", False, False),))
    removed = WITHOUT.split(text)
    if len(removed) == 2:
        base, points = parse_set(removed[0].strip()), set_content(removed[1].strip())
        return None if base is None or points is None else _without(base, split_list(points))
    conditions = AND.split(text)
    if len(conditions) == 2:
        return _both([parse_set(part) for part in conditions])
    if COMPARISON.search(text):
        return _inequality(text)
    pair = bracketed(text)
    if pair is None or len(pair[2]) != 2:
        return None
    opening, closing, (low, high) = pair
    return RealSet((Interval(_end(low), _end(high), opening == "[", closing == "]"),))


def _joined(sets: list[RealSet | None]) -> RealSet | None:
    known = [part for part in sets if part is not None]
    variables = {part.variable for part in known} - {None}
    if len(known) != len(sets) or len(variables) > 1:
        return None
    return RealSet(tuple(i for part in known for i in part.intervals), next(iter(variables), None))


def _points(text: str) -> RealSet | None:
    content = set_content(text)
    if not content:
        return None
    return RealSet(tuple(Interval(point, point, True, True) for point in split_list(content)))


def _without(base: RealSet, points: list[str]) -> RealSet | None:
    """One interval without some points inside it, which must be numbers when there are several."""
    numbers = [(number.value, point) for point in points if (number := parse_literal(point))]
    if len(base.intervals) != 1 or not points or (len(numbers) != len(points) and len(points) > 1):
        return None
    whole = base.intervals[0]
    inner = points if len(points) == 1 else [point for _, point in sorted(numbers)]
    ends = [whole.low, *inner, whole.high]
    last = len(ends) - 2
    return RealSet(
        tuple(
            Interval(low, high, index == 0 and whole.low_closed, index == last and whole.high_closed)
            for index, (low, high) in enumerate(pairwise(ends))
        ),
        base.variable,
    )


def _both(conditions: list[RealSet | None]) -> RealSet | None:
    """``x > a`` and ``x < b``: the interval between them."""
    if any(part is None or len(part.intervals) != 1 for part in conditions):
        return None
    first, second = conditions
    assert first is not None and second is not None
    if first.variable != second.variable:
        return None
    one, other = first.intervals[0], second.intervals[0]
    if one.high != "oo":
        one, other = other, one
    if one.high != "oo" or other.low != "-oo":
        return None
    return RealSet((Interval(one.low, other.high, one.low_closed, other.high_closed),), first.variable)


def _end(text: str) -> str:
    infinite = INFINITY.fullmatch(text)
    return text if infinite is None else "-oo" if infinite[1] == "-" else "oo"


def _inequality(text: str) -> RealSet | None:
    """``a < x``, ``x \\ge b`` and ``a < x \\le b`` with the variable alone in its member."""
    signs = COMPARISON.findall(text)
    members = [part.strip() for part in COMPARISON.split(text)]
    if len(signs) == 1:
        left, right = members
        if _is_variable(right) and not _is_variable(left):
            left, right, signs = right, left, [_turned(signs[0])]
        if not _is_variable(left) or left in right or not right:
            return None
        if signs[0].startswith(r"\ne"):
            return _without(RealSet((Interval("-oo", "oo", False, False),), left), [right])
        closed = signs[0] in (r"\le", r"\ge")
        if signs[0] in ("<", r"\le"):
            return RealSet((Interval("-oo", _end(right), False, closed),), left)
        return RealSet((Interval(_end(right), "oo", closed, False),), left)
    if len(signs) != 2 or not _is_variable(members[1]) or r"\ne" in signs:
        return None
    low, variable, high = members
    if signs[0] in (">", r"\ge"):
        low, high, signs = high, low, [_turned(signs[1]), _turned(signs[0])]
    if any(sign in (">", r"\ge") for sign in signs) or not low or not high:
        return None
    return RealSet((Interval(_end(low), _end(high), signs[0] == r"\le", signs[1] == r"\le"),), variable)


def _turned(sign: str) -> str:
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}.get(sign, sign)


def _is_variable(text: str) -> bool:
    return VARIABLE.fullmatch(text) is not None


def is_condition(text: str) -> bool:
    """Does a relation other than ``=``, a union or an interval with a closed end show that this can only be a set?"""
    member = MEMBER.fullmatch(text)
    if member:
        content = set_content(member[2])
        return content is None or BUILDER.fullmatch(content) is not None
    if COMPARISON.search(text) or UNION.search(text) or REALS.fullmatch(text):
        return True
    pair = bracketed(text)
    return pair is not None and len(pair[2]) == 2 and (pair[0], pair[1]) != ("(", ")")
