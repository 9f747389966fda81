"""Is this completion's answer the gold answer? The verdict, and the part of it that needs no process of its own.

``decide_here`` settles equal strings, number literals and everything that can be rejected by its form. What is left
needs sympy and is judged in a worker process that can be killed (``rewards.workers``).

Where public graders differ, this one decides: 6/8 is 3/4, but the ratio 6:8 is not 3:4; 2,74 is a list, not a decimal;
1011 answers 1011_2 (the problem names the base); 7+3/4, 2^10 and the like are not worked out and so no answer to a
number, 10^5 is one; 90 degrees is not \\pi/2; (1,2) is neither 1,2 nor {1,2}; \\log is to base 10, \\ln is not; a decimal
gold is not answered by more digits, nor 3 by 2.9999999; without a marker there is no answer; what the text says after
the box is not read; an answer tag outweighs a box outside it; of boxes with text between them the last counts; {5} is 5;
of several #### lines the last counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from pipeline.types import FinishReason, Status
from rewards.answers import Extraction, canonical, clean, extract
from rewards.comparison import Undecided, compare


@dataclass(frozen=True, slots=True)
class Verdict:
    """``answer`` is the canonical form under which the answer votes, ``extracted`` the text as the completion has it.

    ``rule`` names what decided. ``seconds`` is the wall clock of this verdict, close to 0 when it was cached.
    """

    status: Status
    answer: str | None
    rule: str
    seconds: float = 0.0
    extracted: str | None = None


def judge(gold: str, completion: str, finish_reason: FinishReason = "stop") -> Verdict:
    """One verdict. Starts and ends a worker process where one is needed: for many verdicts use ``VerifierPool``."""
    verdict = decide_here(gold, completion, finish_reason)
    if verdict is not None:
        return verdict
    from rewards.workers import VerifierPool

    with VerifierPool(1) as pool:
        return pool.judge(gold, completion, finish_reason)


def decide_here(gold: str, completion: str, finish_reason: FinishReason = "stop") -> Verdict | None:
    """The verdict where neither sympy nor a worker is needed, else None."""
    started = time.perf_counter()
    verdict = decide_extracted(gold, extract(completion, finish_reason))
    return None if verdict is None else replace(verdict, seconds=time.perf_counter() - started)


def decide_extracted(gold: str, extraction: Extraction) -> Verdict | None:
    """As ``decide_here`` for an answer that is extracted already."""
    extracted = extraction.answer
    cleaned_gold = clean(gold)
    if not cleaned_gold:
        return Verdict("gold_unparsable", None, "the gold answer is empty")
    if extracted is None:
        return Verdict("no_answer", None, extraction.rule)
    try:
        correct, rule = compare(cleaned_gold, clean(extracted))
    except Undecided:
        return None
    return Verdict("correct" if correct else "incorrect", canonical(extracted), rule, extracted=extracted)
