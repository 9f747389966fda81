"""Names of units that mean the same, and words that are no unit. Nothing is converted: 5 cm is not 0.05 m here."""

from __future__ import annotations

import re

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_STOP = """and or to not is are if then else the a an of with where when but no yes only maybe either neither both any
all more less most least at i x y z than so because infinity pi e sqrt sin cos tan log ln lim sum mod choose"""
UNIT_STOP_WORDS = frozenset(_STOP.split())
_ALIASES = {
    "dollar": "dollar dollars usd buck bucks", "cent": "cent cents", "euro": "euro euros eur", "pound": "gbp",
    "yuan": "yuan rmb cny 元 块 人民币", "yen": "yen jpy 円",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kms kilometer kilometers kilometre kilometres 千米 公里",
    "cm": "cm cms centimeter centimeters centimetre centimetres 厘米", "m": "m meter meters metre metres 米",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "g": "g gram grams gramme 克", "kg": "kg kgs kilogram kilograms 千克 公斤", "mg": "mg milligram milligrams",
    "lb": "lb lbs pound pounds", "oz": "oz ounce ounces",
    "l": "l liter liters litre litres 升", "ml": "ml milliliter milliliters",
    "s": "s sec secs second seconds 秒", "min": "min mins minute minutes 分钟", "h": "h hr hrs hour hours 小时",
    "day": "day days 天", "week": "week weeks", "month": "month months", "year": "year years yr yrs 年",
    "": "degree degrees deg degs radian radians rad rads", "unit": "unit units", "person": "person persons people 人",
    "mph": "mph", "kph": "kph kmh", "child": "child children", "man": "man men", "woman": "woman women",
    "foot": "", "mouse": "mouse mice", "n": "newton newtons", "j": "joule joules", "w": "watt watts", "v": "volt volts",
}  # fmt: skip
ALIASES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
POWERS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3", "cu": "^3"}
COMPOUND = {"mi/h": "mph", "km/h": "kph"}


def canonical_unit(text: str, *, known_only: bool = False) -> str | None:
    """One name for a unit (``cm^2`` for "square centimeters"); None for no unit, or, asked so, for an unknown one."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).lower().replace("²", "^2").replace("³", "^3")
    text = re.sub(r"[{}()]", "", text)
    text = re.sub(r"\s*\^\s*", "^", text).replace("/", " per ").replace(".", "")
    names: list[str] = []
    prefix = ""
    for word in text.split():
        stem, _, power = word.partition("^")
        if stem == "per" or stem == "an" or stem == "each":
            names.append("/")
        elif stem in POWERS:
            if stem in ("squared", "cubed") and names:
                names[-1] += POWERS[stem]
            else:
                prefix = POWERS[stem]
        else:
            name = ALIASES.get(stem)
            if name is None and known_only:
                return None
            name = stem.removesuffix("s") if name is None else name
            names.append(name + (f"^{power}" if power else prefix))
            prefix = ""
    joined = re.sub(r"\s*/\s*", "/", " ".join(name for name in names if name))
    return COMPOUND.get(joined, joined) or None


LAST_UNIT = re.compile(
    r"(?:\\text\s?\{([^{}\d]*)\}|(?<=[\s}])(cm|mm|km|kg|mph|inches|feet|units?|meters?))(?: ?\^ ?(\d))?\s?$"
)
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
"""In ``\\sin 30^\\circ`` the degree sign matters; as an answer's unit it does not."""
LONGEST_UNIT = 60
"""Characters of one word of a unit behind an expression."""
LEADING = re.compile(r"(\\\$|[€£¥])\s*(.*)", re.DOTALL)
TRAILING_DEGREES = re.compile(r"(.*\S)\s*\^\s*\\circ\s*", re.DOTALL)


def split_unit(text: str) -> tuple[str, str | None]:
    """(expression, unit) of ``36\\pi \\text{ cm}^2``; a degree sign at the end is dropped."""
    if "^" in text and TRIGONOMETRIC.search(text):
        return text, None
    if (degrees := TRAILING_DEGREES.fullmatch(text)) and "^" not in degrees[1][-1:]:
        return degrees[1], None
    if money := LEADING.fullmatch(text):
        return money[2], money[1]
    rest, words = text, []
    while match := LAST_UNIT.search(rest, max(0, len(rest) - LONGEST_UNIT)):
        words.append(" ".join(match[group] or "" for group in (1, 2)) + (f"^{match[3]}" if match[3] else ""))
        rest = rest[: match.start()].rstrip()
    named = " ".join(reversed(words))
    if not words or not rest or any(word in UNIT_STOP_WORDS for word in re.findall(r"[a-z]+", named.lower())):
        return text, None
    return rest, canonical_unit(named)
