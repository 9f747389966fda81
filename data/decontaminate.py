"""Texts that repeat a benchmark: rule ``paper`` (arXiv 2402.03300 §2.1) and rule ``containment``. Streaming, no file.

Both compare normalised words (``data.words``), against the benchmark's problems and its worked solutions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from data.alignment import align, densest_window
from data.words import Words, in_batches, split_words, words_of
from pipeline.config.data import DecontaminateConfig

SHORTEST = 3
"""Words of the shortest benchmark text that is looked for."""
MARGIN = 12
"""Words around the matching n-grams that are read as part of the passage: a changed name or number at its edge."""
COMMON = 100
"""An n-gram of more references than this is a phrase of the benchmark, or of the template that made it: containment does
not count it, and "paper" looks for the best reference among the first of them only. So work is linear in such sets, too."""
TRIED = 20
"""References whose words are compared with a text, the best shares first."""
EVIDENCE = 400
"""Characters of the matching passage that are recorded."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A benchmark text: the problem or the worked solution (``part``) of a row."""

    benchmark: str
    row: str
    part: str
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """What a text was found to repeat: the reference, the share of its n-grams (1 for an exact match), the passage."""

    reference: Reference
    share: float
    passage: str


_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)


class _Lookup:
    """64-bit hashes → the references that hold them. A table of bits answers most questions without a search."""

    def __init__(self, hashes: np.ndarray, owners: np.ndarray, *, without_common: bool = False) -> None:
        """``owners`` ascend."""
        order = np.argsort(hashes, kind="stable")
        hashes, owners = hashes[order], owners[order]
        first = np.ones(len(hashes), bool)
        first[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
        hashes, self.owners = hashes[first], owners[first]
        if without_common:
            _, which, counts = np.unique(hashes, return_inverse=True, return_counts=True)
            rare = counts[which] <= COMMON
            hashes, self.owners = hashes[rare], self.owners[rare]
        self.keys, self.starts = np.unique(hashes, return_index=True)
        self.ends = np.append(self.starts[1:], len(hashes))
        # One bit a slot and 16 to 32 slots a key: small enough for a core's cache, and 1 in 16 at most passes in vain.
        self._shift = np.uint64(64 - max(10, (16 * len(self.keys)).bit_length()))
        slots = self.keys >> self._shift
        self._bits = np.zeros((1 << (64 - int(self._shift))) // 8, np.uint8)
        np.bitwise_or.at(self._bits, slots >> np.uint64(3), _bit(slots))

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(position in ``hashes``, position in ``keys``) of every hash that is known."""
        slots = hashes >> self._shift
        where = np.flatnonzero(self._bits[slots >> np.uint64(3)] & _bit(slots))
        key = np.searchsorted(self.keys, hashes[where])
        known = self.keys[np.minimum(key, len(self.keys) - 1)] == hashes[where]
        return where[known], key[known]

    def owner_pairs(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(position in ``keys``, owner) of every owner of every key, at most the first ``COMMON`` of each."""
        counts = np.minimum(self.ends[keys] - self.starts[keys], COMMON)
        item = np.repeat(np.arange(len(keys)), counts)
        within = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)
        return item, self.owners[np.repeat(self.starts[keys], counts) + within]


def _bit(slots: np.ndarray) -> np.ndarray:
    """uint8: the bit of each slot within its byte."""
    return np.left_shift(np.uint8(1), (slots & np.uint64(7)).astype(np.uint8))


class Decontaminator:
    """Finds the texts that repeat one of the references, under one rule."""

    def __init__(self, references: Sequence[Reference], config: DecontaminateConfig) -> None:
        """Index the references; those of fewer than three words are never found. ValueError when no other is there."""
        self.config = config
        self.references = [self._without_drawing(reference) for reference in references]
        words = split_words([reference.text for reference in self.references])
        self._lengths = np.bincount(words.documents, minlength=len(references))
        if not references or self._lengths.max() < SHORTEST:
            raise ValueError("decontamination has no benchmark text of three words or more: name data.benchmarks sets")
        hashes, first = words.grams(self.config.words)
        owners = words.documents[first]
        self._grams = _Lookup(hashes, owners, without_common=self.config.rule == "containment")
        self._sizes = np.bincount(self._grams.owners, minlength=len(self.references))
        short = np.flatnonzero((self._lengths >= SHORTEST) & (self._lengths < self.config.whole_below))
        begins = np.searchsorted(words.documents, short)
        self._beginnings = _Lookup(words.grams_at(SHORTEST, begins)[0], short)
        self._whole: dict[int, _Lookup] = {}
        for length in np.unique(self._lengths[short]).tolist():
            mine = self._lengths[short] == length
            self._whole[length] = _Lookup(words.grams_at(length, begins[mine])[0], short[mine])

    def _without_drawing(self, reference: Reference) -> Reference:
        """Containment reads a problem without its Asymptote code, whose lines are alike in hundreds of problems."""
        if self.config.rule == "paper" or "[asy]" not in reference.text:
            return reference
        text = _DRAWING.sub(" ", reference.text)
        # Of "What is $x$? [asy]…" nothing would be left to tell it from others.
        return replace(reference, text=text) if len(words_of(text)) >= self.config.whole_below else reference

    def scan(self, texts: Iterable[str]) -> Iterator[Hit | None]:
        """For each text, in order, what it repeats (the best match), or None. Reads a few texts ahead, never all."""
        for some in in_batches(texts):
            yield from self.scan_words(split_words(some))

    def scan_words(self, words: Words) -> list[Hit | None]:
        """The same for the words of several texts."""
        hits: list[Hit | None] = [None] * len(words.texts)
        self._find_whole(words, hits)
        if self.config.rule == "paper":
            self._find_any_gram(words, hits)
        else:
            self._find_contained(words, hits)
        return hits

    def _find_whole(self, words: Words, hits: list[Hit | None]) -> None:
        """Short references that occur word for word: only where the first words of one stand, the rest is compared."""
        if not self._whole:
            return
        hashes, first = words.grams(SHORTEST)
        begins = first[self._beginnings.find(hashes)[0]]
        for length, lookup in self._whole.items():
            hashes, first = words.grams_at(length, begins)
            where, key = lookup.find(hashes)
            for position, known in zip(first[where].tolist(), key.tolist(), strict=True):
                document = int(words.documents[position])
                if hits[document] is None:
                    owner = int(lookup.owners[lookup.starts[known]])
                    passage = _passage(words, position, position + length)
                    hits[document] = Hit(self.references[owner], 1.0, passage)

    def _find_any_gram(self, words: Words, hits: list[Hit | None]) -> None:
        """Rule "paper": one n-gram of a reference is enough; the share is told all the same."""
        hashes, first = words.grams(self.config.words)
        where, key = self._grams.find(hashes)
        document = words.documents[first[where]]
        for number in np.flatnonzero(np.bincount(document, minlength=len(hits))).tolist():
            if hits[number] is None:
                mine = np.flatnonzero(document == number)
                _, owners = self._grams.owner_pairs(np.unique(key[mine]))
                counts = np.bincount(owners, minlength=len(self.references))
                owner = int(np.argmax(counts / np.maximum(1, self._sizes)))
                position = int(first[where[mine[0]]])
                passage = _passage(words, position, position + self.config.words)
                hits[number] = Hit(self.references[owner], float(counts[owner] / self._sizes[owner]), passage)

    def _find_contained(self, words: Words, hits: list[Hit | None]) -> None:
        """Rule "containment": the share of n-grams is over the threshold, and words and numbers stand in their order."""
        hashes, first = words.grams(self.config.words)
        where, key = self._grams.find(hashes)
        if not len(where):
            return
        document = words.documents[first[where]]
        # Each n-gram counts once a document.
        their_document, key = np.divmod(np.unique(document * len(self._grams.keys) + key), len(self._grams.keys))
        item, owner = self._grams.owner_pairs(key)
        matches, counts = np.unique(their_document[item] * len(self.references) + owner, return_counts=True)
        documents, owners = np.divmod(matches, len(self.references))
        shares = counts / self._sizes[owners]
        enough = (shares >= self.config.threshold) & (self._lengths[owners] >= self.config.whole_below)
        # Best share first; a document is settled by the first reference that holds up.
        tried = [0] * len(hits)
        for index in np.flatnonzero(enough)[np.argsort(-shares[enough], kind="stable")].tolist():
            number, reference = int(documents[index]), int(owners[index])
            tried[number] += 1
            if hits[number] is None and tried[number] <= TRIED:
                mine = where[document == number]
                hits[number] = self._verify(words, first[mine], hashes[mine], reference, float(shares[index]))

    def _verify(self, words: Words, first: np.ndarray, hashes: np.ndarray, owner: int, share: float) -> Hit | None:
        """The hit, when the passage around the shared n-grams repeats the reference's words and numbers in order."""
        reference = self.references[owner]
        own, wanted = _taken_apart(reference.text, self.config.words)
        positions = first[np.isin(hashes, own)].tolist()
        length = int(self._lengths[owner])
        low, high = densest_window(positions, 2 * length)
        mine = np.flatnonzero(words.documents == words.documents[low])
        low = max(int(mine[0]), low - MARGIN)
        high = min(int(mine[-1]) + 1, high + self.config.words + MARGIN)
        text = words.texts[int(words.documents[low])]
        spans = zip(words.starts[low:high].tolist(), words.ends[low:high].tolist(), strict=True)
        found = align(wanted, [text[start:end].lower() for start, end in spans])
        if found.numbers is None:
            same = share >= self.config.threshold_without_numbers
        else:
            same = found.numbers >= self.config.same_numbers
        if not same or found.words < self.config.same_words:
            return None
        return Hit(reference, share, _passage(words, low, high))


@lru_cache(maxsize=4096)
def _taken_apart(text: str, length: int) -> tuple[np.ndarray, list[str]]:
    """Hashes of a reference's n-grams, and its words; kept, since texts made from a template meet the same few."""
    return split_words([text]).grams(length)[0], words_of(text)


def _passage(words: Words, low: int, high: int) -> str:
    """The text from one word to before another, at most ``EVIDENCE`` characters of it."""
    text = words.texts[int(words.documents[low])]
    passage = text[int(words.starts[low]) : int(words.ends[high - 1])]
    return passage if len(passage) <= EVIDENCE else passage[:EVIDENCE] + " …"
