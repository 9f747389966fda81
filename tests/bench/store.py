"""How fast the store records, answers and opens: ``python -m tests.bench.store [--quick]``.

Prints a table for people and, last, one JSON object: append_rows_s (rollouts of 64 tokens a second on one core, higher is
better), slowest_named_query_s and open_1000_runs_s (seconds), recording_share (of a training step's time).
Ten million rollouts are made by default, a million with ``--quick``; ``--data DIR`` keeps and reuses them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from pipeline import store
from pipeline.lineage import Lineage
from pipeline.queries import QUERIES, named_sql
from pipeline.rundir import RunPaths, read_result, stage_keys
from tests.bench.store_data import Size, copies, make_run, new_run, rollout_rows

PART = 4096
REPEATS = 5
GIB = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a million rollouts in place of ten")
    parser.add_argument("--data", type=Path, help="folder for the synthetic runs, kept and reused")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        figures = {"append_rows_s": append_rows(scratch / "append")}
        data = options.data or scratch / "data"
        fill(data, Size(runs=1 if options.quick else 10, rounds=5, steps=4, rows=50_000))
        figures["slowest_named_query_s"] = slowest_query(data)
        figures["open_1000_runs_s"] = open_runs(scratch / "many", 1000)
        figures["recording_share"] = recording_share(scratch / "recording")
    print(json.dumps(figures))


def append_rows(root: Path) -> float:
    """Rollouts recorded a second by one core, given as the stages give them; synced to disk."""
    paths, rows = new_run(root, "append"), rollout_rows(PART)
    threads = pa.cpu_count(), pa.io_thread_count()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        parts = iter(range(1000))
        seconds = timed(
            lambda: store.append(paths, "rollouts", "round-01/step-0001/rollout", rows, part=next(parts)), 9
        )
    finally:
        os.sched_setaffinity(0, cores)
        pa.set_cpu_count(threads[0])
        pa.set_io_thread_count(threads[1])
    print(f"append             {PART / seconds:>12,.0f} rollouts/s ({PART} a part)")
    return PART / seconds


def fill(root: Path, size: Size) -> None:
    """Make the runs that are not there yet."""
    for number in range(size.runs):
        run = RunPaths(root, f"synthetic-{number}")
        if not run.result_file(f"round-{size.rounds:02d}/refresh").is_file():
            shutil.rmtree(run.directory, ignore_errors=True)
            make_run(root, number, size)
    count = store.sql("SELECT count(*) AS n FROM rollouts", root=root).to_pylist()[0]["n"]
    print(f"rollouts           {count:>12,}")


def slowest_query(root: Path) -> float:
    """Seconds of the slowest named query over all runs, two cores and 4 GiB; each opens the store anew."""
    components, slowest = Lineage(root.resolve(), None).components(), 0.0
    for name, query in QUERIES.items():
        text = named_sql(name, components)
        seconds = timed(lambda text=text: store.sql(text, root=root, gib=GIB))
        slowest = max(slowest, seconds)
        print(f"{name:<18} {seconds:>12.3f} s{'  (reads texts)' if query.tokens else ''}")
    return slowest


def open_runs(root: Path, count: int) -> float:
    """Seconds to open a store of many finished runs and list them."""
    model = make_run(root.parent / "model", 0, Size(runs=1, rounds=3, steps=2, rows=64))
    copies(root, model, count)
    seconds = timed(lambda: store.connect(root=root).sql("SELECT count(*), max(run_id) FROM runs").fetchall())
    print(f"open {count} runs     {seconds:>12.3f} s")
    return seconds


def recording_share(root: Path) -> float:
    """Share of the rollout, reward and update stages of the embedded recipe that is spent recording rows."""
    from flows.console import Display
    from flows.execute import execute
    from flows.runs import open_run

    root.mkdir()
    changes = ["warm_start.steps=30", "grpo.rounds=1", "grpo.steps=3", "evaluate.problems=8", "evaluate.samples=2",
               "evaluate.ks=[1, 2]", "reject.problems=8", "reward_model.problems=8"]  # fmt: skip
    recipe, paths = open_run("embedded", changes, "recording", None, root)
    with recorded_seconds() as spent:
        try:
            execute(recipe, paths, display=Display(len(stage_keys(recipe)), quiet=True))
        except ValueError as error:
            if not str(error).startswith("reject:"):  # so short a run may have nothing to keep; its steps are done
                raise
    steps = [key for key in stage_keys(recipe) if "/step-" in key]
    total = sum(result.seconds for key in steps if (result := read_result(paths, key)) is not None)
    share = sum(spent.get(key, 0.0) for key in steps) / total
    print(f"recording          {share:>12.2%} of {total:.1f} s in {len(steps) // 3} steps")
    return share


@contextmanager
def recorded_seconds() -> Iterator[dict[str, float]]:
    """Seconds in ``store.append`` by stage key, of what runs inside."""
    spent: dict[str, float] = {}
    real = store.append

    def measured(paths, table, key, rows, **options):
        started = time.perf_counter()
        try:
            return real(paths, table, key, rows, **options)
        finally:
            spent[key] = spent.get(key, 0.0) + time.perf_counter() - started

    store.append = measured
    try:
        yield spent
    finally:
        store.append = real


def timed(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of ``repeats`` calls after one that warms up."""
    work()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
