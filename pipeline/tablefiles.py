"""Which Parquet file of a run holds which rows, and which files a reader must look at.

A stage writes ``<stage key>--00000.parquet``, ``--00001`` and so on. Compaction merges all parts under a key or a folder
``K`` into one file ``K--merged.parquet`` whose footer lists them. Where that file is, it stands for everything called
``K--…`` or below ``K/``: small files there are dead, and stay a while only for readers that looked before.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow.parquet as pq

from pipeline.rundir import RunPaths

PART_NAME = re.compile(r"(?P<key>.+)--(?:(?P<part>\d{5,9})|merged)\.parquet")
MERGED = "--merged.parquet"
PARTS_KEY = b"grpoflow.parts"
MARKERS = "_components"
"""Folder of the rewards table with an empty file a reward component: its name is known without opening a Parquet file."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file whose rows count. ``part`` None: a merged file, for every stage key that is ``key`` or below it."""

    key: str
    part: int | None
    path: str

    def covers(self, stage_key: str) -> bool:
        """Whether rows of this stage can be in the file."""
        return stage_key == self.key or (self.part is None and stage_key.startswith(self.key + "/"))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start .. start + rows`` of a file: one part of one stage. ``rows`` None is the whole file."""

    key: str
    part: int
    path: Path
    start: int = 0
    rows: int | None = None


def merged_path(paths: RunPaths, table: str, key: str) -> Path:
    """The merged file of a stage key or of a folder of stage keys such as ``round-01``."""
    return paths.table(table) / f"{key}{MERGED}"


def live_files(folder: Path) -> list[TableFile]:
    """The files below a table's folder that together hold every row exactly once.

    Names that begin with a dot are unfinished, ``_components`` holds no rows: neither is looked at.
    """
    found: list[TableFile] = []
    _walk(str(folder), "", found)
    return found


def _walk(folder: str, prefix: str, found: list[TableFile]) -> None:
    # One listing a folder: a merged file missed in it is new, and then its small files are all still there.
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    names = sorted(name for name in names if name[0] not in "._")
    merged = {name.removesuffix(MERGED) for name in names if name.endswith(MERGED)}
    for name in names:
        if name.endswith(".parquet"):
            match = PART_NAME.fullmatch(name)
            if match and (match["part"] is None or match["key"] not in merged):
                part = None if match["part"] is None else int(match["part"])
                found.append(TableFile(prefix + match["key"], part, f"{folder}/{name}"))
        elif name not in merged:
            _walk(f"{folder}/{name}", f"{prefix}{name}/", found)


def pieces_of(file: TableFile) -> list[Piece]:
    """The parts that a file holds, in row order."""
    if file.part is not None:
        return [Piece(file.key, file.part, Path(file.path))]
    return merged_pieces(Path(file.path))


def merged_pieces(path: Path) -> list[Piece]:
    """The parts in a merged file, in row order, from its footer."""
    stamp = path.stat().st_mtime_ns
    return [Piece(key, part, path, start, rows) for key, part, start, rows in _footer(str(path), stamp)]


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
    """The parts of one stage, from the run in the lineage that has them, in order."""
    run = source_run(paths, key)
    merged = covering_merged(run, table, key)
    if merged is not None:
        found = [piece for piece in merged_pieces(merged) if piece.key == key]
    else:
        name = re.compile(re.escape(key.rpartition("/")[2]) + r"--(\d{5,9})\.parquet")
        folder = run.table_part(table, key).parent
        present = os.listdir(folder) if folder.is_dir() else []
        found = [Piece(key, int(m[1]), folder / m[0]) for m in map(name.fullmatch, present) if m]
    return sorted(found, key=lambda piece: piece.part)


def covering_merged(run: RunPaths, table: str, key: str) -> Path | None:
    """The merged file that stands for this stage in its own run, or None."""
    words = key.split("/")
    for count in range(1, len(words) + 1):
        path = merged_path(run, table, "/".join(words[:count]))
        if path.is_file():
            return path
    return None


def components_of(run: RunPaths) -> list[str]:
    """The reward components that this run's rewards have ever had."""
    folder = run.table("rewards") / MARKERS
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def mark_component(run: RunPaths, name: str) -> None:
    """Make a reward component known to readers; done before the rows that have it appear.

    Raises ValueError for a name that differs from a known one by case alone: SQL would take both for one column.
    """
    marker = run.table("rewards") / MARKERS / name
    if marker.is_file():
        return
    for known in components_of(run):
        if known.lower() == name.lower():
            raise ValueError(
                f"reward component {name!r}: this run already has {known!r}, the same name to SQL; rename it"
            )
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
