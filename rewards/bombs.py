"""Answers that no computer algebra should see: too long, too deep, or numbers too large to write down."""

from __future__ import annotations

import re

LONGEST_ANSWER = 2000
LONGEST_DIGITS = 4300
DEEPEST = 25
LARGEST_EXPONENT = 10_000
LARGEST_FACTORIAL = 3000
LARGEST_LIMIT = 10_000

OPENING = re.compile(r"[\[({]")
LONG_RUN = re.compile(r"\d{4301}")
TOWER = re.compile(r"(?:\^|\*\*)\s*[\d{(][^=,;&]{0,2000}?(?:\^|\*\*)")


def why_refused(text: str) -> str | None:
    """The limit that a cleaned answer breaks, None when it may be evaluated."""
    if len(text) > LONGEST_ANSWER:
        return f"longer than {LONGEST_ANSWER} characters"
    if LONG_RUN.search(text):
        return f"a run of more than {LONGEST_DIGITS} digits"
    if depth(text) > DEEPEST:
        return f"nested deeper than {DEEPEST}"
    return None


def depth(text: str) -> int:
    """The deepest nesting of braces, brackets and parentheses of any kind."""
    level = deepest = 0
    for character in text:
        if character in "{([":
            level += 1
            deepest = max(deepest, level)
        elif character in "})]":
            level = max(0, level - 1)
    return deepest
