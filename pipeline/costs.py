"""What a run has spent, over all its processes, against the recipe's cost targets: it stops before it goes over."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from pipeline import store
from pipeline.config.guards import CostsConfig
from pipeline.events import Event, RunStopped
from pipeline.rundir import RunPaths, stage_kind
from pipeline.types import StageResult

GB = 1e9


class Meter:
    """Told of every complete stage in the order of work, those of earlier processes too, and asked before each new one."""

    def __init__(self, config: CostsConfig, paths: RunPaths) -> None:
        self.config, self.paths = config, paths
        self.seconds = 0.0
        self._newest: dict[str, float] = {}  # kind → seconds of its newest complete stage
        self._bytes = 0
        self._grown: dict[str, int] = {}  # kind → bytes that its newest stage in this process added

    def complete(self, result: StageResult, *, new: bool) -> None:
        """Count a complete stage of this run; ``new`` when it was done just now."""
        kind = stage_kind(result.key)
        self.seconds += result.seconds
        self._newest[kind] = result.seconds
        if new and self.config.disk_gb is not None:
            self._grown[kind] = folder_bytes(self.paths.directory) - self._bytes

    def check(self, key: str) -> None:
        """RunStopped when the stage would go over the seconds or the disk, by what the last one of its kind took."""
        kind, limit, disk = stage_kind(key), self.config.seconds, self.config.disk_gb
        if limit is not None:
            expected = self._newest.get(kind, 0.0)
            if self.seconds >= limit or self.seconds + expected > limit:
                raise RunStopped(_over("seconds", limit, self.seconds, expected, key, "s", "takes"))
        if disk is not None:
            self._bytes = folder_bytes(self.paths.directory)
            more = self._grown.get(kind, 0)
            if self._bytes + more > disk * GB:
                raise RunStopped(_over("disk_gb", disk, self._bytes / GB, more / GB, key, "GB", "writes"))

    def seconds_left(self) -> float | None:
        """Seconds that the stage at work may take; None is no limit."""
        return None if self.config.seconds is None else self.config.seconds - self.seconds

    def before_sampling(self, key: str, completions: int, max_tokens: int) -> None:
        """RunStopped when completions of the longest length would go over the tokens."""
        limit, most = self.config.tokens, completions * max_tokens
        if limit is not None and self._tokens + most > limit:
            raise RunStopped(Event("costs.tokens", "error", (
                f"costs.tokens = {limit:,}: {self._tokens:,} are sampled, and the next {completions} completions of {key} "
                f"may have {most:,}; raise costs.tokens and the same command continues"
            ), float(self._tokens), float(limit)))  # fmt: skip

    def sampled(self, tokens: int) -> None:
        """Count completion tokens that have just been recorded."""
        if self.config.tokens is not None:
            self._tokens += tokens

    @cached_property
    def _tokens(self) -> int:
        """From the store when first asked, before anything is sampled: shards of stages that were cut off count too."""
        connection = store.connect(self.paths.run_id, root=self.paths.root)
        try:
            query = "SELECT coalesce(sum(completion_length), 0)::BIGINT FROM rollouts WHERE run_id = ?"
            return int(connection.execute(query, [self.paths.run_id]).fetchall()[0][0])
        finally:
            connection.close()


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below a folder; links count as nothing. A file that vanishes meanwhile does not either."""
    total, folders = 0, [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    return total


def _over(field: str, limit: float, spent: float, expected: float, key: str, unit: str, verb: str) -> Event:
    more = f", and {key} {verb} about {expected:.4g} {unit} more" if expected else ""
    return Event(f"costs.{field}", "error", (
        f"costs.{field} = {limit:g}: {spent:.4g} {unit} are spent{more}; raise costs.{field} and the same command continues"
    ), spent, limit)  # fmt: skip
