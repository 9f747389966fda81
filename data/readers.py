"""Rows of local files: JSONL, JSON, CSV and Parquet; files, folders and globs. Streaming, except JSON arrays."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
Row = Mapping[str, Any]


def find_files(path: str) -> list[Path]:
    """The files that a path, folder or glob names, sorted; ValueError when there are none or of another kind."""
    here = Path(path).expanduser()
    if here.is_dir():
        files = sorted(file for file in here.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    elif here.is_file():
        files = [here]
    else:
        files = sorted(Path(name) for name in glob.glob(str(here), recursive=True) if Path(name).is_file())
    if not files:
        raise ValueError(
            f"{path}: no such file, or no file matches; expected {', '.join(SUFFIXES)}, a folder or a glob"
        )
    wrong = [file for file in files if file.suffix not in SUFFIXES]
    if wrong:
        raise ValueError(f"{wrong[0]}: unknown kind of file {wrong[0].suffix!r}; expected one of {', '.join(SUFFIXES)}")
    return files


def read_rows(path: str) -> Iterator[tuple[str, Row]]:
    """(where, row) of every row, where is ``file:line`` for text files and ``file:row`` for Parquet, from 1.

    Raises ValueError with the file and line for an empty file, text that is not UTF-8, and broken JSON or CSV.
    """
    for file in find_files(path):
        empty = True
        for number, row in _read_file(file):
            empty = False
            yield f"{file}:{number}", row
        if empty:
            raise ValueError(f"{file}: has no rows; remove it from the recipe or fill it")


def _read_file(file: Path) -> Iterator[tuple[int, Row]]:
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    if file.suffix == ".csv":
        return _csv_rows(file)
    return _json_rows(file) if file.suffix == ".json" else _jsonl_rows(file)


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}); convert it, for example with iconv"
        ) from None


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Row]]:
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            line = _decode(raw, f"{file}:{number}").strip()
            if line:
                yield number, _parse(line, f"{file}:{number}")


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON nested too deeply to read") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with one value a column, got {type(row).__name__}")
    return row


def _json_rows(file: Path) -> Iterator[tuple[int, Row]]:
    text = _decode(file.read_bytes(), str(file))
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file}:{error.lineno}: not valid JSON ({error.msg}); a file with one object a line must end in .jsonl"
        ) from None
    except RecursionError:
        raise ValueError(f"{file}: JSON nested too deeply to read") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file}: expected a JSON array of objects, got {type(rows).__name__}")
    yield from enumerate(rows, start=1)


def _csv_rows(file: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(1 << 30)
    with file.open("rb") as stream:
        lines = (_decode(raw, f"{file}:{number}") for number, raw in enumerate(stream, start=1))
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(
                        f"{file}:{reader.line_num}: expected {len(reader.fieldnames or ())} fields as in the header; "
                        f"quote fields that hold commas or line breaks"
                    )
                yield reader.line_num, row
        except csv.Error as error:
            raise ValueError(f"{file}:{reader.line_num}: not valid CSV ({error})") from None


def _parquet_rows(file: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        reader = pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file ({str(error).splitlines()[0]})") from None
    with reader:
        number = 0
        for batch in reader.iter_batches(batch_size=4096):
            for row in batch.to_pylist():
                number += 1
                yield number, row
