"""Which files a view over one run or over all runs reads, and which stages' rows in them count.

A child run reads the stages it inherited from its ancestors. Over all runs each row counts once, for the run that
recorded it; where a child graded or credited an ancestor's rollouts again, the first verdict counts (ask the child
alone for its own), so that joining on ``rollout_id`` never doubles a rollout.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.rundir import RunPaths
from pipeline.tablefiles import TableFile, components_of, covering_merged, live_files, merged_pieces

REGRADED = {"rewards": "reward", "advantages": "update"}
"""Tables whose rows speak of rollouts that another stage recorded, and the last word of their own stage's key."""


@dataclass
class Sources:
    """The files of one table: ``whole`` count entirely, ``parts`` only with the rows of some stages.

    ``parts`` maps (stage keys, True to keep only them or False to leave them out) to files.
    """

    whole: list[str] = field(default_factory=list)
    parts: dict[tuple[tuple[str, ...], bool], list[str]] = field(default_factory=dict)

    def add_part(self, path: str, keys: set[str], *, keep: bool) -> None:
        self.parts.setdefault((tuple(sorted(keys)), keep), []).append(path)


class Lineage:
    """The runs below ``root`` that a connection shows: ``run`` with its ancestors, or all."""

    def __init__(self, root: Path, run: str | None) -> None:
        self.root = root
        self.run = RunPaths(root, run) if run is not None else None
        names = [run] if run is not None else _run_names(root)
        self.runs = [RunPaths(root, name) for name in names]
        if self.run is not None:
            while (parent := self.runs[-1].parent) is not None:
                self.runs.append(parent)

    def sources(self, table: str) -> Sources:
        """The files of one table."""
        return self._of_all(table) if self.run is None else self._of_one(table, self.run)

    def components(self) -> list[str]:
        """Every reward component that occurs."""
        return sorted({name for run in self.runs for name in components_of(run)})

    def _of_one(self, table: str, run: RunPaths) -> Sources:
        sources = Sources(whole=[file.path for file in live_files(run.table(table))])
        wanted = set(run.header.get("inherited", ()))
        for ancestor in self.runs[1:]:
            older = set(ancestor.header.get("inherited", ()))
            own = wanted - older
            for file in live_files(ancestor.table(table)):
                _add(sources, file, own)
            wanted &= older
        return sources

    def _of_all(self, table: str) -> Sources:
        sources = Sources()
        for run in self.runs:
            left_out = self._second_verdicts.get((table, run.run_id), set())
            for file in live_files(run.table(table)):
                held = {key for key in left_out if file.covers(key)}
                if not held:
                    sources.whole.append(file.path)
                elif file.part is None:
                    sources.add_part(file.path, held, keep=False)
        return sources

    @cached_property
    def _second_verdicts(self) -> dict[tuple[str, str], set[str]]:
        """(table, child run) → stage keys whose rows grade or credit rollouts that already have a first verdict."""
        found: dict[tuple[str, str], set[str]] = {}
        seen: set[tuple[str, str, str]] = set()
        children = [run for run in self.runs if run.header.get("parent")]
        for child in sorted(children, key=lambda run: (_depth(run), run.run_id)):
            step = str(child.header["resume_from"]).rpartition("/")[0]
            inherited = set(child.header["inherited"])
            if f"{step}/rollout" not in inherited:
                continue
            for table, word in REGRADED.items():
                key = f"{step}/{word}"
                if key in inherited or not _records(child, table, key):
                    continue
                origin = _origin(child, f"{step}/rollout")
                if (origin.run_id, table, key) in seen or _records(origin, table, key):
                    found.setdefault((table, child.run_id), set()).add(key)
                seen.add((origin.run_id, table, key))
        return found

    def headers(self) -> list[dict[str, Any]]:
        """One row a run for the view ``runs``."""
        return [_run_row(run) for run in self.runs]


def _add(sources: Sources, file: TableFile, wanted: set[str]) -> None:
    if file.part is not None:
        if file.key in wanted:
            sources.whole.append(file.path)
        return
    held = {piece.key for piece in merged_pieces(Path(file.path))}
    if held <= wanted:
        sources.whole.append(file.path)
    elif held & wanted:
        sources.add_part(file.path, held & wanted, keep=True)


def _origin(run: RunPaths, key: str) -> RunPaths:
    while key in run.header.get("inherited", ()) and run.parent is not None:
        run = run.parent
    return run


def _depth(run: RunPaths) -> int:
    return 0 if run.parent is None else 1 + _depth(run.parent)


def _records(run: RunPaths, table: str, key: str) -> bool:
    merged = covering_merged(run, table, key)
    if merged is not None:
        return any(piece.key == key for piece in merged_pieces(merged))
    return run.table_part(table, key).is_file()


def _run_names(root: Path) -> list[str]:
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: there is no folder of runs; start one with `grpoflow run`, or name --root")
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.name[0] != "." and os.path.isfile(f"{root}/{e.name}/recipe.json"))


def _run_row(run: RunPaths) -> dict[str, Any]:
    header = run.header
    recipe = header.get("recipe") or {}
    return {
        "run_id": run.run_id,
        "recipe": recipe.get("name"),
        "digest": header.get("digest"),
        "created_at": header.get("created_at"),
        "parent": header.get("parent"),
        "resume_from": header.get("resume_from"),
        "finished": int(run.result_file("evaluate/final").is_file()),
        "settings": json.dumps(recipe, sort_keys=True),
        "versions": json.dumps(header.get("versions") or {}, sort_keys=True),
    }
