"""Sums and products of literals, worked out exactly and without sympy: only to check ``4 + 9 = 13``."""

from __future__ import annotations

import re
from fractions import Fraction

from rewards.literals import parse_literal

LONGEST = 300
"""Characters; bounds the size of every intermediate result."""
TOKEN = re.compile(r"\s*(?:(\d[\d,]*(?:\.\d+)?|\.\d+)|(\\frac|\\times|\\cdot|\\div|[-+*/(){}]))")
OPERATORS = {r"\times": "*", r"\cdot": "*", r"\div": "/"}


def evaluate(text: str) -> Fraction | None:
    """The value of a literal, or of +, -, ×, ÷ and fractions of plain numbers; None for anything else."""
    literal = parse_literal(text)
    if literal is not None:
        return literal.value
    if len(text) > LONGEST:
        return None
    tokens, position = [], 0
    text = text.strip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(OPERATORS.get(match[0].strip(), match[0].strip()))
        position = match.end()
    parser = _Parser(tokens)
    try:
        value = parser.total()
    except (ValueError, ZeroDivisionError, IndexError, RecursionError):
        return None
    return value if parser.position == len(tokens) else None


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position = tokens, 0

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1]

    def total(self) -> Fraction:
        value = self._product()
        while self._peek() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._peek() in ("*", "/"):
            value = value * self._factor() if self._take() == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        token = self._take()
        if token == "-":
            return -self._factor()
        if token in ("(", "{"):
            value = self.total()
            self._expect(")" if token == "(" else "}")
            return value
        if token == r"\frac":
            self._expect("{")
            top = self.total()
            self._expect("}")
            self._expect("{")
            bottom = self.total()
            self._expect("}")
            return top / bottom
        return Fraction(token.replace(",", ""))

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise ValueError(token)
