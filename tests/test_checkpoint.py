"""Checkpoints appear whole or not at all, and a damaged one is never taken for good."""

import errno

import pytest

from pipeline.rundir import RunPaths, write_atomic
from stages.checkpoint import MANIFEST, is_intact, new_checkpoint, prune_step_checkpoints


def write(paths, name, text="weights"):
    with new_checkpoint(paths, name) as partial:
        (partial / "model.safetensors").write_text(text)
        (partial / "config.json").write_text("{}")


def test_a_written_checkpoint_is_intact(tmp_path):
    paths = RunPaths(tmp_path, "run")
    write(paths, "warm-start")
    assert is_intact(paths.checkpoint("warm-start"))


def test_an_interrupted_one_leaves_no_checkpoint(tmp_path):
    paths = RunPaths(tmp_path, "run")
    with pytest.raises(ZeroDivisionError), new_checkpoint(paths, "warm-start") as partial:
        (partial / "model.safetensors").write_text(str(1 / 0))
    assert not paths.checkpoint("warm-start").exists()


def test_one_that_fails_for_want_of_space_says_so_and_takes_none(tmp_path):
    paths = RunPaths(tmp_path, "run")

    def save():
        with new_checkpoint(paths, "warm-start") as partial:
            (partial / "config.json").write_text("{}")
            # As safetensors says it.
            raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match=r"No space left on device: '.*/checkpoints/warm-start'"):
        save()
    assert not list(paths.checkpoint("").iterdir())


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    write_atomic(file, "first")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pipeline.rundir.os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/result\.json'"):
        write_atomic(file, "second")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_every_kind_of_damage_is_seen(tmp_path, damage):
    paths = RunPaths(tmp_path, "run")
    write(paths, "warm-start")
    file = paths.checkpoint("warm-start") / "model.safetensors"
    if damage == "truncate":
        file.write_text("weigh")
    elif damage == "flip":
        file.write_text("weightz")
    elif damage == "remove":
        file.unlink()
    else:
        (paths.checkpoint("warm-start") / MANIFEST).write_text('{"model')
    assert not is_intact(paths.checkpoint("warm-start"))


def test_a_damaged_checkpoint_gives_way_to_its_whole_successor(tmp_path):
    paths = RunPaths(tmp_path, "run")
    write(paths, "warm-start")
    (paths.checkpoint("warm-start") / "config.json").write_text("")
    write(paths, "warm-start", "new")
    assert is_intact(paths.checkpoint("warm-start"))
    assert (paths.checkpoint("warm-start") / "model.safetensors").read_text() == "new"


def test_only_old_step_checkpoints_are_pruned(tmp_path):
    paths = RunPaths(tmp_path, "run")
    for name in ("warm-start", "round-01", "round-01-step-0010", "round-01-step-0020", "round-02-step-0010"):
        write(paths, name)
    prune_step_checkpoints(paths, 2)
    left = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["round-01", "round-01-step-0020", "round-02-step-0010", "warm-start"]
