"""One spelling for what is written the same: Unicode to LaTeX, spacing and size commands dropped, fractions braced."""

from __future__ import annotations

import re
import unicodedata

from rewards.bombs import DEEPEST, depth

LONGEST = 10_000
"""Characters: longer texts keep their own spelling."""
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
SUPER_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
SUB_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
INVISIBLE = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufe00-\ufe0f\ufeff]")
GROUP_BLANK = re.compile("(?<=\\d)[\u00a0\u2009\u202f\u2007\u2008\u200a](?=\\d)")
SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "－": "-",
    "×": r"\times ", "✕": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ", "∗": "*", "÷": r"\div ",
    "∕": "/", "⁄": "/", "π": r"\pi ", "Π": r"\Pi ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≦": r"\le ",
    "≥": r"\ge ", "⩾": r"\ge ", "≧": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "°": r"^\circ ", "º": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "∠": r"\angle ", "∶": ":", "…": r"\ldots ", "⋯": r"\ldots ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ", "′": "'", "∧": r"\text{and}",
    "∨": r"\text{or}", "，": ",", "；": ";", "、": ",", "∖": r"\setminus ", "≈": r"\approx ",
}  # fmt: skip
SYMBOL = re.compile("[" + "".join(SYMBOLS) + "]")
ROOT = re.compile(r"([√∛∜])\s*(\([^()]*\)|\{[^{}]*\}|\d+(?:\.\d+)?|[A-Za-z])")
ROOT_INDEX = {"√": "", "∛": "[3]", "∜": "[4]"}

DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?![\d])|\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it)(?![A-Za-z])"
)
DECORATION = re.compile(
    r"\\(?:hspace|vspace|tag|label|color|phantom)\*?\s*\{[^{}]*\}"
    r"|\\(?:underline|underbrace|ensuremath|textcolor\s*\{[^{}]*\})(?![A-Za-z])"
)
PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
PLAIN_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
POWER_GROUP = re.compile(r"\^\s*\(([^()]*)\)")
STARS = re.compile(r"(?<=[\w)}\]])\*\*(?=[\w({\\-])")
ASCII_RELATIONS = {"<=": r"\le ", ">=": r"\ge ", "!=": r"\ne "}
ASCII_RELATION = re.compile("<=|>=|!=")
THIN = re.compile(r"(?<=\d)(?:\\,|\{\\,\})(?=\d{3}(?!\d))")
GROUP_COMMA = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\{,\\!\})\s*(?=\d{3}(?!\d))")
SPACE = re.compile(r"(?<!\\)\\[,;:> \t\n]|\\!|\\(?:q?quad|enspace|thinspace|medspace|hfill|newline)(?![A-Za-z])|~")
RENAMED = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom",
    "choose": r"\choose", "geqslant": r"\ge", "geq": r"\ge", "leqslant": r"\le", "leq": r"\le", "neq": r"\ne",
    "colon": ":", "varnothing": r"\emptyset", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "dots": r"\ldots", "cdots": r"\ldots", "degree": r"^\circ",
    "textbf": r"\text", "mathrm": r"\text", "mbox": r"\text", "textnormal": r"\text", "mathbf": r"\text",
    "textit": r"\text", "textrm": r"\text", "textsf": r"\text", "mathit": r"\text", "mathsf": r"\text",
    "operatorname": r"\text", "boldsymbol": r"\text", "bm": r"\text", "emph": r"\text", "hbox": r"\text",
    "lt": "<", "gt": ">", "land": r"\text{and}", "lor": r"\text{or}", "infin": r"\infty", "textdegree": r"^\circ",
    "wedge": r"\text{and}", "vee": r"\text{or}", "ast": "*", "backslash": r"\setminus", "smallsetminus": r"\setminus",
    "euro": "€", "texteuro": "€", "pounds": "£", "textdollar": r"\$", "lparen": "(", "rparen": ")",
}  # fmt: skip
COMMAND = re.compile(r"\\([A-Za-z]+)")
LETTER_TEXT = re.compile(r"\\(?:mathrm|operatorname|text|textrm)\s*\{\s*([ei])\s*\}")
NUMBER_TEXT = re.compile(r"\\text\s*\{\s*([-+]?[\d.,/ ]*\d%?)\s*\}")
FUNCTION_TEXT = re.compile(r"\\text\{\s*(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|exp|det|gcd|lcm)\s*\}")
FRACTION = re.compile(r"\\(frac|binom)\s*")
BARE_ARGUMENT = re.compile(r"\\[A-Za-z]+|[^\s{}\\]")
OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}")
BARE_ROOT = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(?![\s{\[])(\\[A-Za-z]+|[^\s{}\\\[])")
SINGLE = re.compile(r"([\^_])\s*\{\s*([A-Za-z0-9])\s*\}")
CIRCLE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
PLAIN_NUMBER = re.compile(r"-?[0-9]{1,30}")
"""Most answers: nothing of them is to be rewritten."""
QUOTES = re.compile("[\"“”„«»`]|''")
BLANKS = re.compile(r"\s+")
ASCII_BLANKS = re.compile(r"[ \t\n\r\f\v]+")
"""The others may group the digits of a number."""


def clean(answer: str) -> str:
    """The answer in one spelling: LaTeX with single blanks, the same for every way to write the same characters.

    Blanks inside stay (``1 1/4``); two answers are the same string when they agree after blanks are removed.
    """
    if PLAIN_NUMBER.fullmatch(answer):
        return answer
    if len(answer) > LONGEST or depth(answer) > DEEPEST:
        # Nothing so long or deep is compared but as a string: rewriting it nest by nest takes quadratic time.
        return BLANKS.sub(" ", answer).strip()
    text = _to_latex(ASCII_BLANKS.sub(" ", answer))
    text = LETTER_TEXT.sub(r"\1 ", text)
    text = COMMAND.sub(_rename, text)
    text = GROUP_COMMA.sub("", THIN.sub("", text))
    text = DROPPED.sub(" ", text)
    text = SPACE.sub(" ", DECORATION.sub(" ", text))
    if "\\text" not in text:
        text = PLAIN_PI.sub(r"\\pi ", PLAIN_ROOT.sub(r"\\sqrt{\1}", text))
    text = POWER_GROUP.sub(r"^{\1}", STARS.sub("^", ASCII_RELATION.sub(lambda found: ASCII_RELATIONS[found[0]], text)))
    text = text.replace(r"\%", "%").replace(r"\_", "_").replace(r"\#", "#").replace("{,}", ",")
    text = re.sub(r"(?<!\\)\$", " ", text)
    text = CIRCLE.sub(r"^\\circ ", QUOTES.sub("", text))
    text = FUNCTION_TEXT.sub(r"\\\1 ", NUMBER_TEXT.sub(r"\1", text))
    text = BARE_ROOT.sub(r"\\sqrt\1{\2}", CHOOSE.sub(r"\\binom{\1}{\2}", OVER.sub(r"\\frac{\1}{\2}", text)))
    text = _brace_fractions(text)
    text = SINGLE.sub(r"\1\2", text)
    return _strip_ends(BLANKS.sub(" ", text))


def _to_latex(text: str) -> str:
    """Unicode mathematics to LaTeX and ASCII."""
    if text.isascii():
        return text
    text = INVISIBLE.sub("", text)
    text = GROUP_BLANK.sub("", text)
    text = SUPER_RUN.sub(lambda match: "^{" + match[0].translate(SUPERSCRIPTS) + "}", text)
    text = SUB_RUN.sub(lambda match: "_{" + match[0].translate(SUBSCRIPTS) + "}", text)
    text = "".join(_vulgar(character) for character in text)
    text = SYMBOL.sub(lambda match: SYMBOLS[match[0]], text)
    text = ROOT.sub(lambda match: rf"\sqrt{ROOT_INDEX[match[1]]}{{{match[2].strip('(){}')}}}", text)
    text = unicodedata.normalize("NFKC", text)
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() and not c.isascii() else c for c in text)
    return SYMBOL.sub(lambda match: SYMBOLS[match[0]], text)


def _vulgar(character: str) -> str:
    """``½`` as ``\\frac{1}{2}``, any other character as it is."""
    if character.isascii() or unicodedata.category(character) != "No":
        return character
    parts = unicodedata.normalize("NFKC", character).split("⁄")
    return rf"\frac{{{parts[0]}}}{{{parts[1]}}}" if len(parts) == 2 and all(parts) else character


def _rename(match: re.Match[str]) -> str:
    new = RENAMED.get(match[1])
    if new is None:
        return match[0]
    return new + " " if new[-1].isalpha() and new[0] == "\\" else new


def _brace_fractions(text: str) -> str:
    """``\\frac12``, ``\\frac1{72}``, ``\\frac\\pi2`` and ``\\binom52`` with both arguments in braces."""
    pieces, position = [], 0
    for match in FRACTION.finditer(text):
        if match.start() < position:
            continue
        pieces.append(text[position : match.start()] + "\\" + match[1])
        position = match.end()
        for _ in range(2):
            while position < len(text) and text[position] == " ":
                position += 1
            if position < len(text) and text[position] == "{":
                end = _closing(text, position)
                pieces.append("{" + _brace_fractions_inside(text[position + 1 : end - 1]) + "}")
                position = end
            elif argument := BARE_ARGUMENT.match(text, position):
                pieces.append("{" + argument[0] + "}")
                position = argument.end()
    return "".join(pieces) + text[position:]


def _brace_fractions_inside(text: str) -> str:
    return _brace_fractions(text) if FRACTION.search(text) else text


def _closing(text: str, start: int) -> int:
    """The index after the brace that closes the one at ``start``; the end of the text when none does."""
    depth, position = 0, start
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return len(text)


def _strip_ends(text: str) -> str:
    """Without outer blanks, final punctuation and braces around the whole."""
    while True:
        before = text
        text = text.strip().rstrip(".,;:").removesuffix("\\\\").strip("*'").strip()
        if text.startswith("{") and _closing(text, 0) == len(text) and text.endswith("}") and len(text) > 1:
            text = text[1:-1]
        if text == before:
            return text
