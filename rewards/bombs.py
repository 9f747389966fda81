"""Answers that no computer algebra should see: too long, too deep, or numbers too large to work out."""

from __future__ import annotations

import math
import re

LONGEST_ANSWER = 2000
LONGEST_DIGITS = 4300
DEEPEST = 25
LARGEST_EXPONENT = 10_000
LARGEST_FACTORIAL = 3000
LARGEST_LIMIT = 10_000

LONG_RUN = re.compile(r"\d{4301}")
DIGITS = re.compile(r"\d+")
POWER = re.compile(r"\^|\*\*")
LIMITED = re.compile(r"\\(?:sum|prod|int|lim|bigcup|bigcap|coprod)(?![A-Za-z])|\\binom(?![A-Za-z])|\\sqrt\s*\[")
REPEATED_SIGN = re.compile(r"(?:[-+]\s*){3}")


def why_refused(text: str) -> str | None:
    """The limit that a cleaned answer breaks, None when it may be evaluated."""
    if len(text) > LONGEST_ANSWER:
        return f"longer than {LONGEST_ANSWER} characters"
    if LONG_RUN.search(text):
        return f"a number of more than {LONGEST_DIGITS} digits"
    if depth(text) > DEEPEST:
        return f"nested deeper than {DEEPEST}"
    if REPEATED_SIGN.search(text):
        return "a run of signs"
    return _power(text) or _factorial(text) or _limits(text)


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


def _power(text: str) -> str | None:
    """Towers of numbers, large exponents, and powers of powers whose exponents multiply up."""
    together = 1
    for match in POWER.finditer(text):
        exponent = _argument(text, match.end())
        if "!" in exponent or (POWER.search(exponent) and _tower(exponent)):
            return "a tower of powers"
        numbers = [int(number) for number in DIGITS.findall(exponent)]
        if numbers and max(numbers) > LARGEST_EXPONENT:
            return f"a power with an exponent over {LARGEST_EXPONENT}"
        if re.search(r"\\times|\\cdot|\*|\)\s*\(", exponent) and math.prod(numbers) > LARGEST_EXPONENT:
            return f"a power with an exponent over {LARGEST_EXPONENT}"
        if text[: match.start()].rstrip().endswith((")", "}", "]")):
            together *= max([1, *numbers])
            if together > LARGEST_EXPONENT:
                return "a power of powers"
    return None


def _tower(exponent: str) -> bool:
    """Is a number raised to a number in this exponent, with more than a small value?"""
    simple = re.fullmatch(r"\s*-?(\d{1,4})\s*\^\s*\{?\s*(\d{1,2})\s*\}?\s*", exponent.strip("{} "))
    if simple:
        return int(simple[1]) ** int(simple[2]) > LARGEST_EXPONENT
    levels = len(POWER.findall(exponent))
    constant = not re.search(r"[A-Za-z]", re.sub(r"\\pi|e(?![A-Za-z])", "", exponent))
    numbers = re.search(r"\d[\s})]*(?:\^|\*\*)\s*[\s{(]*-?\d", exponent) is not None
    return numbers or levels > 3 or (constant and levels > 1)


def _argument(text: str, start: int) -> str:
    """What is raised or bounded: a braced or bracketed group, or a run without blanks with all powers it carries."""
    while start < len(text) and text[start] == " ":
        start += 1
    end, level = start, 0
    while end < len(text):
        character = text[end]
        if level == 0 and end > start and character not in "^*{}()[].0123456789" and text[end - 1] not in "^*":
            break
        if character in "{([":
            level += 1
        elif character in "})]":
            level -= 1
            if level < 0:
                break
            if level == 0 and text[end + 1 : end + 2] not in ("^", "*", "!"):
                end += 1
                break
        end += 1
    return text[start:end]


def _factorial(text: str) -> str | None:
    for match in re.finditer("!", text):
        before = text[: match.start()].rstrip()
        if before.endswith("!"):
            return "a nested factorial"
        operand = _operand(before)
        if "!" in operand or POWER.search(operand):
            return "a nested factorial" if "!" in operand else "a factorial of a power"
        numbers = [int(number) for number in DIGITS.findall(operand)]
        if math.prod(numbers) > LARGEST_FACTORIAL or sum(numbers) > LARGEST_FACTORIAL:
            return f"a factorial over {LARGEST_FACTORIAL}"
    return None


def _operand(before: str) -> str:
    """What stands right before a factorial sign: a number, or a whole group."""
    if not before.endswith((")", "}", "]")):
        match = re.search(r"\d+$|\w$", before)
        return match[0] if match else ""
    level = 0
    for position in range(len(before) - 1, -1, -1):
        level += (before[position] in ")}]") - (before[position] in "({[")
        if level == 0:
            return before[position:]
    return before


def _limits(text: str) -> str | None:
    """Limits of sums and products, binomials and root indices over ten thousand."""
    for match in LIMITED.finditer(text):
        if match[0].startswith(r"\binom"):
            span = text[match.end() : match.end() + 120]
        elif match[0].startswith(r"\sqrt"):
            span = text[match.end() : (text.find("]", match.end()) + 1 or len(text))]
        else:
            lower, upper = text[match.end() :].lstrip()[:200], ""
            first = _argument(lower, 1) if lower[:1] in "_^" else ""
            rest = lower[1 + len(first) :].lstrip() if first else ""
            upper = _argument(rest, 1) if rest[:1] in "_^" else ""
            span = f"{first} {upper}"
        if any(int(number) > LARGEST_LIMIT for number in DIGITS.findall(span)) or re.search(
            r"\d[\s})]*\^\s*\{?\s*\d", span
        ):
            return f"a limit over {LARGEST_LIMIT}"
    return None
