"""Which files a view over one run or over all runs reads, and which stages' rows in them count.

A child run reads the stages it inherited from its ancestors. Over all runs each row counts once, for the run that
recorded it; where a child graded or credited an ancestor's rollouts again, the first verdict counts (ask the child
alone for its own), so that joining on ``rollout_id`` never doubles a rollout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline.rundir import RUN_ID, RunPaths
from pipeline.schema import SCORED, SCORED_SOURCES
from pipeline.tablefiles import TableFile, components_of, covering_merged, live_files, merged_pieces

REGRADED = {"rewards": "reward", "advantages": "update"}
"""Tables whose rows speak of rollouts that another stage recorded, and the last word of their own stage's key."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a view. ``keys`` None: all its rows count; else only (or, without ``keep``, all but) those stages'."""

    run_id: str
    file: TableFile
    keys: tuple[str, ...] | None = None
    keep: bool = True


class Lineage:
    """The runs below ``root`` that a connection shows: ``run`` with its ancestors, or all."""

    def __init__(self, root: Path, run: str | None) -> None:
        self.root = root
        self.run = RunPaths(root, run) if run is not None else None
        self.runs = [self.run] if self.run is not None else _all_runs(root)
        self.left_out = [damage for run in self.runs if self.run is None and (damage := _damage(run))]
        """Why runs cannot be shown among all: their headers cannot be read."""
        if self.left_out:
            self.runs = [run for run in self.runs if _damage(run) is None]
        self._entries: dict[str, list[Entry]] = {}
        if self.run is not None:
            while (parent := self.runs[-1].parent) is not None:
                if not parent.recipe_file.is_file():
                    raise FileNotFoundError(
                        f"run {self.runs[-1].run_id!r} goes on from run {parent.run_id!r}, which is not in {root}: put it back"
                    )
                self.runs.append(parent)

    def entries(self, table: str) -> list[Entry]:
        """The files of one table, as they were when this was first asked."""
        if table not in self._entries:
            self._entries[table] = self._of_all(table) if self.run is None else self._of_one(table)
        return self._entries[table]

    def split_scored(self) -> tuple[list[Entry], dict[str, list[Entry]]]:
        """Files of the derived table ``scored``, and what is left of its three sources for a join when asked.

        A scored file is used where all rows of its sources count; else (a round that a child shares in part) its rows
        are joined like those of rounds that are not merged yet.
        """
        used: list[Entry] = []
        left: dict[str, list[Entry]] = {table: [] for table in SCORED_SOURCES}
        of_run = {table: _by_run(self.entries(table)) for table in SCORED_SOURCES}
        for run in self.runs:
            mine = {table: of_run[table].get(run.run_id, []) for table in SCORED_SOURCES}
            for file in live_files(run.table(SCORED)):
                rows = {table: [e for e in mine[table] if file.covers(e.file.key)] for table in SCORED_SOURCES}
                if rows["rollouts"] and all(entry.keys is None for entries in rows.values() for entry in entries):
                    used.append(Entry(run.run_id, file))
                    mine = {table: [e for e in mine[table] if e not in rows[table]] for table in SCORED_SOURCES}
            for table in SCORED_SOURCES:
                left[table] += mine[table]
        return used, left

    def components(self) -> list[str]:
        """Every reward component that occurs. Raises ValueError when two differ by case alone: SQL has one column."""
        names = sorted({name for run in self.runs for name in components_of(run)})
        folded: dict[str, str] = {}
        for name in names:
            other = folded.setdefault(name.lower(), name)
            if other != name:
                raise ValueError(
                    f"reward components {other!r} and {name!r} of different runs are one name to SQL: ask one run"
                )
        return names

    def shares(self) -> list[tuple[RunPaths, set[str] | None]]:
        """Each run with the stages that the view takes from it; None is all of them."""
        if self.run is None:
            return [(run, None) for run in self.runs]
        shares: list[tuple[RunPaths, set[str] | None]] = [(self.run, None)]
        wanted = set(self.run.header.get("inherited", ()))
        for ancestor in self.runs[1:]:
            older = set(ancestor.header.get("inherited", ()))
            shares.append((ancestor, wanted - older))
            wanted &= older
        return shares

    def _of_one(self, table: str) -> list[Entry]:
        entries = []
        for run, keys in self.shares():
            for file in live_files(run.table(table)):
                entries += [Entry(run.run_id, file)] if keys is None else _restricted(run.run_id, file, keys)
        return entries

    def _of_all(self, table: str) -> list[Entry]:
        entries = []
        for run in self.runs:
            left_out = self._second_verdicts.get((table, run.run_id), set())
            for file in live_files(run.table(table)):
                held = tuple(sorted(key for key in left_out if file.covers(key)))
                if not held:
                    entries.append(Entry(run.run_id, file))
                elif file.part is None:
                    entries.append(Entry(run.run_id, file, held, keep=False))
        return entries

    @cached_property
    def _second_verdicts(self) -> dict[tuple[str, str], set[str]]:
        """(table, child run) → stage keys whose rows grade or credit rollouts that already have a first verdict."""
        found: dict[tuple[str, str], set[str]] = {}
        seen: set[tuple[str, str, str]] = set()
        children = [run for run in self.runs if run.header.get("parent")]
        for child in sorted(children, key=lambda run: (_depth(run), run.run_id)):
            for table, key in rejudged(child).items():
                if not _records(child, table, key):
                    continue
                origin = _origin(child, key.rpartition("/")[0] + "/rollout")
                first = origin.run_id != child.run_id and _records(origin, table, key)
                if first or (origin.run_id, table, key) in seen:
                    found.setdefault((table, child.run_id), set()).add(key)
                seen.add((origin.run_id, table, key))
        return found


def _by_run(entries: list[Entry]) -> dict[str, list[Entry]]:
    runs: dict[str, list[Entry]] = {}
    for entry in entries:
        runs.setdefault(entry.run_id, []).append(entry)
    return runs


def rejudged(paths: RunPaths) -> dict[str, str]:
    """Table → the one stage key under which a child run grades or credits its parent's rollouts again; often empty."""
    header = paths.header if paths.recipe_file.is_file() else {}
    step = str(header.get("resume_from") or "").rpartition("/")[0]
    inherited = header.get("inherited", ())
    if not header.get("parent") or f"{step}/rollout" not in inherited:
        return {}
    return {table: f"{step}/{word}" for table, word in REGRADED.items() if f"{step}/{word}" not in inherited}


