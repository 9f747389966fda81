"""Rows of Hub data sets, streamed; an unreachable Hub is one line that names the offline way."""

from __future__ import annotations

from collections.abc import Iterator

from data.readers import Row
from pipeline.config import SourceConfig


def hub_rows(config: SourceConfig, name: str, subset: str | None) -> Iterator[tuple[str, Row]]:
    """(where, row) of a split of a Hub data set, from the local cache or streamed from the Hub."""
    import datasets

    try:
        rows = datasets.load_dataset(
            name, subset, split=config.split, revision=config.revision, streaming=config.streaming
        )
        for number, row in enumerate(rows, start=1):
            yield f"{name}/{subset or 'default'}:{number}", row
    except (OSError, ConnectionError, datasets.exceptions.DatasetsError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"source {config.name!r}: Hub data set {name!r} (split {config.split!r}) cannot be read: {reason}. "
            f"Offline: set path = to a local Parquet, JSONL, JSON or CSV copy, or fill the Hub cache (HF_HOME) first"
        ) from None
