"""Comparison of two cleaned answers by their kind; single expressions that need sympy go to the caller's ``leaf``.

Each ``_by_…`` function answers (equal, rule), or None when the gold is not of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from rewards.bombs import why_refused
from rewards.literals import parse_literal
from rewards.numbers import same_number
from rewards.sets import Interval, RealSet, is_condition, parse_set
from rewards.structure import bracketed, elements, matrix, named_parts, set_content, split_name, split_top
from rewards.units import split_unit
from rewards.words import base_numeral, choice_letter, chosen_letter, clock, is_text, ratio_terms, word_key

Leaf = Callable[[str, str], bool]
"""``leaf(gold, answer)``: are two expressions, equations or inequalities equal? May raise ``GoldUnparsable``."""
Outcome = tuple[bool, str]
T = TypeVar("T")

APPROXIMATELY = re.compile(r"^\\approx(?![A-Za-z])\s*")
BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
MOST_ELEMENTS = 50
"""Elements of a list: more are compared as strings only, for each may need sympy against each."""


class Undecided(Exception):
    """The comparison needs sympy, which this process does not load."""


class GoldUnparsable(Exception):
    """Nothing can be read from the gold answer, so nothing can be judged against it."""


def needs_worker(gold: str, answer: str) -> bool:
    """The leaf of a process that must not load sympy."""
    raise Undecided


def compare(gold: str, answer: str, leaf: Leaf = needs_worker) -> Outcome:
    """(equal, the rule that decided) of two cleaned answers."""
    gold = APPROXIMATELY.sub("", gold)
    number = parse_literal(gold)
    if number is None or number.form != "integer":  # nothing is about 5 when the answer is 5
        answer = APPROXIMATELY.sub("", answer)
    if _bare(gold) == _bare(answer):
        return True, "equal strings"
    refused = why_refused(answer)
    if refused:
        return False, f"refused: the answer is {refused}"
    refused = why_refused(gold)
    if refused:
        return False, f"refused: the gold is {refused} and the strings differ"
    return _compare(gold, answer, leaf)


def _bare(text: str) -> str:
    """Without blanks, but for those that keep two numbers apart."""
    return BLANKS.sub("", text)


def _compare(gold: str, answer: str, leaf: Leaf) -> Outcome:
    if _bare(gold) == _bare(answer):
        return True, "equal strings"
    for rule in RULES:
        outcome = rule(gold, answer, leaf)
        if outcome is not None:
            return outcome
    return _by_expression(gold, answer, leaf)


def _by_choice(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    letter = choice_letter(gold)
    return None if letter is None else (chosen_letter(answer) == letter, "choice letter")


def _by_clock(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    wanted = clock(gold)
    given = clock(answer)
    if wanted is None:
        return (False, "the answer is a time, the gold is none") if given is not None and given[2] else None
    if given is None:
        return None if not wanted[2] and ratio_terms(answer) else (False, "the gold is a time, the answer is none")
    halves = {wanted[2], given[2]} - {""}
    return wanted[:2] == given[:2] and len(halves) < 2, "clock time"


def _by_base(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    wanted = base_numeral(gold)
    if wanted is None:
        return None
    # The base may be left out: the problem names it, and the digits alone answer "write it in base 2".
    given = base_numeral(answer) or (_bare(answer).lstrip("0"), wanted[1])
    return wanted == given, "numeral of a base"


def _by_text(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    if is_text(gold) and (parse_set(gold) is None or parse_set(answer) is None):
        key = word_key(gold)
        return key in (word_key(answer), word_key(split_name(answer)[1])), "words"
    if is_text(answer) and parse_literal(gold) is None and word_key(gold) != word_key(answer):
        return False, "the answer is words, the gold is none"
    return None


def _by_name(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    """``name = value`` equals its value; two different names are two different statements when the values are numbers."""
    if len(elements(gold)) > 1 or len(elements(answer)) > 1:
        return None
    (gold_name, gold_value), (answer_name, answer_value) = split_name(gold), split_name(answer)
    if gold_name is None and answer_name is None:
        return None
    if gold_name and answer_name and gold_name.casefold() != answer_name.casefold():
        if parse_literal(gold_value) is not None:
            return False, "values of different names"
    elif (gold_name is None and "=" in gold) or (answer_name is None and "=" in answer):
        return None
    return _compare(gold_value, answer_value, leaf)


def _by_number(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    wanted = parse_literal(gold)
    if wanted is None:
        return None
    inner = set_content(answer)
    given = parse_literal(answer if inner is None else inner)
    if given is None:
        return False, "the gold is a number, the answer is not one that is worked out"
    return same_number(wanted, given), "number literals"


def _by_ratio(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    wanted = ratio_terms(split_top(gold, "=")[-1])
    given = ratio_terms(split_top(answer, "=")[-1])
    if wanted is None:
        return None if given is None else (False, "the answer is a ratio, the gold is none")
    if given is None or len(given) != len(wanted):
        return False, "ratio"
    return all(_compare(g, a, leaf)[0] for g, a in zip(wanted, given, strict=True)), "ratio, term by term"


def _by_set(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    wanted, given = parse_set(gold), parse_set(answer)
    if wanted is not None and given is not None:
        return _same_set(wanted, given, leaf), "sets of real numbers"
    if not is_condition(gold):
        return (False, "the answer is a set of numbers, the gold is none") if is_condition(answer) else None
    if len(elements(gold)) > 1 or len(elements(answer)) > 1:
        return None
    if is_condition(answer) or given is not None:
        return leaf(gold, answer), "sympy: inequalities"
    return False, "the gold is a set of numbers, the answer is none"


def _same_set(gold: RealSet, answer: RealSet, leaf: Leaf) -> bool:
    if gold.variable and answer.variable and gold.variable.casefold() != answer.variable.casefold():
        return False
    if len(gold.intervals) != len(answer.intervals) or len(gold.intervals) > MOST_ELEMENTS:
        return False

    def same(wanted: Interval, given: Interval) -> bool:
        if (wanted.low_closed, wanted.high_closed) != (given.low_closed, given.high_closed):
            return False
        ends = ((wanted.low, given.low), (wanted.high, given.high))
        if any((w in ("oo", "-oo") or g in ("oo", "-oo")) and w != g for w, g in ends):
            return False
        return all(w == g or _compare(w, g, leaf)[0] for w, g in ends)

    return _match(gold.intervals, answer.intervals, same)


def _by_list(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    wanted, given = _distinct(elements(gold)), _distinct(elements(answer))
    if len(wanted) == 1 and len(given) > 1 and all(split_name(item)[0] for item in given):
        wanted = named_parts(gold) or wanted
    elif len(given) == 1 and len(wanted) > 1 and all(split_name(item)[0] for item in wanted):
        given = named_parts(answer) or given
    if len(wanted) == 1 and len(given) == 1:
        if [gold] == wanted and [answer] == given:
            return None
        return _compare(wanted[0], given[0], leaf)
    if len(wanted) != len(given):
        return False, f"a list of {len(wanted)} against one of {len(given)}"
    wanted, given = _common_names(wanted, given)
    if len(wanted) > MOST_ELEMENTS:
        return sorted(map(_bare, wanted)) == sorted(map(_bare, given)), "long list, as strings"
    return _match(wanted, given, lambda w, g: _compare(w, g, leaf)[0]), "list, each element once"


def _distinct(items: Sequence[str]) -> list[str]:
    return list({_bare(item): item for item in items}.values())


def _common_names(gold: list[str], answer: list[str]) -> tuple[list[str], list[str]]:
    """Both lists without names where only one has them, or where one name stands for all."""
    splits = [[split_name(item) for item in items] for items in (gold, answer)]
    names = [{name for name, _ in side if name} for side in splits]
    if len(names[0]) < 2 or len(names[1]) < 2:
        return [value for _, value in splits[0]], [value for _, value in splits[1]]
    return gold, answer


def _match(gold: Sequence[T], answer: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Does each element of one find its own in the other? Equal ones first, so that sympy sees what is left."""
    left = list(answer)
    rest = []
    for wanted in gold:
        if wanted in left:
            left.remove(wanted)
        else:
            rest.append(wanted)
    for wanted in rest:
        found = next((given for given in left if same(wanted, given)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _by_tuple(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    wanted, given = bracketed(gold), bracketed(answer)
    if wanted is None and given is None:
        return None
    if wanted is None or given is None or len(wanted[2]) != len(given[2]):
        return False, "a tuple against something else"
    if len(wanted[2]) == 2 and wanted[:2] != given[:2]:
        return False, "interval ends"
    return all(_compare(w, g, leaf)[0] for w, g in zip(wanted[2], given[2], strict=True)), "tuple, in order"


def _by_matrix(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    wanted, given = matrix(gold), matrix(answer)
    if wanted is None:
        return None
    if given is None:
        # A factor before a matrix has to be multiplied out.
        return (leaf(gold, answer), "sympy: matrix") if r"\begin" in answer else (False, "matrix")
    if wanted[0] != given[0] or [len(row) for row in wanted[1]] != [len(row) for row in given[1]]:
        return False, "matrix of another shape"
    cells = [pair for rows in zip(wanted[1], given[1], strict=True) for pair in zip(*rows, strict=True)]
    return all(_compare(w, g, leaf)[0] for w, g in cells), "matrix, cell by cell"


def _by_equation(gold: str, answer: str, leaf: Leaf) -> Outcome | None:
    if "=" not in gold and "=" not in answer:
        return None
    if "=" not in gold or "=" not in answer:
        return False, "an equation against an expression"
    return leaf(gold, answer), "sympy: equations"


def _by_expression(gold: str, answer: str, leaf: Leaf) -> Outcome:
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False, "different units"
    if _bare(gold) == _bare(answer):
        return True, "equal strings"
    if r"\ldots" in answer or not answer or re.search(r"(?<![A-Za-z\\])\\text\{", answer):
        return False, "the answer is no expression"
    return leaf(gold, answer), "sympy"


RULES = (
    _by_choice, _by_clock, _by_base, _by_text, _by_name, _by_number,
    _by_ratio, _by_set, _by_list, _by_tuple, _by_matrix, _by_equation,
)  # fmt: skip
"""In this order: the first that knows the gold's kind decides."""
