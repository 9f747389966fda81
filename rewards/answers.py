"""From a completion to the answer it states: reasoning cut off, last box, ``####`` line or "the answer is" phrase.

Only what the completion marks as its answer counts: "the last number in the text" would pay for endings cut off
half-way and for repetition loops. How answers are cleaned and compared lives in the modules beside this one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.types import FinishReason
from rewards.canonical import canonical
from rewards.cleaning import clean

__all__ = ["Extraction", "canonical", "clean", "extract", "extract_answer"]

CHAT_TOKEN = re.compile(r"<[|｜][^|｜<>]{0,60}[|｜]>")
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
LONGEST_SENTENCE = 4000
BETWEEN_BOXES = re.compile(r"(?:\s|[,;.$&~]|\\q?quad|\\[,;! ]|and|or|\\text\{\s*(?:and|or)\s*\})*")
BARE_TOKEN = re.compile(r"[-+]?\d[\d.,]*|\\[A-Za-z]+|[A-Za-z]")
MOST_BOXES = 100
"""Boxes side by side that are read as one list, from the last backwards."""
LONGEST_GAP = 200
"""Characters between two boxes that may still form one list answer."""
LONGEST_HEADING = 80
HASHES = re.compile(r"####[ \t]*(?:\n[ \t]*)?([^\n#]*)")
HEADING = re.compile(r"\W*(?:the |final |short )*(?:answer|solution|result|step.*|explanation)?\W*", re.IGNORECASE)
PHRASE = re.compile(
    r"final\s+answer\**\s*(?:(?:is|are)\b|[:：])?|answers?\**\s*(?:(?:is|are)\b|[:：])"
    r"|(?:最终|最后)?的?(?:答案|结果)\s*(?:应该|应)?(?:是|为|选|[:：])",
    re.IGNORECASE,
)
LAST_LINE = re.compile(r"A:[ \t]*(\S.*)")
"""The marker of the GPT-3 solutions of GSM8K; only as the start of the last line, for options are listed so as well."""
SENTENCE_END = re.compile(r"(?<![ap]\.m)\.(?=\s|$)|。|\n", re.IGNORECASE)
MATHS = re.compile(r"\$\$(.+?)\$\$|\$((?:\\.|[^$\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|\*\*(.+?)\*\*", re.DOTALL)
CONTINUED = re.compile(r"\s*(?:,|and\b|or\b)\s*(?:\$|\\\(|-?\d)")
FILLER = re.compile(
    r"[\s:：*_]*(?:(?:therefore|thus|hence|then|so|simply|just|clearly|now|indeed|given by|equal to)\b[\s,:]*)*", re.I
)
REMARK = re.compile(r"\s\((?=[^()]*[A-Za-z]{2})[^()]*\)\s*$")
WORD = re.compile(r"(?<![\\A-Za-z])(?!and\b)[A-Za-z]{3,}")
EMPTY = re.compile(r"(?:\s|[$?.~]|\\[ ,;!]|\\q?quad|\\text\{\s*\}|\{\s*\})*")


@dataclass(frozen=True, slots=True)
class Extraction:
    """``answer`` as the completion writes it, None when it states none; ``rule`` says where it was found or why not."""

    answer: str | None
    rule: str


def extract_answer(completion: str, finish_reason: FinishReason = "stop") -> str | None:
    """The answer as the completion writes it, None when it states none; see ``extract``."""
    return extract(completion, finish_reason).answer


def extract(completion: str, finish_reason: FinishReason = "stop") -> Extraction:
    """The stated answer and the rule that found it.

    Reasoning inside ``<think>`` never counts; a complete ``<answer>`` decides alone; then the last ``\\boxed`` (boxes
    side by side are one list), the last ``####`` line, the last "answer is" phrase. A last box that is empty or not
    closed is no answer, whatever came before it. A completion cut off by length needs a complete box.
    """
    region = completion.rpartition("</think>")[2]
    if "<think>" in region:
        return Extraction(None, "the reasoning is not closed")
    region = CHAT_TOKEN.sub("", region)
    tagged = _tag_content(region)
    if tagged is not None:
        region = tagged
    if BOX.search(region):
        boxed = _last_boxes(region)
        return Extraction(boxed, "the last box is empty or not closed" if boxed is None else "last box")
    if finish_reason == "length":
        return Extraction(None, "cut off by length without a complete box")
    answer, rule = _after_marker(region)
    if answer is None and tagged is not None:
        answer, rule = tagged.strip(), "answer tag"
    if answer is not None and EMPTY.fullmatch(answer):
        return Extraction(None, f"{rule}: empty")
    return Extraction(answer, rule)


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
        if len(contents) == MOST_BOXES:
            break
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


def _after_marker(text: str) -> tuple[str | None, str]:
    """The answer that a marker announces, and which."""
    hashes = [match[1].strip() for match in HASHES.finditer(text) if not _is_heading(match[1])]
    if hashes:
        return hashes[-1], "last #### line"
    phrases = [match.end() for match in PHRASE.finditer(text)]
    if phrases:
        return _sentence_answer(text[phrases[-1] : phrases[-1] + LONGEST_SENTENCE]), "last answer phrase"
    line = LAST_LINE.fullmatch(text.rstrip().rpartition("\n")[2].strip())
    return (line[1], "last line A:") if line else (None, "no box, #### line or answer phrase")


def _is_heading(line: str) -> bool:
    return len(line) <= LONGEST_HEADING and HEADING.fullmatch(line) is not None


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
    # An exclamation mark that ends a sentence of words is no factorial; a factorial would not be worked out anyway.
    return sentence.strip().strip("*!").strip() or None
