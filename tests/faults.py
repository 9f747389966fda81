"""Kill the recipe at random moments and compare with a run that nobody touched: ``python -m tests.faults --kills 50``.

Each life of the process is ended by SIGKILL to its whole group (or by SIGTERM or Ctrl-C, now and then) at a random moment
of one of its next stages, and the same command is given again until the run is complete. The last line is one JSON
object: kills, rows_lost, rows_doubled, bits_differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from flows.runs import read_recipe
from pipeline.rundir import RunPaths, read_result, stage_keys
from tests.same_run import Difference, compare

SIGNALS = [signal.SIGKILL] * 8 + [signal.SIGTERM, signal.SIGINT]
RUN_ID = "faults"
AHEAD = 5
"""A life ends in one of this many stages from where the run stands."""
AT_THE_START = 0.1
"""Share of lives that end in their first seconds: while libraries load, half-written files are cleared, updates replayed."""
STARTING = 12.0


def start(root: Path, recipe: str, overrides: list[str]) -> subprocess.Popen[bytes]:
    """``grpoflow run`` in its own process group, without Prefect: what is tested is the run on disk."""
    changes = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "flows.cli", "run", "--no-prefect", "--recipe", recipe, *changes]
    log = (root / "log.txt").open("ab")
    return subprocess.Popen(
        [*command, "--root", str(root), "--run-id", RUN_ID], stdout=log, stderr=log, start_new_session=True
    )


def finish(root: Path, recipe: str, overrides: list[str]) -> dict[str, float]:
    """Let a run end by itself; returns the seconds of its stages, in their order."""
    check_whole(start(root, recipe, overrides).wait(), root)
    paths = RunPaths(root, RUN_ID)
    results = [(key, read_result(paths, key)) for key in stage_keys(read_recipe(paths))]
    return {key: result.seconds for key, result in results if result is not None}


def kill_through(
    root: Path,
    recipe: str,
    overrides: list[str],
    seconds: dict[str, float],
    kills: int,
    chance: random.Random,
    where: Counter[str],
) -> int:
    """Run to the end under at most ``kills`` kills; returns how many there were. ``seconds``: each stage's, in order."""
    aimed_at: set[str] = set()
    for done in range(kills):
        child = start(root, recipe, overrides)
        wait_for_moment(child, root, seconds, aimed_at, chance)
        if child.poll() is not None:
            check_whole(child.returncode, root)
            return done
        where[stage_at_work(root)] += 1
        how = chance.choice(SIGNALS)
        os.killpg(child.pid, how)
        if how != signal.SIGKILL:
            time.sleep(0.5)
            os.killpg(child.pid, signal.SIGKILL) if child.poll() is None else None
        child.wait()
    check_whole(start(root, recipe, overrides).wait(), root)
    return kills


def wait_for_moment(
    child: subprocess.Popen[bytes], root: Path, seconds: dict[str, float], aimed_at: set[str], chance: random.Random
) -> None:
    """Return at a random moment of one of the next stages, or of the first seconds, or when the child ends by itself.

    No stage is aimed at twice: one that begins with loading a model would else be killed while it loads for ever.
    """
    paths = RunPaths(root, RUN_ID)
    if chance.random() < AT_THE_START:
        deadline, begun = time.monotonic() + chance.uniform(0.0, STARTING), True
    else:
        left = [key for key in seconds if not paths.result_file(key).is_file() and key not in aimed_at]
        if not left:
            child.wait()
            return
        target = chance.choice(left[:AHEAD])
        aimed_at.add(target)
        before, begun, deadline = begins(paths, target), False, 0.0
    while child.poll() is None and not (begun and time.monotonic() >= deadline):
        if not begun and begins(paths, target) > before:
            # The stage itself, what is replayed before it and what is written after it: up to half as long again.
            begun, deadline = True, time.monotonic() + chance.uniform(0.0, 1.5 * seconds[target])
        time.sleep(0.01)


def check_whole(status: int, root: Path) -> None:
    """SystemExit with the end of its log for a run that ended by itself and failed."""
    if status != 0:
        raise SystemExit("the run failed:\n" + (root / "log.txt").read_text(errors="replace")[-3000:])


def begins(paths: RunPaths, key: str) -> int:
    """How often the log says that this stage begins."""
    return paths.log_file.read_text().count(f"stage {key} begins\n") if paths.log_file.is_file() else 0


def stage_at_work(root: Path) -> str:
    """The kind of stage that the log says began last."""
    log = RunPaths(root, RUN_ID).log_file
    lines = [line for line in log.read_text().splitlines() if line.endswith(" begins")] if log.is_file() else []
    return lines[-1].split("stage ")[1].removesuffix(" begins").rsplit("/", 1)[-1] if lines else "start"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--recipe", default="smoke")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, where = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference"
        reference.mkdir()
        seconds = finish(reference, arguments.recipe, arguments.overrides)
        print(f"uninterrupted: {sum(seconds.values()):.0f} s in {len(seconds)} stages", flush=True)
        total, kills, number = Difference(), 0, 0
        while kills < arguments.kills:
            number += 1
            root = Path(folder) / f"killed-{number}"
            root.mkdir()
            left = arguments.kills - kills
            here = kill_through(root, arguments.recipe, arguments.overrides, seconds, left, chance, where)
            kills += here
            found = compare(RunPaths(reference, RUN_ID), RunPaths(root, RUN_ID))
            print(f"run {number}: {here} kills; {found}", flush=True)
            total.rows_lost += found.rows_lost
            total.rows_doubled += found.rows_doubled
            total.bits_differ += found.bits_differ
            shutil.rmtree(root)
    print("kills by stage:", ", ".join(f"{stage} {count}" for stage, count in where.most_common()))
    figures = ("rows_lost", "rows_doubled", "bits_differ")
    print(json.dumps({"kills": kills, **{name: getattr(total, name) for name in figures}}))
    sys.exit(any(getattr(total, name) for name in figures))


if __name__ == "__main__":
    main()
