"""The page classifier: fastText, mathematical pages against others. Needs the extra ``web``."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.data import WebConfig

READ = 10_000
"""Characters of a page that the classifier reads: its subject shows early, and pages have no upper bound."""
_TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")


class Classifier:
    """Scores pages: the probability of being mathematical."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [D]: one probability a text; 0 for a text without any token."""
        scores = np.zeros(len(texts), np.float32)
        for position, text in enumerate(texts):
            line = classifier_line(text)
            if line:
                # The binding's own predict() turns every result into lists; its native one gives pairs.
                found = {
                    label: probability for probability, label in self._model.f.predict(line + "\n", 2, 0.0, "strict")
                }
                scores[position] = min(1.0, found.get("__label__yes", 0.0))
        return scores


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
                    if line := classifier_line(text):
                        out.write(f"__label__{label} {line}\n")
                        count += 1
                total += count
                if not count:
                    kind = "seed" if label == "yes" else "other"
                    raise ValueError(f"the page classifier has no {kind} page with any text: it needs both kinds")
        epochs = max(config.epochs, -(-config.min_pages_read // total))
        try:
            model = fasttext.train_supervised(
                str(file), dim=config.dim, lr=config.lr, wordNgrams=config.word_ngrams, minCount=config.min_count,
                epoch=epochs, bucket=config.bucket, thread=1, seed=seed % (1 << 31), verbose=0,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(
                f"the page classifier cannot be trained ({error}): give more seed pages, or lower web.min_count"
            ) from None
    return Classifier(model)


def classifier_line(text: str) -> str:
    """Lower-case words, numbers as digits alone, and signs, each a token; no line breaks."""
    return " ".join(_TOKEN.findall(text[:READ].lower()))


def _library() -> Any:
    try:
        import fasttext
    except ImportError:
        raise ImportError(
            "the selection of web pages needs fastText: install the extra web (pip install 'grpoflow[web]')"
        ) from None
    return fasttext
