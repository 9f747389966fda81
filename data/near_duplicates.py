"""Near-duplicates by MinHash: signatures over word n-grams, candidate pairs by bands of equal values. Pure.

Signatures are datasketch's; the bands are sorted arrays instead of its dictionaries, which take a hundred times the
memory: a million texts need about 1 GiB here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from data.words import BATCH, split_words

PERMUTATIONS = 128
RECALL = 0.99
"""Least chance that a pair just at the threshold becomes a candidate."""


def signatures(texts: Iterable[str], n: int) -> np.ndarray:
    """uint32 [D, 128]: the MinHash signature of each text's word n-grams, reading a few texts ahead, never all."""
    rows = list(iter_signatures(texts, n))
    return np.array(rows, np.uint32).reshape(len(rows), PERMUTATIONS)


def iter_signatures(texts: Iterable[str], n: int) -> Iterator[np.ndarray]:
    """One uint32 [128] a text, in order."""
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= BATCH:
            yield from _batch_signatures(held, n)
            held, size = [], 0
    if held:
        yield from _batch_signatures(held, n)


def _batch_signatures(texts: Sequence[str], n: int) -> Iterator[np.ndarray]:
    from datasketch import MinHash

    sets = ((hashes >> np.uint64(32)).tolist() for hashes in shingles(texts, n))
    for signature in MinHash.generator(sets, num_perm=PERMUTATIONS, hashfunc=int):
        yield signature.hashvalues.astype(np.uint32)


def shingles(texts: Sequence[str], n: int) -> list[np.ndarray]:
    """For each text the distinct hashes of its n-grams of words, sorted; of its words when it has fewer than n."""
    words = split_words(texts)
    hashes, first = words.grams(n)
    documents = words.documents[first]
    bounds = np.searchsorted(documents, np.arange(len(texts) + 1))
    word_bounds = np.searchsorted(words.documents, np.arange(len(texts) + 1))
    found = []
    for i in range(len(texts)):
        own = hashes[bounds[i] : bounds[i + 1]]
        found.append(np.unique(own if len(own) else words.hashes[word_bounds[i] : word_bounds[i + 1]]))
    return found


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Shared elements over all elements of two sets of hashes; 0 when both are empty."""
    union = len(np.union1d(first, second))
    return len(np.intersect1d(first, second, assume_unique=True)) / union if union else 0.0


def estimated_jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Share of equal values of two signatures: unbiased, with a standard deviation of at most 0.044 for 128 values."""
    return float(np.mean(first == second))


def candidate_pairs(signatures: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """(earlier, later) pairs of texts that may be at least ``threshold`` similar, sorted by the later one.

    A pair at the threshold is found with a chance of at least 0.99. Texts that agree in a band are compared with the
    first of them and with the two before them, so the work is linear however many agree.
    """
    bands, rows = band_shape(threshold)
    pairs: list[np.ndarray] = []
    for band in range(bands):
        block = np.ascontiguousarray(signatures[:, band * rows : (band + 1) * rows])
        keys = block.view(np.dtype((np.void, block.dtype.itemsize * rows))).ravel()
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        new = np.ones(len(order), bool)
        new[1:] = sorted_keys[1:] != sorted_keys[:-1]
        group_start = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
        for back in (None, 1, 2):
            place = np.arange(len(order))
            other = group_start if back is None else place - back
            inside = (other >= group_start) & (other < place)
            pairs.append(np.stack([order[other[inside]], order[place[inside]]], axis=1))
    if not pairs:
        return []
    unique = np.unique(np.concatenate(pairs), axis=0)
    # Signatures of texts without any word are all alike and say nothing.
    blank = (signatures == np.iinfo(np.uint32).max).all(axis=1)
    unique = unique[~blank[unique[:, 0]]]
    order = np.lexsort((unique[:, 0], unique[:, 1]))
    return [(int(a), int(b)) for a, b in unique[order]]


def band_shape(threshold: float) -> tuple[int, int]:
    """(bands, values a band): the widest bands that still find a pair at the threshold with the chance ``RECALL``.

    r equal values have the chance t**r, so one of b bands agrees with the chance 1 - (1 - t**r)**b.
    """
    for rows in range(PERMUTATIONS // 4, 1, -1):
        bands = PERMUTATIONS // rows
        if 1.0 - (1.0 - threshold**rows) ** bands >= RECALL:
            return bands, rows
    return PERMUTATIONS, 1
