"""Stop strings over token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Finds stop strings in the text of the last few tokens."""

    def __init__(self, stop: Sequence[str], tokenizer: Any) -> None:
        if "" in stop:
            raise ValueError("sampler.stop has an empty string, which would end every completion: remove it")
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        # A token is at least one byte, and what stands before it may begin in the middle of a character.
        self._tokens = max(len(text.encode()) for text in stop) + 4

    def ends(self, token_ids: Sequence[int]) -> bool:
        """True when a stop string is complete in these ids; asked after every token, so it is in the last few."""
        text = self._tokenizer.decode(list(token_ids[-self._tokens :]), skip_special_tokens=False)
        return any(stop in text for stop in self._stop)
