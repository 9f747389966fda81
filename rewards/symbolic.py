"""Equality of two expressions by math-verify and sympy. Runs in worker processes only: it may hang or need any memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from rewards.comparison import GoldUnparsable


@lru_cache(maxsize=512)
def _parse(text: str) -> list[Any]:
    return parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)


def equal(gold: str, answer: str) -> bool:
    """Are two cleaned expressions equal? Raises ``GoldUnparsable`` when math-verify reads nothing from the gold."""
    parsed_gold = _parse(gold)
    if not parsed_gold:
        raise GoldUnparsable(gold)
    return bool(verify(parsed_gold, _parse(answer), timeout_seconds=None, allow_set_relation_comp=True))
