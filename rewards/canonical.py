"""The form under which an answer is stored and votes: equal answers are written equal as far as no algebra is needed."""

from __future__ import annotations

import re

from rewards.bombs import DEEPEST, LONGEST_ANSWER, depth
from rewards.cleaning import clean
from rewards.literals import parse_literal
from rewards.sets import parse_set
from rewards.structure import bracketed, elements, split_name
from rewards.units import split_unit
from rewards.words import choice_letter, clock, is_text, word_key

LARGEST_BITS = 4096
"""Numbers larger than this keep their own spelling: Python refuses to write integers of over 4300 digits."""


def canonical(answer: str) -> str:
    """``1/2`` for ``0.5``, ``50\\%`` and ``x = \\frac12``; lists in one order; words in lower case; units dropped."""
    text = clean(answer)
    if not text or len(text) > LONGEST_ANSWER or depth(text) > DEEPEST:
        return re.sub(r"\s+", "", text)[:LONGEST_ANSWER]
    return _form(text)


def _form(text: str) -> str:
    if (letter := choice_letter(text)) is not None:
        return letter
    if (time := clock(text)) is not None:
        return f"{time[0]}:{time[1]:02d}{time[2] and time[2] + 'm'}"
    if is_text(text):
        return word_key(text)
    literal = parse_literal(text)
    if literal is not None:
        large = max(literal.value.numerator.bit_length(), literal.value.denominator.bit_length()) > LARGEST_BITS
        return re.sub(r"[\s,]+", "", text) if large else str(literal.value)
    items = elements(text)
    if len(items) > 1:
        named = [split_name(item) for item in items]
        several = len({name for name, _ in named if name}) > 1
        return ",".join(
            sorted({f"{name}={_form(value)}" if several and name else _form(value) for name, value in named})
        )
    name, value = split_name(text)
    if name is not None:
        return _form(value)
    real_set = parse_set(text)
    if real_set is not None:
        return r"\cup".join(
            sorted(
                f"{'[' if part.low_closed else '('}{_form(part.low)},{_form(part.high)}{']' if part.high_closed else ')'}"
                for part in real_set.intervals
            )
        )
    if (parts := bracketed(text)) is not None:
        return parts[0] + ",".join(_form(part) for part in parts[2]) + parts[1]
    if items and items != [text]:
        return _form(items[0])
    return re.sub(r"\s+", "", split_unit(text)[0])