def _restricted(run_id: str, file: TableFile, wanted: set[str]) -> list[Entry]:
    """The file with only the wanted stages: none, one entry, or one entry with a filter."""
    held = {file.key} if file.part is not None else {piece.key for piece in merged_pieces(Path(file.path))}
    if held <= wanted:
        return [Entry(run_id, file)]
    return [Entry(run_id, file, tuple(sorted(held & wanted)))] if held & wanted else []


def _origin(run: RunPaths, key: str) -> RunPaths:
    while key in run.header.get("inherited", ()) and (parent := _parent(run)) is not None:
        run = parent
    return run


def _depth(run: RunPaths) -> int:
    parent = _parent(run)
    return 0 if parent is None else 1 + _depth(parent)


def _parent(run: RunPaths) -> RunPaths | None:
    """The parent, where its folder is still there and its header can be read."""
    parent = run.parent
    return parent if parent is not None and parent.recipe_file.is_file() and _damage(parent) is None else None


def _records(run: RunPaths, table: str, key: str) -> bool:
    merged = covering_merged(run, table, key)
    if merged is not None:
        return any(piece.key == key for piece in merged_pieces(merged))
    return run.table_part(table, key).is_file()


def _all_runs(root: Path) -> list[RunPaths]:
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: there is no folder of runs; start one with `grpoflow run`, or name --root")
    with os.scandir(root) as entries:
        names = [e.name for e in entries if RUN_ID.fullmatch(e.name) and os.path.isfile(f"{e.path}/recipe.json")]
    return [RunPaths(root, name) for name in sorted(names)]


def _damage(run: RunPaths) -> ValueError | None:
    """Why the run's header cannot be read, or None."""
    try:
        run.header  # noqa: B018 - read here once, kept by the run
    except ValueError as error:
        return error
    return None
