"""Parquet files of the store: written whole or not at all, read by part in this version's types."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.rows import logical
from pipeline.rundir import sync_folder, whole_or_nothing
from pipeline.schema import COMPONENT_PREFIX, STAGE_COLUMN, arrow_schema, dictionary_columns, file_version
from pipeline.tablefiles import Piece

ROW_GROUP = 122_880
"""Most rows in a Parquet row group: DuckDB's own unit of parallel work."""
ROW_GROUP_BYTES = 64 << 20
"""Most bytes of a row group before compression: what a writer and each thread of a reader hold in memory."""


def write_parquet(data: pa.Table, target: Path, table: str) -> None:
    """Write a table so that readers see the whole of the file or nothing."""
    write_stream([data], data.schema, target, table)


def write_stream(
    tables: Iterable[pa.Table], schema: pa.Schema, target: Path, table: str, footer: Mapping[bytes, bytes] | None = None
) -> None:
    """Write tables into one file that appears whole: hidden name, fsync, rename, fsync of the folder.

    ``tables`` are consumed one at a time and gathered into row groups; ``footer`` is added to the file's metadata.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    present = set(schema.names)
    dictionaries: Any = [name for name in dictionary_columns(table) if name.split(".")[0] in present]
    with whole_or_nothing(partial, target):
        with partial.open("wb") as file:
            with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=dictionaries) as writer:
                for group in _row_groups(tables):
                    writer.write_table(group, row_group_size=max(1, group.num_rows))
                writer.add_key_value_metadata(dict(footer or {}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    sync_folder(target.parent)


def read_piece(table: str, piece: Piece, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one part, with the columns of the table (or some of them) in this version's types."""
    data = read_physical(table, piece, columns)
    return logical(table, data, columns)


def read_physical(table: str, piece: Piece, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one part as the file holds them. Raises ValueError for a file that is damaged or too new."""
    try:
        with pq.ParquetFile(piece.path) as file:
            file_version(file.schema_arrow.metadata, str(piece.path))
            physical = None if columns is None else [n for n in file.schema_arrow.names if _wanted(table, n, columns)]
            if piece.rows is None:
                return file.read(columns=physical)
            groups, start = _groups_of(file, piece)
            return file.read_row_groups(groups, columns=physical).slice(piece.start - start, piece.rows)
    except (pa.ArrowInvalid, OSError) as error:
        if not piece.path.exists():
            raise
        raise ValueError(
            f"{piece.path}: not a readable Parquet file ({error}); put a whole copy back, or branch off before it with "
            f"--resume-from {piece.key}"
        ) from None


def _groups_of(file: pq.ParquetFile, piece: Piece) -> tuple[list[int], int]:
    """The row groups that hold the piece, and the row that the first of them begins with."""
    groups: list[int] = []
    begin = row = 0
    for number in range(file.num_row_groups):
        count = file.metadata.row_group(number).num_rows
        if row + count > piece.start and row < piece.start + (piece.rows or 0):
            begin = begin if groups else row
            groups.append(number)
        row += count
    return groups, begin if groups else piece.start


def _row_groups(tables: Iterable[pa.Table]) -> Iterable[pa.Table]:
    waiting: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        per_row = max(1, table.nbytes // max(1, table.num_rows))
        most = max(1, min(ROW_GROUP, ROW_GROUP_BYTES // per_row))
        for start in range(0, max(1, table.num_rows), most):
            piece = table.slice(start, most)
            if waiting and (rows + piece.num_rows > ROW_GROUP or size + piece.num_rows * per_row > ROW_GROUP_BYTES):
                yield pa.concat_tables(waiting)
                waiting, rows, size = [], 0, 0
            waiting.append(piece)
            rows += piece.num_rows
            size += piece.num_rows * per_row
    if waiting:
        yield pa.concat_tables(waiting)


def _wanted(table: str, name: str, columns: Sequence[str]) -> bool:
    if name == STAGE_COLUMN or name in columns:
        return name in columns
    declared = arrow_schema(table).names
    return "components" in columns and name.startswith(COMPONENT_PREFIX) and name not in declared
