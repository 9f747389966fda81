"""Rewards that need no model and no process: format, length, over-long, repetition, language. Pure functions.

Whether an answer is right is decided elsewhere (``rewards.verifier``, ``rewards.code``).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

from pipeline.types import FinishReason

TAG = re.compile(r"</?(?:think|answer)>")
MARKUP = re.compile(r"\\[A-Za-z]+|</?[A-Za-z]+>|https?://\S+")
SCRIPTS: dict[str, frozenset[str]] = {
    "en": frozenset({"LATIN"}),
    "zh": frozenset({"CJK"}),
    "ja": frozenset({"CJK", "HIRAGANA", "KATAKANA"}),
    "ko": frozenset({"HANGUL"}),
    "ru": frozenset({"CYRILLIC"}),
    "ar": frozenset({"ARABIC"}),
    "hi": frozenset({"DEVANAGARI"}),
    "th": frozenset({"THAI"}),
    "el": frozenset({"GREEK"}),
    "he": frozenset({"HEBREW"}),
}
UNSPACED = frozenset({"CJK", "HIRAGANA", "KATAKANA", "THAI"})
"""Scripts written without spaces: each letter counts as a word."""


def format_reward(
    text: str, answer_format: Literal["boxed", "tags"], *, finish_reason: FinishReason, opened: bool = False
) -> float:
    """1.0 when the completion ended by itself and has exactly the asked form, else 0.0.

    "tags": ``<think>…</think>`` then ``<answer>…</answer>``, each once and not empty, nothing before, between or after
    but white space; ``opened`` says that the prompt already wrote the opening think tag. "boxed": exactly one
    ``\\boxed{…}``, closed and not empty, after the reasoning if that is tagged.
    """
    if finish_reason != "stop":
        return 0.0
    if answer_format == "tags":
        return float(_has_tags("<think>" + text if opened else text))
    return float(_has_one_box("<think>" + text if opened else text))


def _has_tags(text: str) -> bool:
    if TAG.findall(text) != ["<think>", "</think>", "<answer>", "</answer>"]:
        return False
    before, think, between, answer, after = TAG.split(text)
    return bool(think.strip() and answer.strip()) and not (before.strip() or between.strip() or after.strip())


def _has_one_box(text: str) -> bool:
    tags = TAG.findall(text)
    if tags not in ([], ["<think>", "</think>"]):
        return False
    reasoning, _, conclusion = text.rpartition("</think>")
    if "\\boxed" in reasoning or text.count("\\boxed") != 1:
        return False
    content = _box_content(conclusion)
    return content is not None and bool(content.strip())


def _box_content(text: str) -> str | None:
    """What stands in the first box, or None when its braces do not balance."""
    start = text.index("\\boxed") + len("\\boxed")
    rest = text[start:].lstrip()
    if not rest.startswith("{"):
        return None
    depth, escaped = 0, False
    for position, character in enumerate(rest):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return rest[1:position]
    return None


def overlong_penalty(tokens: int, max_tokens: int, share: float) -> float:
    """0 up to ``(1 - share) * max_tokens`` tokens, then falling evenly to -1 at ``max_tokens``.

    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    buffer = share * max_tokens
    excess = tokens - (max_tokens - buffer)
    return 0.0 if excess <= 0 else -min(1.0, excess / buffer)


def length_reward(tokens: int, max_tokens: int, ends: tuple[float, float], shape: Literal["linear", "cosine"]) -> float:
    """From ``ends[0]`` at 0 tokens to ``ends[1]`` at ``max_tokens``, along a line or half a cosine.

    Source of the cosine: arXiv 2502.03373, 4.2.
    """
    share = min(1.0, tokens / max_tokens)
    travelled = share if shape == "linear" else 0.5 * (1.0 - math.cos(math.pi * share))
    return ends[0] + (ends[1] - ends[0]) * travelled


def repetition_penalty(token_ids: Sequence[int], n: int) -> float:
    """Minus the share of n-grams that occurred before, in (-1, 0]; 0 for completions shorter than n + 1 tokens."""
    total = len(token_ids) - n + 1
    if total <= 1:
        return 0.0
    distinct = len({tuple(token_ids[start : start + n]) for start in range(total)})
    return -(total - distinct) / total


def language_consistency(text: str, language: str, problem: str = "") -> float:
    """Share of the words written in the language's script, 0..1; 0 when there is no word (DeepSeek-R1, 2.3.2).

    LaTeX commands, tags and addresses are no words, nor are numbers or single Latin or Greek letters (variables). A
    letter of Chinese, Japanese or Thai counts as a word. Languages of one script are not told apart. "auto" takes the
    script in which most words of the problem are written.
    """
    words = _script_counts(text)
    total = sum(words.values())
    if not total:
        return 0.0
    if language == "auto":
        asked = _script_counts(problem)
        if not asked:
            raise ValueError("language 'auto': the problem has no words; name the language in rewards.language")
        main = max(asked, key=lambda script: asked[script])
        wanted = SCRIPTS["ja"] if main in {"HIRAGANA", "KATAKANA"} else frozenset({main})
    else:
        wanted = SCRIPTS[language]
    return sum(count for script, count in words.items() if script in wanted) / total


def _script_counts(text: str) -> dict[str, int]:
    """Words by script: a run of letters of one script, or one letter of an unspaced script."""
    counts: dict[str, int] = {}
    run_script, run = "", 0

    def close() -> None:
        if run_script in UNSPACED:
            counts[run_script] = counts.get(run_script, 0) + run
        elif run > 1 or (run and run_script not in {"LATIN", "GREEK"}):
            counts[run_script] = counts.get(run_script, 0) + 1

    for character in MARKUP.sub(" ", text):
        if unicodedata.combining(character) and run:
            continue
        script = unicodedata.name(character, "").split(" ")[0].split("-")[0] if character.isalpha() else ""
        if script == run_script and script:
            run += 1
            continue
        close()
        run_script, run = script, int(bool(script))
    close()
    return counts
