"""The rows of an answer as a table for people, CSV, JSON, JSON lines or Parquet; files appear whole or not at all."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

FORMATS = ("table", "csv", "json", "jsonl", "parquet")
SHOWN, WIDTH = 100, 60
"""Rows of a table for people, and characters of a cell."""


def write_result_rows(rows: pa.RecordBatchReader, format_: str, out: Path | None, root: Path) -> int:
    """Write the rows to standard output or to a file; returns their number.

    ``--out`` with the default format takes the format from the file's name. Raises ValueError for a format that is
    unknown or contradicts the name, and for a file inside the folder of runs.
    """
    chosen = chosen_format(format_, out)
    if out is None:
        return _write_text(rows, chosen, sys.stdout)
    if out.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"--out {out}: is inside the folder of runs {root}, which is only read; name a file elsewhere")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: folder {out.parent} does not exist; make it first")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        if chosen == "parquet":
            count = _write_parquet(rows, partial)
        else:
            with partial.open("w", encoding="utf-8", newline="") as file:
                count = _write_text(rows, chosen, file)
        os.replace(partial, out)
        return count
    finally:
        partial.unlink(missing_ok=True)


def chosen_format(format_: str, out: Path | None) -> str:
    """The format, from ``--format`` or else from the name of ``--out``."""
    if format_ not in FORMATS:
        raise ValueError(f"--format {format_}: expected one of {', '.join(FORMATS)}")
    if out is None:
        if format_ == "parquet":
            raise ValueError("--format parquet: is not text; name a file with --out FILE.parquet")
        return format_
    named = out.suffix.removeprefix(".")
    if named in FORMATS and format_ not in ("table", named):
        raise ValueError(f"--out {out} and --format {format_} contradict each other; change one of them")
    return named if named in FORMATS and format_ == "table" else format_


def _write_parquet(rows: pa.RecordBatchReader, file: Path) -> int:
    count = 0
    with pq.ParquetWriter(file, rows.schema, compression="zstd") as writer:
        for batch in rows:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _write_text(rows: pa.RecordBatchReader, format_: str, file: IO[str]) -> int:
    if format_ == "table":
        return _write_table(rows, file)
    if format_ == "csv":
        return _write_csv(rows, file)
    return _write_json(rows, file, lines=format_ == "jsonl")


def _write_csv(rows: pa.RecordBatchReader, file: IO[str]) -> int:
    writer, count = csv.writer(file, lineterminator="\n"), 0
    writer.writerow(rows.schema.names)
    for row in _rows(rows):
        writer.writerow([_csv_cell(value) for value in row])
        count += 1
    return count


def _write_json(rows: pa.RecordBatchReader, file: IO[str], *, lines: bool) -> int:
    """One object a line; as an array unless ``lines``."""
    names = rows.schema.names
    before, between, after = ("", "\n", "\n") if lines else ("[\n", ",\n", "\n]\n")
    count = 0
    for row in _rows(rows):
        file.write(between if count else before)
        file.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, allow_nan=False))
        count += 1
    file.write(after if count else "" if lines else "[]\n")
    return count


def _write_table(rows: pa.RecordBatchReader, file: IO[str]) -> int:
    shown, total = [[str(name) for name in rows.schema.names]], 0
    for row in _rows(rows):
        total += 1
        if total <= SHOWN:
            shown.append([_table_cell(value) for value in row])
    widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))]
    for number, row in enumerate(shown):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=file)
        if number == 0:
            print("  ".join("-" * width for width in widths), file=file)
    more = f", the first {SHOWN} shown: --format csv or --out FILE gives all" if total > SHOWN else ""
    print(f"({total} row{'' if total == 1 else 's'}{more})", file=file)
    return total


def _rows(rows: pa.RecordBatchReader) -> Iterator[list[Any]]:
    for batch in rows:
        columns = [[_plain(value) for value in column.to_pylist(maps_as_pydicts="strict")] for column in batch.columns]
        yield from (list(row) for row in zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    """The value as JSON has it: what JSON lacks becomes text, and not-a-number becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _csv_cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def _table_cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    text = " ".join(str(_csv_cell(value)).split())
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
