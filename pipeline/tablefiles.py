"""Which Parquet file of a run holds which rows, and which files a reader must look at.

A stage writes ``<stage key>--00000.parquet``, ``--00001`` and so on. At the end of a round these small files are merged
into ``round-01/merged--00000.parquet``, whose footer lists the parts it holds. A part that a merged file lists is read
from there; its small file stays for a while for readers that looked before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pyarrow.parquet as pq

from pipeline.rundir import RunPaths

PART_NAME = re.compile(r"(?P<key>.+)--(?P<part>\d{5})\.parquet")
MERGED = "merged"
PARTS_KEY = b"grpoflow.parts"


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start .. start + rows`` of a file: one part of one stage. ``rows`` None is the whole file."""

    key: str
    part: int
    path: Path
    start: int = 0
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of one table of one run: small ones by (stage key, part), and merged ones."""

    small: dict[tuple[str, int], Path] = field(default_factory=dict)
    merged: list[Path] = field(default_factory=list)

    def live(self) -> list[Path]:
        """The files that together hold every row exactly once."""
        return sorted(self.live_small().values()) + sorted(self.merged)

    def live_small(self) -> dict[tuple[str, int], Path]:
        """The small files whose rows are in no merged file."""
        if not self.merged or not self.small:
            return self.small
        folders = {path.parent for path in self.merged}
        below = [item for item in self.small if any(f in self.small[item].parents for f in folders)]
        held = {(p.key, p.part) for path in self.merged for p in merged_pieces(path)} if below else set()
        return {item: path for item, path in self.small.items() if item not in held}

    def pieces(self) -> list[Piece]:
        """Every part with its place, ordered by stage key and part."""
        found = [Piece(key, part, path) for (key, part), path in self.live_small().items()]
        found += [piece for path in self.merged for piece in merged_pieces(path)]
        return sorted(found, key=lambda piece: (piece.key, piece.part))


def list_table(paths: RunPaths, table: str) -> TableFiles:
    """The files of one table of this run alone, ancestors not included."""
    return scan(paths.table(table))


def scan(folder: Path) -> TableFiles:
    """The files below a table's folder. Names that begin with a dot are not finished and are not seen."""
    files = TableFiles()
    base = str(folder)
    for name in _walk(base, ""):
        match = PART_NAME.fullmatch(name)
        if match is None:
            continue
        path = Path(f"{base}/{name}")
        if match["key"].rpartition("/")[2] == MERGED:
            files.merged.append(path)
        else:
            files.small[match["key"], int(match["part"])] = path
    return files


def _walk(folder: str, prefix: str) -> Iterator[str]:
    # A folder's own files come before its subfolders': a merged file is seen before the small files it replaces.
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    subfolders = []
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.name.endswith(".parquet"):
            yield prefix + entry.name
        elif entry.is_dir():
            subfolders.append(entry.name)
    for name in subfolders:
        yield from _walk(f"{folder}/{name}", f"{prefix}{name}/")


def merged_pieces(path: Path) -> list[Piece]:
    """The parts in a merged file, in row order, from its footer."""
    status = path.stat()
    return [Piece(key, part, path, start, rows) for key, part, start, rows in _footer(str(path), status.st_mtime_ns)]


@lru_cache(maxsize=4096)
def _footer(path: str, _mtime: int) -> tuple[tuple[str, int, int, int], ...]:
    metadata = pq.read_metadata(path).metadata or {}
    start, found = 0, []
    for key, part, rows in json.loads(metadata[PARTS_KEY]):
        found.append((key, part, start, rows))
        start += rows
    return tuple(found)


def source_run(paths: RunPaths, key: str) -> RunPaths:
    """The run in the lineage whose tables hold this stage's rows: this one, or the ancestor it was inherited from."""
    run = paths
    while run.recipe_file.is_file() and key in run.header.get("inherited", ()):
        parent = run.parent
        if parent is None:
            break
        run = parent
    return run


def find_pieces(paths: RunPaths, table: str, key: str) -> list[Piece]:
    """The parts of one stage, from the run in the lineage that has them."""
    run = source_run(paths, key)
    direct = [p for p in sorted(run.table_part(table, key).parent.glob("*.parquet")) if _is_part(p, key)]
    found = {int(path.stem[-5:]): Piece(key, int(path.stem[-5:]), path) for path in direct}
    for path in _merged_above(run, table, key):
        found.update({piece.part: piece for piece in merged_pieces(path) if piece.key == key})
    return [found[part] for part in sorted(found)]


def _is_part(path: Path, key: str) -> bool:
    return re.fullmatch(re.escape(key.rpartition("/")[2]) + r"--\d{5}\.parquet", path.name) is not None


def _merged_above(run: RunPaths, table: str, key: str) -> list[Path]:
    base = run.table(table)
    folders = [base, *(base / "/".join(key.split("/")[:n]) for n in range(1, key.count("/") + 1))]
    return [path for folder in folders for path in sorted(folder.glob(f"{MERGED}--?????.parquet"))]
