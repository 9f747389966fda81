"""Kill the recipe at random moments and compare with a run that nobody touched: ``python -m tests.faults --kills 50``.

Each life of the process is ended by SIGKILL to its whole group after a random time (or by SIGTERM or Ctrl-C, now and
then), and the same command is given again until the run is complete. The last line is one JSON object:
kills, rows_lost, rows_doubled, bits_differ.
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

from pipeline.rundir import RunPaths
from tests.same_run import Difference, compare

SIGNALS = [signal.SIGKILL] * 8 + [signal.SIGTERM, signal.SIGINT]
RUN_ID = "faults"
KILLS_A_RUN = 6


def start(root: Path, recipe: str, overrides: list[str]) -> subprocess.Popen[bytes]:
    """``grpoflow run`` in its own process group, without Prefect: what is tested is the run on disk."""
    changes = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "flows.cli", "run", "--no-prefect", "--recipe", recipe, *changes]
    log = (root / "log.txt").open("ab")
    return subprocess.Popen(
        [*command, "--root", str(root), "--run-id", RUN_ID], stdout=log, stderr=log, start_new_session=True
    )


def finish(root: Path, recipe: str, overrides: list[str]) -> float:
    """Let a run end by itself; returns its seconds."""
    began = time.monotonic()
    if start(root, recipe, overrides).wait() != 0:
        raise SystemExit("the run failed by itself:\n" + (root / "log.txt").read_text(errors="replace")[-3000:])
    return time.monotonic() - began


def kill_through(
    root: Path,
    recipe: str,
    overrides: list[str],
    seconds: float,
    kills: int,
    chance: random.Random,
    where: Counter[str],
) -> int:
    """Run to the end under at most ``kills`` kills; returns how many there were."""
    done = 0
    while True:
        child = start(root, recipe, overrides)
        # Up to more than a whole run, so that every stage is met: the warm start alone takes most of a short run.
        deadline = time.monotonic() + chance.uniform(2.0, 1.2 * seconds)
        while child.poll() is None and (time.monotonic() < deadline or done >= kills):
            time.sleep(0.02)
        if child.poll() is not None:
            if child.returncode == 0:
                return done
            raise SystemExit("the run failed:\n" + (root / "log.txt").read_text(errors="replace")[-3000:])
        how = chance.choice(SIGNALS)
        where[stage_at_work(root)] += 1
        os.killpg(child.pid, how)
        if how != signal.SIGKILL:
            time.sleep(0.5)
            os.killpg(child.pid, signal.SIGKILL) if child.poll() is None else None
        child.wait()
        done += 1


def stage_at_work(root: Path) -> str:
    """The kind of stage that the log says began last."""
    log = RunPaths(root, RUN_ID).log_file
    begins = [line for line in log.read_text().splitlines() if " begins" in line] if log.is_file() else []
    return begins[-1].split(" begins")[0].rsplit("/", 1)[-1].rsplit(" ", 1)[-1] if begins else "start"


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
        print(f"uninterrupted: {seconds:.0f} s", flush=True)
        total, kills, number = Difference(), 0, 0
        while kills < arguments.kills:
            number += 1
            root = Path(folder) / f"killed-{number}"
            root.mkdir()
            left = min(KILLS_A_RUN, arguments.kills - kills)
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
