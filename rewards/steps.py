"""Where the steps of a completion end, and what each is worth by Monte Carlo. Pure: who samples and judges is a callable.

Source of the labels: Math-Shepherd, arXiv 2312.08935, 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


def step_ends(pieces: Sequence[str], delimiter: str) -> tuple[int, ...]:
    """The position of each step's last token, rising; ``pieces`` is the text of each token ("" for special ones).

    A step ends with the token in which the delimiter ends; one without visible characters belongs to the step before
    it, so several delimiters in a row end one step. The last step ends with the completion, EOS included. Example, with
    newlines: "1+1" "=2" "\\n" "2" "." "" has ends 2 and 5; without tokens there are no steps.
    """
    if not pieces:
        return ()
    text, owners = "".join(pieces), [index for index, piece in enumerate(pieces) for _ in piece]
    ends: list[int] = []
    start = 0
    for match in re.finditer(re.escape(delimiter), text):
        token = owners[match.end() - 1]
        if text[start : match.end()].strip():
            ends.append(token)
        elif ends:
            ends[-1] = token
        start = match.end()
    last = len(pieces) - 1
    if ends and not text[start:].strip():
        ends[-1] = last
    else:
        ends.append(last)
    return tuple(dict.fromkeys(ends))


class TokenText:
    """The text of single tokens, as it stands inside a sentence; remembered by id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before a text's first token: so each is decoded after another one.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor_length = len(self._decode(self._anchor))
        self._known: dict[int, str] = {}

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One text a token. Bytes that are only a part of a character come out as the replacement character."""
        for token in token_ids:
            if token not in self._known:
                self._known[token] = self._decode([*self._anchor, token])[self._anchor_length :]
        return [self._known[token] for token in token_ids]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A completion up to the end of a step: what is continued from."""

    problem_id: str
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SteppedSequence:
    """A completion with its steps' ends and labels in [0, 1]; a label of None is unknown and not trained on."""

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    step_ends: Sequence[int]
    labels: Sequence[float | None]
    problem_id: str


Continue = Callable[[Sequence[Prefix]], Sequence[Sequence[bool | None]]]
"""Samples continuations of each prefix and judges the whole completions: verdicts, None where there is none."""


def step_label(verdicts: Sequence[bool | None], how: Literal["soft", "hard"]) -> float | None:
    """Soft: the share of the judged continuations that are correct; hard: 1 when any is. None when none was judged."""
    judged = [verdict for verdict in verdicts if verdict is not None]
    if not judged:
        return None
    return sum(judged) / len(judged) if how == "soft" else float(any(judged))


def label_steps(
    completions: Sequence[tuple[Prefix, Sequence[int], bool | None]],
    continue_from: Continue,
    how: Literal["soft", "hard"],
) -> list[SteppedSequence]:
    """Labels of every step of every (whole completion, its step ends, its verdict), in order.

    The last step is worth the completion's own verdict. Every other is estimated from continuations of what stands up
    to its end; prefixes that several completions share are continued once.
    """
    wanted: dict[Prefix, None] = {}
    cuts = []
    for whole, ends, _ in completions:
        cuts.append([
            Prefix(whole.problem_id, whole.prompt_token_ids, whole.completion_token_ids[: end + 1]) for end in ends[:-1]
        ])  # fmt: skip
        wanted.update(dict.fromkeys(cuts[-1]))
    prefixes = list(wanted)
    verdicts = continue_from(prefixes) if prefixes else []
    if len(verdicts) != len(prefixes):
        raise ValueError(f"label_steps: verdicts of {len(verdicts)} prefixes for {len(prefixes)}: expected as many")
    worth = {prefix: step_label(given, how) for prefix, given in zip(prefixes, verdicts, strict=True)}
    return [
        SteppedSequence(
            whole.prompt_token_ids, whole.completion_token_ids, tuple(ends),
            (*(worth[prefix] for prefix in cut), None if verdict is None else float(verdict)), whole.problem_id,
        )
        for (whole, ends, verdict), cut in zip(completions, cuts, strict=True)
    ]  # fmt: skip
