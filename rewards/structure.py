"""How a cleaned answer is put together: its list elements, brackets, named value, matrix cells. Strings in and out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from rewards.arithmetic import evaluate
from rewards.literals import parse_literal

GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|"
    "phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Phi|Psi|Omega|ell"
)
SYMBOL = rf"(?:[A-Za-z]|\\(?:{GREEK})(?![A-Za-z]))\s*(?:_\s*(?:\{{[^{{}}]*\}}|[A-Za-z0-9]))?'*"
OBJECT = (
    rf"(?:{SYMBOL}|[A-Z]{{2,4}}'*|\|\s*[A-Za-z]{{1,4}}\s*\||\[\s*[A-Z]{{3,6}}\s*\]"
    rf"|(?:m\s*)?\\(?:angle|triangle)\s*[A-Z]{{1,4}}|\\(?:overline|overrightarrow|vec|hat|bar)\s*\{{\s*[A-Za-z]{{1,3}}\s*\}})"
)
CALL = rf"{SYMBOL}\s*(?:\^\s*\{{\s*-1\s*\}})?\s*\([^()=]*\)"
WORDS = r"(?:\\text\{[^{}]*\}|[A-Za-z]{4,}|[A-Za-z]{2,}(?: [A-Za-z]+)+)"
NAME = re.compile(
    rf"\s*(?:{CALL}|{OBJECT}|{WORDS}|\(\s*{SYMBOL}(?:\s*[,;]\s*{SYMBOL})+\s*\)"
    rf"|\\frac\{{\s*{OBJECT}\s*\}}\{{\s*{OBJECT}\s*\}}|{OBJECT}\s*(?:[:/]\s*{OBJECT}\s*)+)\s*"
)
RELATION = re.compile(r"<|>|\\(?:le|ge|ne|approx|equiv|sim|in|subset|subseteq|to)(?![A-Za-z])")
CONJUNCTION = re.compile(
    r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|和|或|及)\s*,?"
)
MEMBER_OF_SET = re.compile(rf"^{SYMBOL}\s*\\in(?![A-Za-z])\s*(?=\\\{{)")
GROUPED_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])\s*")
ENVIRONMENT = re.compile(
    r"[(\[]?\s*\\begin\s*\{\s*([a-zA-Z]*matrix|array)\s*\}\s*(?:\{[lcr| ]*\})?(.*)\\end\s*\{\s*\1\s*\}\s*[)\]]?",
    re.DOTALL,
)


def top_level(text: str) -> Iterator[tuple[int, str]]:
    """Positions and characters outside all brackets; a command is given as its backslash alone."""
    depth, position = 0, 0
    while position < len(text):
        character, start = text[position], position
        position += 1
        if character == "\\" and position < len(text):
            following = text[position]
            position += 1
            if following in "{}":
                character = following
            else:
                while following.isalpha() and position < len(text) and text[position].isalpha():
                    position += 1
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(0, depth - 1)
        elif depth == 0:
            yield start, character


def split_top(text: str, separators: str) -> list[str]:
    """The parts between top-level separators, stripped."""
    parts, start = [], 0
    for position, character in top_level(text):
        if character in separators:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def split_list(text: str) -> list[str]:
    """The parts between top-level commas and semicolons; commas that group digits are no separators beside ", "."""
    spaced = ", " in text
    hidden = GROUPED_COMMA.sub("\0", text) if spaced else text
    return [part.replace("\0", ",") for part in split_top(hidden, ",;") if part]


def elements(text: str) -> list[str]:
    """The elements of a list or set, signs of ``\\pm`` told apart; one element when it is neither.

    >>> elements(r"1 \\pm 2i"), elements(r"\\{1, 2\\}"), elements("3 and 4")
    (['1 +2i', '1 -2i'], ['1', '2'], ['3', '4'])
    """
    text = MEMBER_OF_SET.sub("", text)
    inner = set_content(text)
    if inner is None and parse_literal(text) is not None:
        return [text]
    parts = split_list(CONJUNCTION.sub(", ", text if inner is None else inner))
    return [signed for part in parts for signed in _signs(part)]


def named_parts(text: str) -> list[str]:
    """``x=1`` and ``y=2`` for ``(x,y)=(1,2)``; empty for anything else."""
    name, value = split_name(text)
    names, values = bracketed(name or ""), bracketed(value)
    if names is None or values is None or len(names[2]) != len(values[2]):
        return []
    return [f"{one}={part}" for one, part in zip(names[2], values[2], strict=True)]


def set_content(text: str) -> str | None:
    """What stands between ``\\{`` and ``\\}`` around the whole."""
    if not (text.startswith(r"\{") and text.endswith(r"\}")):
        return None
    inner = text[2:-2].strip()
    return inner if _balanced(inner) else None


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _signs(text: str) -> list[str]:
    found = PLUS_MINUS.search(text)
    if found is None:
        return [text]
    plus = PLUS_MINUS.sub(lambda match: "+" if match[1] == "pm" else "-", text)
    minus = PLUS_MINUS.sub(lambda match: "-" if match[1] == "pm" else "+", text)
    return [_positive(plus), _positive(minus)]


def _positive(text: str) -> str:
    """Without a leading plus, also after a name: ``x=+4`` is ``x=4``."""
    return re.sub(r"(^|=)\s*\+", r"\1", text).strip()


def bracketed(text: str) -> tuple[str, str, list[str]] | None:
    """(opening bracket, closing bracket, parts) of a tuple or interval of at least two parts."""
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")").strip()
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]" or any(True for _ in top_level(text)):
        return None
    # Brackets that close before the end, as in (1)(2), leave nothing at the top level either.
    if not _balanced(text[1:-1]):
        return None
    parts = split_list(text[1:-1])
    return (text[0], text[-1], parts) if len(parts) > 1 else None


def matrix(text: str) -> tuple[str, list[list[str]]] | None:
    """("matrix" or "determinant", rows of cells) of a whole answer that is one matrix."""
    match = ENVIRONMENT.fullmatch(text.strip())
    if match is None or r"\begin" in match[2]:
        return None
    kind = "determinant" if match[1] in ("vmatrix", "Vmatrix") else "matrix"
    rows = [row.strip() for row in re.split(r"\\\\|\\cr(?![A-Za-z])", match[2].replace(r"\hline", ""))]
    return kind, [[cell.strip() for cell in row.split("&")] for row in rows if row]


def split_name(text: str) -> tuple[str | None, str]:
    """(name, value) of ``name = value``; name "" for a true chain of sums as ``4+9=13``; else (None, the text).

    The value is the last member. A chain whose numbers contradict each other is no named value, nor is ``x = x``.
    """
    if "=" not in text or RELATION.search(text):
        return None, text
    members = split_top(text, "=")
    if len(members) < 2 or not all(members):
        return None, text
    named = NAME.fullmatch(members[0]) is not None and parse_literal(members[0]) is None
    values = {value for member in members[named:] if (value := evaluate(member)) is not None}
    if len(values) > 1 or "".join(members[0].split()) == "".join(members[-1].split()):
        return None, text
    if named:
        return re.sub(r"\s+", "", members[0]), members[-1]
    # Only what was worked out counts: 42 = 42 says nothing.
    if parse_literal(members[0]) is None and all(isinstance(evaluate(member), Fraction) for member in members):
        return "", members[-1]
    return None, text
