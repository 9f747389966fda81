"""From a completion to the answer it states: reasoning cut off, last box, ``####`` line or "the answer is" phrase.

Only what the completion marks as its answer counts: "the last number in the text" would pay for endings cut off
half-way and for repetition loops. How answers are cleaned and compared lives in the modules beside this one.
"""

from __future__ import annotations

import re

from pipeline.types import FinishReason
from rewards.cleaning import clean
from rewards.literals import parse_literal

__all__ = ["canonical", "clean", "extract_answer"]

CHAT_TOKEN = re.compile(r"<[|｜][^|｜<>]{0,60}[|｜]>")
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
LONGEST_SENTENCE = 4000
BETWEEN_BOXES = re.compile(r"(?:\s|[,;.$&~]|\\q?quad|\\[,;! ]|and|or|\\text\{\s*(?:and|or)\s*\})*")
BARE_TOKEN = re.compile(r"[-+]?\d[\d.,]*|\\[A-Za-z]+|[A-Za-z]")
LONGEST_GAP = 200
"""Characters between two boxes that may still form one list answer."""
HASHES = re.compile(r"####[ \t]*([^\n#]*)")
HEADING = re.compile(r"\W*(?:the |final |short )*(?:answer|solution|result|step.*|explanation)?\W*", re.IGNORECASE)
PHRASE = re.compile(
    r"final\s+answer\**\s*(?:(?:is|are)\b|[:：])?|answers?\**\s*(?:(?:is|are)\b|[:：])"
    r"|(?:最终|最后)?的?(?:答案|结果)\s*(?:是|为|[:：])",
    re.IGNORECASE,
)
LAST_LINE = re.compile(r"A:[ \t]*(\S.*)")
"""The marker of the GPT-3 solutions of GSM8K; only as the start of the last line, for options are listed so as well."""
SENTENCE_END = re.compile(r"(?<![ap]\.m)\.(?=\s|$)|。|\n", re.IGNORECASE)
MATHS = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|\*\*(.+?)\*\*", re.DOTALL)
CONTINUED = re.compile(r"\s*(?:,|and\b|or\b)\s*(?:\$|\\\(|-?\d)")
FILLER = re.compile(
    r"[\s:：*_]*(?:(?:therefore|thus|hence|then|so|simply|just|clearly|now|indeed|given by|equal to)\b[\s,:]*)*", re.I
)
REMARK = re.compile(r"\s\([^()]*[A-Za-z]{2,}[^()]*\)\s*$")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
EMPTY = re.compile(r"(?:\s|[$?.~]|\\[ ,;!]|\\q?quad|\\text\{\s*\}|\{\s*\})*")


def extract_answer(completion: str, finish_reason: FinishReason = "stop") -> str | None:
    """The answer as the completion writes it, None when it states none.

    Reasoning inside ``<think>`` never counts; a complete ``<answer>`` decides alone; then the last ``\\boxed`` (boxes
    side by side are one list), the last ``####`` line, the last "answer is" phrase. A last box that is empty or not
    closed is no answer, whatever came before it. A completion cut off by length needs a complete box.
    """
    region = completion.rpartition("</think>")[2]
    if "<think>" in region:
        return None
    region = CHAT_TOKEN.sub("", region)
    tagged = _tag_content(region)
    if tagged is not None:
        region = tagged
    if BOX.search(region):
        return _last_boxes(region)
    if finish_reason == "length":
        return None
    answer = _after_marker(region)
    if answer is None and tagged is not None:
        answer = tagged.strip()
    return None if answer is None or EMPTY.fullmatch(answer) else answer


def _tag_content(text: str) -> str | None:
    """What stands in the last complete answer tag."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end]


def _last_boxes(text: str) -> str | None:
    """The last box, or the list that it ends when only separators stand between it and the boxes before it."""
    starts = list(BOX.finditer(text))
    contents: list[str] = []
    following: int | None = None
    for match in reversed(starts):
        limit = len(text) if following is None else following
        content, end = _box_content(text, match.end(), limit)
        if content is None or EMPTY.fullmatch(content):
            break
        if following is not None:
            gap = text[end:following]
            if len(gap) > LONGEST_GAP or not BETWEEN_BOXES.fullmatch(gap):
                break
        contents.append(content.strip())
        following = match.start()
    if not contents:
        return None
    distinct = {canonical(content): content for content in contents}
    return ", ".join(reversed(distinct.values()))


def _box_content(text: str, start: int, limit: int) -> tuple[str | None, int]:
    """The content of the box whose command ends at ``start`` and where the box ends; None when it is not closed."""
    while start < limit and text[start] in " \t\n":
        start += 1
    if start >= limit:
        return None, start
    if text[start] != "{":
        token = BARE_TOKEN.match(text, start, limit)
        return (token[0].rstrip(".,"), token.end()) if token else (None, start)
    depth, position = 0, start
    while position < limit:
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position], position + 1
        position += 1
    return None, limit


def _after_marker(text: str) -> str | None:
    hashes = [match[1].strip() for match in HASHES.finditer(text) if not HEADING.fullmatch(match[1])]
    if hashes:
        return hashes[-1]
    phrases = [match.end() for match in PHRASE.finditer(text)]
    if phrases:
        return _sentence_answer(text[phrases[-1] : phrases[-1] + LONGEST_SENTENCE])
    last = text.rstrip().rpartition("\n")[2]
    line = LAST_LINE.fullmatch(last.strip())
    return line[1] if line else None


def _sentence_answer(text: str) -> str | None:
    """The answer in what follows the phrase: its first sentence, without filler, lead-in and bracketed remark."""
    text = text[FILLER.match(text).end() :]  # type: ignore[union-attr]  # matches the empty string
    maths = MATHS.match(text)
    if maths and not CONTINUED.match(text, maths.end()):
        return next(group for group in maths.groups() if group is not None).strip()
    end = SENTENCE_END.search(text)
    sentence = text[: end.start()] if end else text
    sentence = re.split(r"(?:^|\s)(?:is|are|be|equals)\s", sentence)[-1]
    bare = REMARK.sub("", sentence)
    sentence = bare if bare.strip() else sentence
    if WORD.search(sentence):
        formulas = list(MATHS.finditer(sentence))
        if formulas and not sentence[formulas[-1].end() :].strip(" .,*"):
            sentence = next(group for group in formulas[-1].groups() if group is not None)
        elif not formulas and "=" in sentence:
            sentence = sentence.rpartition("=")[2]
    return sentence.strip().strip("*").strip() or None


def canonical(answer: str) -> str:
    """The form under which an answer votes and is stored: equal numbers are written equal (``1/2`` for ``0.5``).

    Anything that is not one number is its cleaned text without blanks, in lower case where it is words.
    """
    text = clean(answer)
    literal = parse_literal(text)
    if literal is not None:
        return str(literal.value)
    return re.sub(r"\s+", "", text)
