"""Many small files into one, without a moment in which a reader sees a row twice or not at all.

The merged file appears whole by one rename, and from then on stands for its small files (``pipeline.tablefiles``).
Those are deleted only after a grace time, so that a reader who listed the folder before can still open them.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.derive import write_scored
from pipeline.parquet import read_physical, write_stream
from pipeline.rows import component_names
from pipeline.rundir import RunPaths
from pipeline.schema import TABLES, physical_schema
from pipeline.tablefiles import MERGED, PARTS_KEY, Piece, TableFile, live_files, merged_path

logger = logging.getLogger(__name__)
GRACE = 600.0
"""Seconds for which merged small files stay, for readers that looked before."""


def compact(paths: RunPaths, round_: int | None = None, *, grace: float = GRACE) -> list[Path]:
    """Merge a finished round's files into one a table (None: those of each finished stage outside rounds).

    Returns the merged files written. Calling it again, or after a crash, goes on where it was. Raises ValueError when
    the round is not finished: a merged round takes no more rows.
    """
    written = []
    if round_ is not None:
        folder = f"round-{round_:02d}"
        if paths.owner(f"{folder}/refresh") is None:
            raise ValueError(
                f"run {paths.run_id}: {folder} cannot be merged before its stage {folder}/refresh is complete"
            )
        for table in TABLES:
            written += _merge(paths, table, folder)
        written += write_scored(paths, folder)
    else:
        for key in sorted(_finished_keys(paths)):
            for table in TABLES:
                written += _merge(paths, table, key)
            written += write_scored(paths, key)
    clear_merged(paths, grace)
    return written


def clear_merged(paths: RunPaths, grace: float = GRACE) -> int:
    """Delete the small files that merged files have stood for since at least ``grace`` seconds; returns their number."""
    cleared = 0
    for table in TABLES:
        for merged in paths.table(table).rglob(f"*{MERGED}"):
            if time.time() - merged.stat().st_mtime < grace:
                continue
            base = merged.with_name(merged.name.removesuffix(MERGED))
            dead = [p for p in base.parent.glob(f"{base.name}--*.parquet") if p != merged]
            for path in dead:
                path.unlink()
            if base.is_dir():
                dead += base.rglob("*.parquet")
                shutil.rmtree(base)
            cleared += len(dead)
    return cleared


def _finished_keys(paths: RunPaths) -> set[str]:
    """Keys of finished stages outside rounds that left rows in a table."""
    keys = {file.key for table in TABLES for file in live_files(paths.table(table))}
    return {key for key in keys if not key.startswith("round-") and paths.result_file(key).is_file()}


def _merge(paths: RunPaths, table: str, key: str) -> list[Path]:
    target = merged_path(paths, table, key)
    covering = TableFile(key, None, "")
    small = [f for f in live_files(paths.table(table)) if covering.covers(f.key) and Path(f.path) != target]
    if len(small) < 2 or target.is_file():
        return []
    files = sorted(small, key=lambda file: (file.key, file.part))
    pieces = [Piece(f.key, f.part or 0, Path(f.path)) for f in files]
    schemas = [_schema_of(piece) for piece in pieces]
    names = tuple(sorted({name for s in schemas for name in component_names(s.names)})) if table == "rewards" else ()
    schema = _as_nullable(physical_schema(table, names), schemas)
    held = json.dumps([(p.key, p.part, _rows_of(p)) for p in pieces])
    write_stream(_upgraded(table, pieces, schema), schema, target, table, {PARTS_KEY: held.encode()})
    logger.info("merged %d files of %s into %s", len(pieces), table, target)
    return [target]


def _schema_of(piece: Piece) -> pa.Schema:
    return pq.read_schema(piece.path)


def _rows_of(piece: Piece) -> int:
    return pq.read_metadata(piece.path).num_rows


def _as_nullable(schema: pa.Schema, sources: list[pa.Schema]) -> pa.Schema:
    """The schema, with the columns that an older file lacks nullable."""
    fields = [f.with_nullable(f.nullable or any(f.name not in s.names for s in sources)) for f in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _upgraded(table: str, pieces: list[Piece], schema: pa.Schema) -> Iterator[pa.Table]:
    for piece in pieces:
        data = read_physical(table, piece)
        arrays = [
            data.column(f.name).cast(f.type) if f.name in data.column_names else pa.nulls(data.num_rows, f.type)
            for f in schema
        ]
        yield pa.table(arrays, schema=schema)
