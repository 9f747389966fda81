"""A run on disk: the only place that builds a file name, takes the run's lock, and says what is complete.

A stage is complete when ``stages/<key>/result.json`` exists; it is written last. A child run (``--resume-from``) reads
the stages before its resume point from its parent by reference.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config import Recipe
from pipeline.types import StageResult

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, quota or file-size limit that takes no more: the same command continues once there is space."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class RunPaths:
    """Names of everything in ``root/<run_id>/``."""

    root: Path
    run_id: str

    def __post_init__(self) -> None:
        if not RUN_ID.fullmatch(self.run_id):
            raise ValueError(
                f"run id {self.run_id!r}: expected letters, digits, '.', '_' and '-' (at most 100, not starting with a "
                f"sign), for example embedded-1"
            )

    @property
    def directory(self) -> Path:
        return self.root / self.run_id

    @property
    def recipe_file(self) -> Path:
        return self.directory / "recipe.json"

    @property
    def lock_file(self) -> Path:
        return self.directory / ".lock"

    @property
    def log_file(self) -> Path:
        return self.directory / "run.log"

    def stage(self, key: str) -> Path:
        return self.directory / "stages" / key

    def result_file(self, key: str) -> Path:
        return self.stage(key) / "result.json"

    def checkpoint(self, name: str) -> Path:
        return self.directory / "checkpoints" / name

    def table(self, table: str) -> Path:
        return self.directory / "tables" / table

    def table_part(self, table: str, key: str, part: int = 0) -> Path:
        """One Parquet file of a stage; the same (table, key, part) is the same name in every attempt."""
        return self.table(table) / f"{key}--{part:05d}.parquet"

    def report(self, name: str) -> Path:
        return self.directory / "reports" / f"{name}.html"

    def tracker(self, name: str) -> Path:
        return self.directory / "trackers" / name

    # -- lineage ------------------------------------------------------------------------------------------------

    @cached_property
    def header(self) -> dict[str, Any]:
        """``recipe.json``: recipe, digest, versions, and for a child run its parent and resume_from."""
        try:
            return dict(json.loads(self.recipe_file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.recipe_file}: is damaged ({error}); put it back, or move the run away") from None

    @property
    def parent(self) -> RunPaths | None:
        name = self.header.get("parent")
        return RunPaths(self.root, name) if name else None

    def owner(self, key: str) -> RunPaths | None:
        """The run in this run's lineage that completed this stage, or None."""
        if self.result_file(key).is_file():
            return self
        inherited = self.header.get("inherited", ()) if self.recipe_file.is_file() else ()
        return self.parent.owner(key) if key in inherited and self.parent else None

    def find_checkpoint(self, name: str) -> Path:
        """The checkpoint's folder here, or in the ancestor whose stage that made it is inherited."""
        maker = checkpoint_maker(name)  # a name of another form could lead elsewhere
        if self.checkpoint(name).is_dir():
            return self.checkpoint(name)
        if self.recipe_file.is_file() and self.parent and maker in self.header.get("inherited", ()):
            return self.parent.find_checkpoint(name)
        raise FileNotFoundError(f"run {self.run_id}: checkpoint {name!r} is missing; stage {maker} makes it")


def checkpoint_maker(name: str) -> str:
    """The stage that writes a checkpoint: ``round-01-step-0010`` is ``round-01/step-0010/update``'s."""
    fixed = {
        "base": "select", "warm-start": "sft", "reward-model-00": "reward_model",
        "process-model-00": "process_model", "final": "regenerate",
    }  # fmt: skip
    if name in fixed:
        return fixed[name]
    if match := re.fullmatch(r"(round-\d+)-(step-\d+)", name):
        return f"{match[1]}/{match[2]}/update"
    if match := re.fullmatch(r"(?:reward-model|process-model|round)-(\d+)", name):
        return f"round-{match[1]}/refresh"
    raise ValueError(f"checkpoint name {name!r}: no stage writes a checkpoint of that name")


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader or a crash sees the whole of it or none of it; it is on the disk on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with whole_or_nothing(partial, path):
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)


@contextmanager
def whole_or_nothing(partial: Path, path: Path) -> Iterator[None]:
    """Take the unfinished file away when writing it fails, so that a full disk gets its space back.

    An OSError names the file that was to be.
    """
    try:
        yield
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno is None:  # of Arrow
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_result(paths: RunPaths, key: str) -> StageResult | None:
    """The result of a complete stage (here or inherited), or None when it has to run."""
    owner = paths.owner(key)
    if owner is None:
        return None
    file = owner.result_file(key)
    try:
        return StageResult(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: is damaged ({error}); delete it, and the run does what is missing again") from None


def write_result(paths: RunPaths, result: StageResult) -> None:
    """Mark a stage complete. Everything it names must already be on disk."""
    write_atomic(paths.result_file(result.key), json.dumps(asdict(result), indent=1, sort_keys=True, allow_nan=False))


@contextmanager
def locked(paths: RunPaths) -> Iterator[None]:
    """Hold the run's kernel lock; BlockingIOError names the holder. A dead holder does not block: the kernel lets go."""
    paths.directory.mkdir(parents=True, exist_ok=True)
    with paths.lock_file.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise BlockingIOError(
                f"run {paths.run_id!r} is being worked on by {holder}: wait for it, stop it, or choose another --run-id"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def stage_keys(recipe: Recipe) -> list[str]:
    """Every stage key of the recipe's run, in the order of work."""
    keys = ["select", "sft"]
    if recipe.has_reward_model:
        keys.append("reward_model")
    if recipe.has_process_model:
        keys.append("process_model")
    keys.append("evaluate/warm-start")
    if recipe.data.curriculum.probe_samples:
        keys.append("probe")
    for round_ in range(1, recipe.grpo.rounds + 1):
        for step in range(1, recipe.grpo.steps + 1):
            keys += [f"{step_key(round_, step)}/{stage}" for stage in ("rollout", "reward", "update")]
        keys += [f"round-{round_:02d}/refresh", f"evaluate/round-{round_:02d}"]
    return [*keys, "reject", "regenerate", "evaluate/final"]


def step_key(round_: int, step: int) -> str:
    """``round-01/step-0003``."""
    return f"round-{round_:02d}/step-{step:04d}"


def stage_kind(key: str) -> str:
    """ "rollout" of ``round-01/step-0003/rollout``, "evaluate" of ``evaluate/final``."""
    parts = key.split("/")
    return parts[-1] if parts[0].startswith("round-") else parts[0]


@dataclass(frozen=True)
class StageContext:
    """What every stage is given: the recipe, the run's paths, its own key, and where to tell its progress.

    ``tell`` takes an Event for the store and for who watches the run; ``meter`` (pipeline.costs) counts what is sampled.
    """

    recipe: Recipe
    paths: RunPaths
    key: str
    progress: Any = None
    tell: Any = None
    meter: Any = None

    def seed(self, *parts: str | int) -> int:
        """A seed of this run and stage."""
        from pipeline.seeds import derive_seed

        return derive_seed(self.recipe.seed, self.key, *parts)
