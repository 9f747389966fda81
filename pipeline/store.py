"""The tables of a run: atomic appends, and reads that follow the run's lineage.

Parquet is the truth. A file appears whole, under its final name, or not at all; it is never changed afterwards.
``connect`` opens the same rows to SQL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.rows import logical, normalise
from pipeline.rundir import RunPaths
from pipeline.schema import COMPONENT_PREFIX, STAGE_COLUMN, arrow_schema, dictionary_columns, file_version
from pipeline.tablefiles import Piece, find_pieces, list_table, source_run
from pipeline.views import connect

__all__ = ["append", "connect", "has", "parts", "read"]

logger = logging.getLogger(__name__)
ROW_GROUP = 122_880
"""Rows in a Parquet row group: DuckDB's own unit of parallel work."""


def append(
    paths: RunPaths, table: str, key: str, rows: Sequence[Mapping[str, Any]] | Sequence[Any] | pa.Table, *, part: int = 0
) -> Path:
    """Record the rows of one part of a stage and return their file; they are on the disk when it returns.

    ``rows`` are mappings, dataclasses, or an Arrow table with the table's columns; a nullable column that a mapping
    leaves out is NULL. Raises ValueError for a column too many, one missing or a value of the wrong type, and
    FileExistsError when the part is there with other content; the same content again changes nothing.
    """
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
    write_parquet(data, target, table)
    return target


def has(paths: RunPaths, table: str, key: str, part: int = 0) -> bool:
    """Whether this part of a stage is recorded, here or in the ancestor that the stage was inherited from."""
    return part in parts(paths, table, key)


def parts(paths: RunPaths, table: str, key: str) -> list[int]:
    """The parts of a stage that are recorded, in order."""
    return [piece.part for piece in find_pieces(paths, table, key)]


def read(paths: RunPaths, table: str, key: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a stage (from the run in the lineage that has them), or all own and inherited rows of the table.

    Rows come in the order in which they were appended, stages in the order of their keys. No rows are an empty table.
    """
    pieces = find_pieces(paths, table, key) if key is not None else _lineage_pieces(paths, table)
    wanted = list(columns) if columns is not None else arrow_schema(table).names
    empty = arrow_schema(table).empty_table().select(wanted)
    return pa.concat_tables([empty, *(read_piece(table, piece, wanted) for piece in pieces)])


def read_piece(table: str, piece: Piece, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one part, with the columns of the table (or some of them) in this version's types."""
    try:
        with pq.ParquetFile(piece.path) as file:
            file_version(file.schema_arrow.metadata, str(piece.path))
            physical = [name for name in file.schema_arrow.names if _wanted(table, name, columns)]
            data = file.read(columns=physical)
    except (pa.ArrowInvalid, OSError) as error:
        if not piece.path.exists():
            raise
        raise ValueError(
            f"{piece.path}: not a readable Parquet file ({error}); move it away and run the stage {piece.key} again"
        ) from None
    if piece.rows is not None:
        data = data.slice(piece.start, piece.rows)
    return logical(table, data, columns)


def write_parquet(data: pa.Table, target: Path, table: str) -> None:
    """Write a file so that readers see the whole of it or nothing: hidden name, fsync, rename, fsync of the folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    present = set(data.column_names)
    dictionaries = [name for name in dictionary_columns(table) if name.split(".")[0] in present]
    try:
        with partial.open("wb") as file:
            pq.write_table(data, file, compression="zstd", use_dictionary=dictionaries, row_group_size=ROW_GROUP)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wanted(table: str, name: str, columns: Sequence[str] | None) -> bool:
    if name == STAGE_COLUMN:
        return False
    if columns is None or name in columns:
        return True
    declared = arrow_schema(table).names
    return "components" in columns and name.startswith(COMPONENT_PREFIX) and name not in declared


def _lineage_pieces(paths: RunPaths, table: str) -> list[Piece]:
    pieces = {}
    run: RunPaths | None = paths
    while run is not None:
        for piece in list_table(run, table).pieces():
            if source_run(paths, piece.key) == run:
                pieces[piece.key, piece.part] = piece
        run = run.parent if run.recipe_file.is_file() else None
    return [pieces[item] for item in sorted(pieces)]


def _same(recorded: pa.Table, new: pa.Table) -> bool:
    # repr: unlike Table.equals, two NaN are the same.
    return recorded.equals(new) or repr(recorded.to_pylist()) == repr(new.to_pylist())
