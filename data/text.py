"""Normalised text and ids: what makes two problems the same problem."""

from __future__ import annotations

import re
import unicodedata

from pipeline.seeds import content_id

_SPACE = re.compile(r"\s+")
_UNUSABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Control characters, and halves of surrogate pairs, which no file can hold."""
MARKS_IN_A_ROW = 30
"""Most combining marks that a character may carry (Unicode's stream-safe format, UAX 15 §13): sorting them is quadratic."""
_MAYBE_MARKS = re.compile(f"[\u0300-\U0010ffff][\u0300-\U0010ffff]{{{MARKS_IN_A_ROW}}}")
"""No mark lies below U+0300: of most texts this says quickly that they hold no such row (the first one is searched fast)."""


def clean_text(text: str) -> str:
    """The text without control characters (NUL bytes break terminals and C strings) and without outer blanks."""
    return _UNUSABLE.sub("", text).strip()


def nfkc(text: str) -> str:
    """The text in normal form KC, in linear time whatever it holds: marks beyond 30 in a row are dropped."""
    if text.isascii():
        return text
    if len(text) > 1000 and _MAYBE_MARKS.search(text) and any(map(unicodedata.combining, text)):
        text = _stream_safe(text)
    return unicodedata.normalize("NFKC", text)


def _stream_safe(text: str) -> str:
    kept, row = [], 0
    for character in text:
        row = row + 1 if unicodedata.combining(character) else 0
        if row <= MARKS_IN_A_ROW:
            kept.append(character)
    return "".join(kept)


def normalise_problem(text: str) -> str:
    """NFKC, blanks collapsed. Case, signs and punctuation stay: they can change what a problem asks."""
    return _SPACE.sub(" ", nfkc(text)).strip()


def problem_id(text: str) -> str:
    """24 hexadecimal digits of the normalised text: the same problem has the same id in every run and every set."""
    return content_id("problem", normalise_problem(text))


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}`` or ``\boxed x``, braces balanced; None when there is none or it is unclosed.

    ``last_boxed(r"so \boxed{\frac{1}{2}}")`` is ``\frac{1}{2}``; an empty box is the empty string.
    """
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix(r"\boxed").removeprefix(r"\fbox").lstrip()
    if not rest.startswith("{"):
        match = re.match(r"\\[A-Za-z]+|[^\s$.,;]", rest)
        return match.group() if match else None
    depth = 0
    for position, character in enumerate(rest):
        escaped = position > 0 and rest[position - 1] == "\\"
        if character in "{}" and not escaped:
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[1:position].strip()
    return None
