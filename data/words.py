"""Words and their n-grams as 64-bit hashes, computed over whole batches of texts at once.

A word is a run of letters and digits, lower case, in NFKC form; Chinese, Japanese kana and the like, which are written
without blanks, count each character as a word. Punctuation and TeX's signs only separate words.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from data.text import nfkc

BATCH = 1 << 16
"""Characters hashed together: the arrays of a batch fit a core's cache, so memory does not grow with the text."""
_BASE, _GRAM_BASE = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_SEPARATOR, _WORD, _SINGLE = 0, 1, 2
_UNSPACED = ((0x2E80, 0x31FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
"""Code points from CJK radicals to extensions, with kana and bopomofo; Hangul is written with blanks."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of several texts in a row: W words, D texts.

    ``hashes`` uint64 [W]; ``starts`` and ``ends`` int64 [W], character positions in ``texts[document]`` once
    normalised; ``documents`` int64 [W], ascending; ``texts``, the normalised texts [D].
    """

    hashes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    documents: np.ndarray
    texts: Sequence[str]

    def grams(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(uint64 hash, index of its first word) of every n-gram that lies within one text."""
        count = len(self.hashes) - n + 1
        if count <= 0:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        combined = np.zeros(count, np.uint64)
        for offset in range(n):
            combined *= np.uint64(_GRAM_BASE)
            combined += self.hashes[offset : offset + count]
        first = np.flatnonzero(self.documents[:count] == self.documents[n - 1 :])
        return _mix(combined[first]), first

    def grams_at(self, n: int, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for the n-grams that begin with one of the words ``first`` only."""
        first = first[first <= len(self.hashes) - n]
        first = first[self.documents[first] == self.documents[first + n - 1]]
        combined = np.zeros(len(first), np.uint64)
        for offset in range(n):
            combined *= np.uint64(_GRAM_BASE)
            combined += self.hashes[first + offset]
        return _mix(combined), first


def in_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in order, in lists of about ``BATCH`` characters, at least one text a list; never all are held."""
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= BATCH:
            yield held
            held, size = [], 0
    if held:
        yield held


def split_words(texts: Sequence[str]) -> Words:
    """The words of the texts. Time and memory are linear in their characters, whatever they hold."""
    parts = [_split_batch(some) for some in in_batches(texts)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _split_batch([])
    firsts = np.cumsum([0, *(len(part.texts) for part in parts[:-1])])
    return Words(
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.ends for part in parts]),
        np.concatenate([part.documents + first for part, first in zip(parts, firsts.tolist(), strict=True)]),
        [text for part in parts for text in part.texts],
    )


def _split_batch(texts: Sequence[str]) -> Words:
    normal = [nfkc(text) for text in texts]
    joined = " ".join(normal)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds, weights = _tables()
    starts, ends = _spans(kinds[codes])
    hashes = _hash_spans(weights[codes], starts, ends)
    lengths = np.fromiter((len(text) + 1 for text in normal), np.int64, len(normal))
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(normal) else np.empty(0, np.int64)
    documents = np.searchsorted(firsts, starts, side="right") - 1
    offsets = firsts[documents]
    return Words(hashes, starts - offsets, ends - offsets, documents, normal)


def words_of(text: str) -> list[str]:
    """The words themselves, as written after NFKC, for evidence and tests."""
    words = split_words([text])
    return [words.texts[0][start:end].lower() for start, end in zip(words.starts, words.ends, strict=True)]


def _spans(kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of every run of word characters and of every single-character word."""
    inside = np.concatenate([[False], kind == _WORD, [False]])
    change = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = change[::2], change[1::2]
    singles = np.flatnonzero(kind == _SINGLE)
    if not len(singles):
        return starts, ends
    starts, ends = np.concatenate([starts, singles]), np.concatenate([ends, singles + 1])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order]


def _hash_spans(weights: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint64 hash of ``weights[start:end]`` for every span.

    Characters are weighted with powers of an odd base, summed up once, and a span's sum is brought to power 0 with the
    inverse modulo 2**64: H(s, e) = (S[e] - S[s]) * base**-s.
    """
    powers, inverses = _powers(1 << max(16, (len(weights) - 1).bit_length()))
    sums = np.zeros(len(weights) + 1, np.uint64)
    np.cumsum(weights * powers[: len(weights)], out=sums[1:])
    return _mix((sums[ends] - sums[starts]) * inverses[starts])


def _mix(values: np.ndarray) -> np.ndarray:
    """The 64-bit finaliser of splitmix64: every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_POWERS: dict[int, tuple[np.ndarray, np.ndarray]] = {}


def _powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """base**i and base**-i for i below ``size``, modulo 2**64; only the largest pair asked for is kept up to a batch."""
    if size not in _POWERS:
        pair = (_geometric(_BASE, size), _geometric(pow(_BASE, -1, 1 << 64), size))
        if size > 4 * BATCH:
            return pair
        _POWERS[size] = pair
    return _POWERS[size]


def _geometric(base: int, size: int) -> np.ndarray:
    factors = np.full(size, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """(kind, random 64-bit weight of the lower case) of every code point, each [0x110000]."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    folded = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    for code in (*range(0x40000), *range(0xE0000, 0xE1000)):  # no other has letters or marks
        character = chr(code)
        # Combining marks (category M) belong to the word they stand in: Bengali, Thai and Telugu need them.
        if character.isalnum() or unicodedata.category(character)[0] == "M":
            kinds[code] = _WORD
            lower = character.lower()
            if len(lower) == 1:
                folded[code] = ord(lower)
    for low, high in _UNSPACED:
        block = kinds[low : high + 1]
        block[block == _WORD] = _SINGLE
    return kinds, _mix(folded.astype(np.uint64) + np.uint64(1))
