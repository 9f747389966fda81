"""How far a passage repeats a benchmark text, word for word: numbers in their order, words in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUMBER_WORDS = frozenset(
    {
        "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
        "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty",
        "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "thousand", "million",
    }
)  # fmt: skip
"""Words that count as numbers. Not "one", which is mostly a pronoun, nor "half" and "twice"."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Shares in [0, 1] of a benchmark text's words and of its numbers that a passage has in the same order.

    ``numbers`` is None when the benchmark text has none.
    """

    words: float
    numbers: float | None


def align(reference: Sequence[str], passage: Sequence[str]) -> Alignment:
    """Longest common subsequences of the words, and of the numbers alone, over the reference's length.

    ``align(["2", "cans", "cost", "5"], ["2", "tins", "cost", "6"])`` has words 0.5 and numbers 0.5.
    """
    numbers = [word for word in reference if is_number(word)]
    shared = common_subsequence(numbers, [word for word in passage if is_number(word)])
    return Alignment(
        words=common_subsequence(reference, passage) / max(1, len(reference)),
        numbers=shared / len(numbers) if numbers else None,
    )


def is_number(word: str) -> bool:
    """Whether a word states a quantity: it holds a digit, or is a number word."""
    return word in NUMBER_WORDS or any(character.isdigit() for character in word)


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, a machine word of ``first`` at a time (Hyyrö 2004, bit-parallel LCS)."""
    masks: dict[str, int] = {}
    for position, word in enumerate(first):
        masks[word] = masks.get(word, 0) | 1 << position
    everything = (1 << len(first)) - 1
    state = everything
    for word in second:
        matched = state & masks.get(word, 0)
        state = ((state + matched) | (state - matched)) & everything
    return len(first) - state.bit_count()


def densest_window(positions: Sequence[int], width: int) -> tuple[int, int]:
    """(first, last) of the ascending positions such that at most ``width`` apart as many as possible lie between them.

    ``densest_window([3, 50, 52, 55], 10)`` is (50, 55).
    """
    best, start = (0, 0), 0
    for end in range(len(positions)):
        while positions[end] - positions[start] > width:
            start += 1
        if end - start > best[1] - best[0]:
            best = (start, end)
    return positions[best[0]], positions[best[1]]
