"""The page classifier: fastText, mathematical pages against others. Needs the extra ``web``."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.data import WebConfig

READ = 3000
"""Characters of a page that the classifier reads: its subject shows early, and pages have no upper bound."""
FASTER = 5.0
"""Most by which the learning rate is raised for a small seed, before the passes over it are."""
_END = "</s>"
"""The word that fastText reads at the end of each line."""
_BLANK, _LETTER, _DIGIT, _SIGN = range(4)


class Classifier:
    """Scores pages: the probability of being mathematical.

    A page's vector is the mean of the rows of its words and n-grams, and of two classes only the difference of the
    outputs counts. So each row is reduced to one number once, and a page's score is the logistic function of the mean of
    those: what the library computes, without its ``dim`` numbers a word. Words are told apart by fastText's 32-bit hash.
    """

    def __init__(self, model: Any, config: WebConfig) -> None:
        """Reduce a trained model, whose rows are its words and then ``config.bucket`` hashed n-grams."""
        outputs = dict(zip(model.get_labels(), model.get_output_matrix(), strict=True))
        self._rows = model.get_input_matrix() @ (outputs["__label__yes"] - outputs["__label__no"])
        words = model.get_words()
        self._known, self._row_of = np.unique(
            _word_hashes("".join(f"{word}\n" for word in words))[0], return_index=True
        )
        self._first_ngram, self._longest, self._bucket = len(words), config.word_ngrams, np.uint64(config.bucket)

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [D]: one probability a text; 0 for a text without any token."""
        lines = classifier_lines(texts)
        hashes, ends = _word_hashes("".join(f"{line} {_END}\n" for line in lines))
        line_of = np.repeat(np.arange(len(lines)), np.diff(ends, prepend=0))
        place = np.minimum(np.searchsorted(self._known, hashes), len(self._known) - 1)
        known = self._known[place] == hashes
        owners, rows = [line_of[known]], [self._row_of[place[known]]]
        # n-grams as fastText hashes them: from signed 32-bit hashes, in 64 bits, modulo the bucket.
        signed = hashes.view(np.int32).astype(np.int64).view(np.uint64)
        gram = signed
        for n in range(1, self._longest):
            gram = gram[:-1] * np.uint64(116049371) + signed[n:]
            inside = line_of[: len(gram)] == line_of[n:]
            owners.append(line_of[: len(gram)][inside])
            rows.append(self._first_ngram + (gram[inside] % self._bucket).astype(np.int64))
        owner = np.concatenate(owners)
        sums = np.bincount(owner, self._rows[np.concatenate(rows)], len(lines))
        scores = 1.0 / (1.0 + np.exp(-sums / np.maximum(1, np.bincount(owner, minlength=len(lines)))))
        return np.where([bool(line) for line in lines], scores, 0.0).astype(np.float32)


def train(positives: Iterable[str], negatives: Iterable[str], config: WebConfig, seed: int) -> Classifier:
    """A classifier of the two, on one thread so that it is the same every time. Streams both into a scratch file.

    Raises ImportError, with what to install, when there is no fastText, and ValueError when one side has no text.
    """
    fasttext = _library()
    with tempfile.TemporaryDirectory(prefix="grpoflow-") as folder:
        file = Path(folder) / "pages.txt"
        total = 0
        with file.open("w", encoding="utf-8") as out:
            for label, texts in (("yes", positives), ("no", negatives)):
                count = 0
                for text in texts:
                    (line,) = classifier_lines([text])
                    if line:
                        out.write(f"__label__{label} {line}\n")
                        count += 1
                total += count
                if not count:
                    kind = "seed" if label == "yes" else "other"
                    raise ValueError(f"the page classifier has no {kind} page with any text: it needs both kinds")
        rate, epochs = passes(total, config)
        try:
            model = fasttext.train_supervised(
                str(file), dim=config.dim, lr=rate, wordNgrams=config.word_ngrams, minCount=config.min_count,
                epoch=epochs, bucket=config.bucket, thread=1, seed=seed % (1 << 31), verbose=0,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(
                f"the page classifier cannot be trained ({error}): give more seed pages, or lower web.min_count"
            ) from None
    return Classifier(model, config)


def passes(pages: int, config: WebConfig) -> tuple[float, int]:
    """(learning rate, epochs) over so many pages: as configured, or more of both until it is worth ``min_pages_read``.

    At 0.1 and 3 epochs, 500 pages are read 1,500 times: 30,000 are 20 times as many, so 5 times the rate and 12 epochs.
    """
    lacking = max(1.0, config.min_pages_read / (config.epochs * pages))
    faster = min(FASTER, lacking)
    return config.lr * faster, math.ceil(config.epochs * lacking / faster)


def classifier_lines(texts: Sequence[str]) -> list[str]:
    """Of each text the lower-case words, numbers as digits alone, and signs, with one blank between; no line breaks."""
    joined = "\0".join(text[:READ].replace("\0", " ").lower() for text in texts)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    kind = _kinds()[codes]
    kept = kind != _BLANK
    first = kept & (kind == _SIGN)
    first[1:] |= kept[1:] & (kind[1:] != kind[:-1])
    place = np.cumsum(kept.astype(np.int64) + first)  # a blank before the first character of each token
    spaced = np.full(place[-1] + 1 if len(place) else 0, ord(" "), np.uint32)
    spaced[place[kept]] = codes[kept]
    return [line.strip(" ") for line in spaced.tobytes().decode("utf-32-le").split("\0")]


def _word_hashes(lines: str) -> tuple[np.ndarray, np.ndarray]:
    """(uint32 hash of each word, number of words up to the end of each line): fastText's FNV-1a of signed bytes.

    Words are what stands between single blanks and line breaks.
    """
    codes = np.frombuffer(lines.encode(), np.uint8)
    breaks = np.flatnonzero((codes == ord(" ")) | (codes == ord("\n")))
    starts = np.concatenate([[0], breaks[:-1] + 1])
    lengths = breaks - starts
    signed = codes.view(np.int8).astype(np.uint32)
    hashes = np.full(len(starts), 2166136261, np.uint32)
    longer = np.arange(len(starts))
    for position in range(int(lengths.max(initial=0))):
        longer = longer[lengths[longer] > position]
        hashes[longer] = (hashes[longer] ^ signed[starts[longer] + position]) * np.uint32(16777619)
    return hashes, np.flatnonzero(codes[breaks] == ord("\n")) + 1


@cache
def _kinds() -> np.ndarray:
    """uint8 [0x110000]: blank (underscores and lone surrogates, too), letter, digit or sign."""
    kinds = np.full(sys.maxunicode + 1, _SIGN, np.uint8)
    named = range(0x40000)  # what comes after holds no letters
    for kind, belongs in ((_BLANK, str.isspace), (_LETTER, str.isalnum), (_DIGIT, str.isdecimal)):
        kinds[: len(named)][np.fromiter(map(belongs, map(chr, named)), bool, len(named))] = kind
    kinds[ord("_")] = kinds[0xD800:0xE000] = _BLANK
    return kinds


def _library() -> Any:
    try:
        import fasttext
    except ImportError:
        raise ImportError(
            "the selection of web pages needs fastText: install the extra web (pip install 'grpoflow[web]')"
        ) from None
    return fasttext
