"""Answers that are no numbers and no expressions: words, letters of choices, clock times, ratios, numerals of a base."""

from __future__ import annotations

import re

from rewards.structure import CONJUNCTION, split_top

TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
ARTICLES = re.compile(r"(?<![a-z])(?:a|an|the)(?![a-z])")
_FUNCTIONS = "sin cos tan cot sec csc log ln exp det lim max min gcd lcm sqrt arcsin arccos arctan pi and or"
FUNCTIONS = frozenset(_FUNCTIONS.split())
_SHORT = """yes no true false odd even east west none zero one two three four five six nine ten red blue green both all any"""
SHORT_WORDS = frozenset(_SHORT.split())
"""Words of up to four letters that are no product of variables."""
MONTH = re.compile(
    r"(?<![a-z])(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)(?:[a-z]*)(?![a-z])|(?<![a-z])\w+day(?![a-z])"
)
CHOICE = re.compile(r"[(\[]?\s*([A-J])\s*[)\]]?")
CHOSEN = re.compile(
    r"(?:[Oo]ption|[Cc]hoice|[Aa]nswer)?\s*(?:[(\[]\s*([A-Ja-j])\s*[)\]]\s*[:.]?\s*(.*)|([A-J])\s*(?:[:.)]\s*(.*))?|([a-j])[.)]?)",
    re.DOTALL,
)
OTHER_CHOICE = re.compile(r"(?:^|and|or|[,/])\s*[(\[]?[A-J][)\]]?\s*(?:$|[,.:)/]|and|or)")
CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*([ap])?\.?\s*(m)?\.?(?:\s*o'?clock)?", re.IGNORECASE)
BASE = re.compile(r"\(?\s*([0-9A-Z]+)\s*\)?\s*_\s*(?:\{\s*(?:\\text\{\s*)?(\w+)\s*\}?\s*\}|(\d))")
_BASES = "two three four five six seven eight nine ten eleven twelve"
BASE_NAMES = {name: str(value) for value, name in enumerate(_BASES.split(), 2)}
RATIO_TO = re.compile(r"\s*(?:\\text\s*\{\s*to\s*\}|(?<=[\d}\s])to(?=[\s\d\\]))\s*")


def unwrapped(text: str) -> str:
    """Without ``\\text``, blanks single."""
    return " ".join(TEXT.sub(r" \1 ", text).split())


def word_key(text: str) -> str:
    """What two spellings of one text have in common: no case, articles, punctuation or blanks."""
    plain = ARTICLES.sub(" ", unwrapped(text).casefold())
    return re.sub(r"[\s.,;:!?'\"()\\$~-]+", "", plain)


def is_text(text: str) -> bool:
    """Is the whole answer words? A few letters outside ``\\text`` are a product of variables unless known as a word."""
    plain = unwrapped(text)
    if re.search(r"[\\^_=<>{}+*/|]", plain) or not re.search(r"[^\W\d_]{2}", plain):
        return False
    words = [word.casefold() for word in re.findall(r"[^\W\d_]+", plain)]
    if any(character.isdigit() for character in plain):
        return MONTH.search(plain.casefold()) is not None or (plain[0].isalpha() and len(words[0]) > 3)
    meaningful = [word for word in words if len(word) > 1 and word not in FUNCTIONS]
    if not meaningful:
        return False
    if TEXT.search(text) and any(len(word) > 1 for word in words):
        return CONJUNCTION.fullmatch(text) is None
    return any(len(word) > 4 or word in SHORT_WORDS or not word.isascii() for word in meaningful) or len(meaningful) > 1


def choice_letter(text: str) -> str | None:
    """The letter of a gold answer that is a choice: ``(C)``, ``\\text{C}``, ``C``."""
    match = CHOICE.fullmatch(unwrapped(text))
    return match[1] if match else None


def chosen_letter(text: str) -> str | None:
    """The one letter that an answer chooses, with the option's text or without; None for none or several."""
    match = CHOSEN.fullmatch(unwrapped(text))
    if match is None:
        return None
    rest = match[2] or match[4] or ""
    if OTHER_CHOICE.search(rest):
        return None
    return (match[1] or match[3] or match[5]).upper()


def clock(text: str) -> tuple[int, int, str] | None:
    """(hour, minute, "a", "p" or "") of a clock time; "3 p.m." is 3:00 p.m., "10" alone is no time."""
    match = CLOCK.fullmatch(unwrapped(text))
    if match is None or (match[2] is None and match[4] is None) or (match[3] is None) != (match[4] is None):
        return None
    return int(match[1]), int(match[2] or 0), (match[3] or "").lower()


def base_numeral(text: str) -> tuple[str, str] | None:
    """(digits, base) of ``1011_2``, ``(204)_5``."""
    match = BASE.fullmatch(text.strip())
    if match is None or not any(c.isdigit() for c in match[1]):
        return None
    base = match[2] or match[3]
    return match[1].lstrip("0") or "0", BASE_NAMES.get(base.lower(), base)


def ratio_terms(text: str) -> list[str] | None:
    """The terms of ``3:4``, ``3 to 4`` or ``a:b:c``."""
    if r"\{" in text:
        return None
    terms = split_top(RATIO_TO.sub(":", text), ":")
    return terms if len(terms) > 1 and all(terms) else None
