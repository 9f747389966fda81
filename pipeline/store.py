"""The tables of a run: atomic appends, and reads that follow the run's lineage.

Parquet is the truth. A file appears whole, under its final name, or not at all; it is never changed afterwards.
``connect`` opens the same rows to SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.ask import sql
from pipeline.compaction import compact
from pipeline.parquet import read_piece, write_parquet
from pipeline.rows import component_names, logical, normalise
from pipeline.rundir import RunPaths
from pipeline.schema import arrow_schema
from pipeline.tablefiles import Piece, covering_merged, find_pieces, live_files, mark_component, pieces_of, source_run
from pipeline.views import connect

__all__ = ["append", "compact", "connect", "has", "parts", "read", "sql"]


PARTS = 10**9
"""Parts that a stage may have: file names have five to nine digits for it."""


def append(
    paths: RunPaths,
    table: str,
    key: str,
    rows: Sequence[Mapping[str, Any]] | Sequence[Any] | pa.Table,
    *,
    part: int = 0,
) -> Path:
    """Record the rows of one part of a stage and return their file; they are on the disk when it returns.

    ``rows`` are mappings, dataclasses, or an Arrow table with the table's columns; a nullable column that a mapping
    leaves out is NULL. Raises ValueError for a column too many, one missing or a value of the wrong type, and
    FileExistsError when the part is there with other content; the same content again changes nothing.
    """
    if not 0 <= part < PARTS:
        raise ValueError(f"part {part} of {key!r}: expected 0 to {PARTS - 1}")
    data = normalise(table, key, rows)
    target = paths.table_part(table, key, part)
    existing = [piece for piece in find_pieces(paths, table, key) if piece.part == part]
    if existing:
        if _same(read_piece(table, existing[0]), logical(table, data)):
            return existing[0].path
        raise FileExistsError(
            f"{existing[0].path}: part {part} of {key!r} is already recorded in {table} with other rows, and recorded "
            f"rows are never changed; ask has(paths, {table!r}, {key!r}, {part}) first, or record another part"
        )
    if (merged := covering_merged(paths, table, key)) is not None:
        raise FileExistsError(f"{merged}: {key!r} is complete and merged, part {part} of {table} would not be seen")
    if table == "rewards":
        for name in component_names(data.column_names):
            mark_component(paths, name)
    write_parquet(data, target, table)
    return target


def has(paths: RunPaths, table: str, key: str, part: int | None = None) -> bool:
    """Whether this part (None: any part) of a stage is recorded, here or in the ancestor it was inherited from."""
    found = parts(paths, table, key)
    return bool(found) if part is None else part in found


def parts(paths: RunPaths, table: str, key: str) -> list[int]:
    """The parts of a stage that are recorded, in order."""
    return [piece.part for piece in find_pieces(paths, table, key)]


def read(paths: RunPaths, table: str, key: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a stage (from the run in the lineage that has them), or all own and inherited rows of the table.

    Rows come in the order in which they were appended, stages in the order of their keys. No rows are an empty table.
    """
    pieces = find_pieces(paths, table, key) if key is not None else _lineage_pieces(paths, table)
    empty = logical(table, arrow_schema(table).empty_table(), columns)
    return pa.concat_tables([empty, *(read_piece(table, piece, columns) for piece in pieces)])


def _lineage_pieces(paths: RunPaths, table: str) -> list[Piece]:
    pieces = {}
    run: RunPaths | None = paths
    while run is not None:
        for file in live_files(run.table(table)):
            for piece in pieces_of(file):
                if source_run(paths, piece.key) == run:
                    pieces[piece.key, piece.part] = piece
        run = run.parent if run.recipe_file.is_file() else None
    return [pieces[item] for item in sorted(pieces)]


def _same(recorded: pa.Table, new: pa.Table) -> bool:
    # repr: unlike Table.equals, two NaN are the same.
    return recorded.equals(new) or repr(recorded.to_pylist()) == repr(new.to_pylist())
