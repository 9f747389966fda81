"""Checkpoints: written under another name, checksummed, synced, renamed; a damaged one is never loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.protocols import Learner
from pipeline.rundir import NO_SPACE, RunPaths, StageContext, sync_folder, write_atomic

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@contextmanager
def new_checkpoint(paths: RunPaths, name: str) -> Iterator[Path]:
    """A folder to write into that becomes ``checkpoints/<name>`` at the end, whole or not at all.

    A damaged checkpoint of that name gives way only once its successor is whole.
    """
    final = paths.checkpoint(name)
    partial = final.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with named_when_full(final):
            yield partial
            seal(partial)
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a disk that is full gets its space back
        raise
    sync_folder(final.parent)


@contextmanager
def named_when_full(folder: Path) -> Iterator[None]:
    """Raise OSError naming the folder where the disk takes no more: safetensors and tokenizers only say so in a text."""
    try:
        yield
    except Exception as error:
        match = re.search(r"\bos error (\d+)|\bcode: (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(match[1] or match[2]) if match else None
        if number in NO_SPACE:
            raise OSError(number, os.strerror(number), str(folder)) from error
        raise


def save_checkpoint(context: StageContext, learner: Learner, name: str, *, optimizer: bool) -> Path:
    """Save the learner's state as ``checkpoints/<name>``; an intact one is left as it is."""
    if not is_intact(context.paths.checkpoint(name)):
        with new_checkpoint(context.paths, name) as partial:
            learner.save(partial, optimizer=optimizer)
    return context.paths.checkpoint(name)


def seal(directory: Path) -> None:
    """Sync every file of a folder to disk and write its manifest (size and sha256 a file) last."""
    manifest = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        manifest[str(path.relative_to(directory))] = {"bytes": path.stat().st_size, "sha256": digest}
    write_atomic(directory / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))


def is_intact(directory: Path) -> bool:
    """True when the manifest is there and every file matches it."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    for name, entry in manifest.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return False
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                return False
    return True


def step_checkpoint(round_: int, step: int) -> str:
    """Name of the checkpoint after a step of a round."""
    return f"round-{round_:02d}-step-{step:04d}"


def inner_checkpoint(checkpoint: str, step: int) -> str:
    """Name of the checkpoint after a step inside the stage that makes ``checkpoint``; it goes when the stage ends."""
    return f"{checkpoint}-step-{step:06d}"


def prune_step_checkpoints(paths: RunPaths, keep: int, of: str = "round-*") -> None:
    """Delete all but the newest ``keep`` step checkpoints of these; those of whole stages and rounds stay."""
    names = sorted(p.name for p in (paths.directory / "checkpoints").glob(f"{of}-step-*") if p.is_dir())
    for name in names[: max(0, len(names) - keep)]:
        shutil.rmtree(paths.checkpoint(name))
