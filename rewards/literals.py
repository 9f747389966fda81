"""Number literals in cleaned answers: exact rational values with percent, unit and how they were written.

A literal is a number that needs no evaluation. Roots, products, sums, powers and functions are not literals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal as Choice

from rewards.units import SCALES, UNIT_STOP_WORDS, canonical_unit

LONGEST_DIGITS = 4300
"""Python's own limit for ``int(text)``: longer runs of digits take quadratic time."""
LARGEST_EXPONENT = 10_000

Form = Choice["integer", "decimal", "fraction"]


@dataclass(frozen=True, slots=True)
class Number:
    """A literal: ``value`` with the percent sign applied, ``decimals`` as written, ``digits`` the significant ones.

    ``form`` "fraction" is anything exact that no finite decimal wrote: a/b, mixed numbers, repeating decimals.
    """

    value: Fraction
    form: Form
    decimals: int = 0
    digits: int = 0
    percent: bool = False
    unit: str | None = None


WHOLE = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+"
PLAIN = re.compile(rf"(?:(?P<whole>{WHOLE})(?:\.(?P<decimals>\d*))?|\.(?P<only>\d+))")
REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))")
POWER_OF_TEN = re.compile(
    r"\s*(?:\\times|\\cdot|\*|x|X)\s*10\s*\^\s*(?:\{\s*([-+]?\s*\d+)\s*\}|\(([-+]?\d+)\)|([-+]?\d+))"
)
BARE_POWER = re.compile(r"10\s*\^\s*(?:\{\s*([-+]?\s*\d+)\s*\}|([-+]?\d))")
E_NOTATION = re.compile(r"[eE]([-+]?\d+)(?![\d.])")
LATEX_FRACTION = re.compile(r"\\frac\{\s*([-+]?[\d,. ]+)\s*\}\s*\{\s*([-+]?[\d,. ]+)\s*\}")
SLASH = re.compile(r"\s*(?:/|\\div)\s*([-+]?[\d.,]*\d)")
MIXED = re.compile(r"(\d+) ?\\frac\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+) (\d+)/(\d+)|(\d+)-(\d+)/(\d+)(?=\D*$)")
CURRENCY = re.compile(r"(?:(?:US|A|C|HK)?\\\$|[€£¥₹₽₩]|(?:Rs|USD|EUR)\b\.?)\s*")
CURRENCY_NAMES = {
    "€": "euro",
    "£": "pound",
    "¥": "yen",
    "₹": "rupee",
    "₽": "ruble",
    "₩": "won",
    "R": "rupee",
    "E": "euro",
}
PERCENT = re.compile(r"\s*(?:%|\\?text\{\s*(?:%|percent|per cent)\s*\}|per ?cent\b|percentage\b)\s*$", re.IGNORECASE)


@lru_cache(maxsize=1 << 14)
def parse_literal(text: str) -> Number | None:
    """The number that a cleaned answer is, None when it is anything else."""
    text = text.strip()
    if not text or len(text) > LONGEST_DIGITS + 100 or not any(c.isdigit() for c in text):
        return None
    text = _unwrap(text)
    percent = PERCENT.search(text)
    if percent:
        text = text[: percent.start()]
    sign, rest = _sign(text)
    currency = CURRENCY.match(rest)
    unit: str | None = None
    if currency:
        unit = CURRENCY_NAMES.get(currency[0].strip()[0], "dollar")
        inner, rest = _sign(rest[currency.end() :])
        sign *= inner
    parsed = _core(_unwrap(rest) if rest.startswith("(") else rest)
    if parsed is None or sign == 0:
        return None
    number, end = parsed
    tail = rest[end:] if not rest.startswith("(") else ""
    scaled = _tail(tail)
    if scaled is None:
        return None
    scale, tail_unit = scaled
    if unit and tail_unit and tail_unit.startswith("/"):
        unit, tail_unit = unit + tail_unit, None
    if unit and tail_unit and unit != tail_unit:
        return None
    value = sign * number.value * scale
    return Number(
        value / 100 if percent else value,
        number.form,
        number.decimals if scale == 1 else 0,
        number.digits,
        bool(percent),
        unit or tail_unit,
    )


def _unwrap(text: str) -> str:
    """Without parentheses around the whole."""
    while text.startswith("(") and text.endswith(")") and "(" not in text[1:] and ")" not in text[:-1]:
        text = text[1:-1].strip()
    return text


def _sign(text: str) -> tuple[int, str]:
    """+1 or -1 and the rest; 0 when more than one sign stands there."""
    text = text.strip()
    if text[:1] in ("-", "+"):
        rest = text[1:].strip()
        return (0 if rest[:1] in ("-", "+") else -1 if text[0] == "-" else 1), rest
    return 1, text


