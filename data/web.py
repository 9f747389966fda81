"""Iterative selection of mathematical web pages (arXiv 2402.03300 §2.1): classify, keep, grow the seed by domains.

Pages are read from the start in every pass and never held: memory is a few bytes a page, and the seed.
"""

from __future__ import annotations

import fnmatch
import logging
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from data.decontaminate import Decontaminator, Hit, Reference
from data.fasttext import train
from data.near_duplicates import PERMUTATIONS, signatures_of, similar_pairs
from data.words import in_batches, split_words
from pipeline.config.data import WebConfig
from pipeline.seeds import derive_seed

logger = logging.getLogger(__name__)

SHINGLE = 5
READ_AHEAD = 32
"""Pages scored together: their arrays fit a core's cache."""


@dataclass(frozen=True, slots=True)
class Page:
    """A web page: its text and where it was found."""

    url: str
    text: str

    @property
    def domain(self) -> str:
        """The host of the URL, lower case, without a leading www."""
        return (urlsplit(self.url).hostname or self.url.split("/")[0]).removeprefix("www.")


@dataclass(frozen=True, slots=True)
class WebSelection:
    """What was decided of each page, by its position in the pool, and the figures of each iteration."""

    scores: np.ndarray
    kept: np.ndarray
    reasons: dict[int, str]
    iterations: list[dict[str, int]]


def select_pages(
    pool: Callable[[], Iterable[Page]],
    seed_pages: Sequence[str],
    references: Sequence[Reference],
    config: WebConfig,
    seed: int,
) -> WebSelection:
    """Which pages of the pool are mathematical. ``pool()`` starts over from its first page at each call.

    Raises ValueError when the pool or the seed is empty. ``reasons`` says of each page that a later rule set aside why:
    "contaminated …" or "near-duplicate of page N".
    """
    domains, approved, words = _survey(pool, config)
    joined = np.zeros(len(domains), bool)
    scores, kept = np.zeros(len(domains), np.float32), np.zeros(len(domains), bool)
    iterations: list[dict[str, int]] = []
    for number in range(1, config.max_iterations + 1):
        classifier = train(
            _positives(pool, seed_pages, joined), _negatives(pool, joined, seed_pages, seed), config, seed
        )
        scores = np.concatenate([classifier.score(texts) for texts in _chunks(page.text for page in pool())])
        before, kept = int(kept.sum()), best_pages(scores, words, config)
        candidates = candidate_domains(domains, kept, config.domain_share)
        iterations.append({"iteration": number, "kept": int(kept.sum()), "seed": len(seed_pages) + int(joined.sum())})
        logger.info("web: iteration %d keeps %d of %d pages", number, kept.sum(), len(domains))
        new = approved & np.array([domain in candidates for domain in domains], bool)
        grown = (int(kept.sum()) - before) / max(1, before)
        if not (new & ~joined).any() or (number > 1 and grown < config.min_growth):
            break
        joined |= new
    reasons = _set_aside(pool, kept, references, config)
    kept[list(reasons)] = False
    return WebSelection(scores, kept, reasons, iterations)


def _survey(pool: Callable[[], Iterable[Page]], config: WebConfig) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Of every page its domain, whether its URL is approved, and about how many words it has."""
    domains: list[str] = []
    approved, words = array("b"), array("q")
    for page in pool():
        domains.append(sys.intern(page.domain))
        approved.append(any(fnmatch.fnmatch(page.url, pattern) for pattern in config.approved))
        words.append(page.text.count(" ") + 1)
    if not domains:
        raise ValueError("the pool of web pages is empty: name a file with columns url and text")
    return domains, np.array(approved, bool), np.array(words)


def best_pages(scores: np.ndarray, words: np.ndarray, config: WebConfig) -> np.ndarray:
    """bool [D]: pages over ``min_score``, of these the best up to ``keep_words`` words (the first of equals)."""
    kept = scores >= config.min_score
    if config.keep_words is not None:
        order = np.argsort(-scores, kind="stable")
        order = order[kept[order]]
        kept = np.zeros(len(scores), bool)
        kept[order[np.cumsum(words[order]) <= config.keep_words]] = True
    return kept


def candidate_domains(domains: Sequence[str], kept: np.ndarray, share: float) -> set[str]:
    """Domains of which more than ``share`` of the pages is kept."""
    total = Counter(domains)
    good = Counter(domain for domain, keep in zip(domains, kept.tolist(), strict=True) if keep)
    return {domain for domain, count in good.items() if count > share * total[domain]}


def _positives(pool: Callable[[], Iterable[Page]], seed_pages: Sequence[str], joined: np.ndarray) -> Iterator[str]:
    yield from seed_pages
    if joined.any():
        yield from (page.text for page, mine in zip(pool(), joined.tolist(), strict=True) if mine)


def _negatives(
    pool: Callable[[], Iterable[Page]], joined: np.ndarray, seed_pages: Sequence[str], seed: int
) -> Iterator[str]:
    """About as many random pages of the pool as there are positives; those that joined the seed are left out."""
    share = (len(seed_pages) + joined.sum()) / max(1, len(joined) - joined.sum())
    for position, (page, mine) in enumerate(zip(pool(), joined.tolist(), strict=True)):
        if not mine and derive_seed(seed, "random page", position) / 2.0**63 < share:
            yield page.text


def _set_aside(
    pool: Callable[[], Iterable[Page]], kept: np.ndarray, references: Sequence[Reference], config: WebConfig
) -> dict[int, str]:
    """Position → reason of kept pages that repeat a benchmark or an earlier kept page. Each is read once for both."""
    reasons: dict[int, str] = {}
    positions = np.flatnonzero(kept)
    scanner = None
    if references and config.decontaminate.rule != "off":
        scanner = Decontaminator(references, config.decontaminate)
    signatures = np.zeros((len(positions), PERMUTATIONS), np.uint32)
    done = 0
    for texts in in_batches(page.text for page, keep in zip(pool(), kept.tolist(), strict=True) if keep):
        words = split_words(texts)
        batch = slice(done, done := done + len(texts))
        if scanner is not None:
            for position, hit in zip(positions[batch].tolist(), scanner.scan_words(words), strict=True):
                if hit is not None:
                    reasons[position] = _contaminated(hit)
        if config.near_duplicates is not None:
            signatures[batch] = signatures_of(words, SHINGLE)
    if config.near_duplicates is not None:
        _add_copies(reasons, positions.tolist(), signatures, config.near_duplicates)
    return reasons


def _add_copies(reasons: dict[int, str], positions: list[int], signatures: np.ndarray, threshold: float) -> None:
    """Pages as alike as the threshold to an earlier one that stays."""
    for earlier, later in similar_pairs(signatures, threshold, threshold):
        first, second = positions[earlier], positions[later]
        if first not in reasons and second not in reasons:
            reasons[second] = f"near-duplicate of page {first}"


def _contaminated(hit: Hit) -> str:
    found = hit.reference
    return f"contaminated: repeats {hit.share:.0%} of the {found.part} of {found.benchmark} {found.row}"


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    for text in texts:
        held.append(text)
        if len(held) == READ_AHEAD:
            yield held
            held = []
    if held:
        yield held
