"""Near-duplicates by MinHash: signatures over word n-grams, similar pairs by bands of equal values. Pure.

The permutations are datasketch's; the bands are sorted arrays instead of its dictionaries, which take a hundred times
the memory: a million texts need about 1 GiB here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from data.words import Words, in_batches, split_words

PERMUTATIONS = 128
RECALL = 0.99
"""Least chance that a pair just at the threshold is looked at."""
ERROR = 0.044
"""Largest standard deviation of the share of equal values of two signatures, as an estimate of the Jaccard index."""


def signatures(texts: Iterable[str], n: int) -> np.ndarray:
    """uint32 [D, 128]: the MinHash signature of each text's word n-grams, reading a few texts ahead, never all."""
    found = [signatures_of(split_words(some), n) for some in in_batches(texts)]
    return np.concatenate(found) if found else np.zeros((0, PERMUTATIONS), np.uint32)


def signatures_of(words: Words, n: int) -> np.ndarray:
    """uint32 [D, 128]: of each text the least value of its n-grams under every permutation; the largest without words.

    The permutations are datasketch's. Its own update takes a Python integer an n-gram; here a batch is one array, and
    the hashes are mixed well enough for affine permutations to begin with.
    """
    hashes, documents = _elements(words, n)
    values = (hashes >> np.uint64(32)).astype(np.uint32)
    present, starts = np.unique(documents, return_index=True)
    found = np.full((len(words.texts), PERMUTATIONS), np.iinfo(np.uint32).max, np.uint32)
    if len(present):
        for number, (factor, offset) in enumerate(zip(*_permutations(), strict=True)):
            found[present, number] = np.minimum.reduceat(values * factor + offset, starts)
    return found


@cache
def _permutations() -> np.ndarray:
    """uint32 [2, 128]: odd factors and offsets of h -> factor * h + offset modulo 2**32."""
    from datasketch import MinHash

    return np.asarray(MinHash(num_perm=PERMUTATIONS).permutations, np.uint32)


def shingles(texts: Sequence[str], n: int) -> list[np.ndarray]:
    """For each text the distinct hashes of its n-grams of words, sorted; of its words when it has fewer than n."""
    hashes, documents = _elements(split_words(texts), n)
    bounds = np.searchsorted(documents, np.arange(len(texts) + 1))
    return [np.unique(hashes[bounds[i] : bounds[i + 1]]) for i in range(len(texts))]


def _elements(words: Words, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(hash, text that holds it) of every n-gram, and of every word of texts with fewer than n words; texts in order."""
    hashes, first = words.grams(n)
    documents = words.documents[first]
    long = np.zeros(len(words.texts), bool)
    long[documents] = True
    short = ~long[words.documents]
    if not short.any():
        return hashes, documents
    documents = np.concatenate([documents, words.documents[short]])
    order = np.argsort(documents, kind="stable")
    return np.concatenate([hashes, words.hashes[short]])[order], documents[order]


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Shared elements over all elements of two sets of hashes; 0 when both are empty."""
    union = len(np.union1d(first, second))
    return len(np.intersect1d(first, second, assume_unique=True)) / union if union else 0.0


def similar_pairs(signatures: np.ndarray, threshold: float, least: float) -> list[tuple[int, int]]:
    """(earlier, later) pairs of texts whose signatures are at least ``least`` alike, sorted by the later one.

    A pair that is ``threshold`` similar is looked at with a chance of at least 0.99. Texts that agree in a band are
    compared with the first of them and with the two before them, so the work is linear however many agree.
    """
    bands, rows = band_shape(threshold)
    pairs = [np.zeros((0, 2), np.int64)]
    # Signatures of texts without any word are all alike and say nothing.
    worded = np.flatnonzero((signatures != np.iinfo(np.uint32).max).any(axis=1))
    for band in range(bands):
        keys = np.zeros(len(worded), np.uint64)
        for column in range(band * rows, (band + 1) * rows):
            keys = keys * np.uint64(0x9E3779B97F4A7C15) + signatures[worded, column]
            keys ^= keys >> np.uint64(32)
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        new = np.ones(len(order), bool)
        new[1:] = sorted_keys[1:] != sorted_keys[:-1]
        place = np.arange(len(order))
        group_start = np.maximum.accumulate(np.where(new, place, 0))
        for back in (None, 1, 2):
            other = group_start if back is None else place - back
            inside = (other >= group_start) & (other < place)
            found = np.stack([worded[order[other[inside]]], worded[order[place[inside]]]], axis=1)
            pairs.append(found[_are_alike(signatures, found, least)])
    unique = np.unique(np.concatenate(pairs), axis=0)
    order = np.lexsort((unique[:, 0], unique[:, 1]))
    return [(int(a), int(b)) for a, b in unique[order]]


def _are_alike(signatures: np.ndarray, pairs: np.ndarray, least: float) -> np.ndarray:
    """bool [pairs]: the estimate is at least ``least``; some thousand signatures are gathered at a time."""
    alike = [
        (signatures[some[:, 0]] == signatures[some[:, 1]]).mean(axis=1) >= least
        for some in np.array_split(pairs, 1 + len(pairs) // 4096)
    ]
    return np.concatenate(alike)


def band_shape(threshold: float) -> tuple[int, int]:
    """(bands, values a band): the widest bands that still find a pair at the threshold with the chance ``RECALL``.

    r equal values have the chance t**r, so one of b bands agrees with the chance 1 - (1 - t**r)**b.
    """
    for rows in range(PERMUTATIONS // 4, 1, -1):
        bands = PERMUTATIONS // rows
        if 1.0 - (1.0 - threshold**rows) ** bands >= RECALL:
            return bands, rows
    return PERMUTATIONS, 1