def _core(text: str) -> tuple[Number, int] | None:
    """The unsigned number at the start and where it ends."""
    if mixed := MIXED.match(text):
        whole, top, bottom = (int(group) for group in mixed.groups() if group is not None)
        if 0 < top < bottom:
            return Number(whole + Fraction(top, bottom), "fraction"), mixed.end()
        return None
    if fraction := LATEX_FRACTION.match(text):
        top_bottom = [_signed_plain(group) for group in fraction.groups()]
        return _quotient(top_bottom, fraction.end())
    if repeating := REPEATING.match(text):
        return _repeating(repeating)
    if power := BARE_POWER.match(text):
        exponent = int((power[1] or power[2]).replace(" ", ""))
        return _scaled(Number(Fraction(1), "integer", digits=1), exponent, power.end())
    plain = PLAIN.match(text)
    if plain is None:
        return None
    number = _plain(plain)
    if number is None:
        return None
    end = plain.end()
    if slash := SLASH.match(text, end):
        return _quotient([number.value, _signed_plain(slash[1])], slash.end())
    if power := POWER_OF_TEN.match(text, end):
        return _scaled(number, int(next(g for g in power.groups() if g is not None).replace(" ", "")), power.end())
    if power := E_NOTATION.match(text, end):
        return _scaled(number, int(power[1]), power.end())
    return number, end


def _plain(match: re.Match[str]) -> Number | None:
    whole = re.sub(r"[, ]", "", match["whole"] or "0")
    decimals = match["decimals"] if match["whole"] is not None else match["only"]
    if len(whole) + len(decimals or "") > LONGEST_DIGITS:
        return None
    digits = (whole + (decimals or "")).lstrip("0")
    if not decimals:
        return Number(Fraction(int(whole)), "integer", 0, len(digits))
    return Number(Fraction(int(whole + decimals), 10 ** len(decimals)), "decimal", len(decimals), len(digits))


def _signed_plain(text: str) -> Fraction | None:
    sign, rest = _sign(text.strip())
    match = PLAIN.fullmatch(rest.strip())
    number = _plain(match) if match and sign else None
    return None if number is None else sign * number.value


def _quotient(parts: list[Fraction | None], end: int) -> tuple[Number, int] | None:
    top, bottom = parts
    if top is None or not bottom:
        return None
    return Number(top / bottom, "fraction"), end


def _repeating(match: re.Match[str]) -> tuple[Number, int] | None:
    whole, head = match[1] or "0", match[2]
    period = match[3] or match[4] or match[5]
    if len(whole) + len(head) + len(period) > 1000:
        return None
    nines = 10 ** len(period) - 1
    value = Fraction(int(whole + head)) + Fraction(int(period), nines)
    return Number(value / 10 ** len(head), "fraction"), match.end()


def _scaled(number: Number, exponent: int, end: int) -> tuple[Number, int] | None:
    if abs(exponent) > LARGEST_EXPONENT:
        return None
    value = number.value * Fraction(10) ** exponent
    decimals = max(0, number.decimals - exponent)
    return Number(value, "integer" if value.denominator == 1 else "decimal", decimals, number.digits), end


UNIT_FRACTION = re.compile(
    r"\s*\\(?:text\{\s*)?frac\{([^{}\d]*(?:\{[^{}\d]*\})?[^{}\d]*)\}\{([^{}\d]*(?:\{[^{}\d]*\})?\s*(?:\^\s*\d)?)\}\s*"
)
ORDINAL = re.compile(r"\s*\^\s*\{?\s*\\text\{\s*(?:st|nd|rd|th)\s*\}\s*\}?\s*")
DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:[CF]\b|\\text\{\s*[CF]\s*\})?")


def _tail(text: str) -> tuple[int, str | None] | None:
    """What follows the digits as (factor, unit); None when it is no unit."""
    if not text.strip():
        return 1, None
    if ORDINAL.fullmatch(text):
        return 1, None
    degrees = DEGREES.match(text)
    if degrees:
        text = text[degrees.end() :]
        if not text.strip():
            return 1, None
    if fraction := UNIT_FRACTION.fullmatch(text):
        return 1, canonical_unit(f"{fraction[1]} per {fraction[2]}")
    return _unit_words(text)


def _unit_words(text: str) -> tuple[int, str | None] | None:
    """Words in ``\\text`` or set apart by a blank; letters that touch the digits only when they are a known unit."""
    in_text = "\\text" in text
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    if re.search(r"[^\w\s.^/*'²³()-]|_|\\", plain) or re.search(r"(?<![\^{ -])\d|\(\s*\)", plain):
        return None
    words = plain.replace("(", " ").replace(")", " ").split()
    scale = 1
    while words and words[0].lower().rstrip("s.,") in SCALES:
        scale *= SCALES[words.pop(0).lower().rstrip("s.,")]
    if not words:
        return scale, None
    if len(words) > 6 or any(word.lower().strip(".") in UNIT_STOP_WORDS for word in words):
        return None
    unit, known = canonical_unit(" ".join(words)), canonical_unit(" ".join(words), known_only=True)
    apart = in_text or text[0].isspace()
    letters = re.sub(r"[^\w]|\d", "", words[0])
    if letters.isascii() and not in_text:
        # Letters that touch the digits are variables unless they are a long word or a unit of more than one letter.
        if not apart and (len(letters) < 2 or (known is None and len(letters) < 5)):
            return None
        if len(letters) < 2 and known is None:
            return None
    return scale, unit
