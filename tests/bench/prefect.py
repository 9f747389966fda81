"""What Prefect costs a step: ``python -m tests.bench.prefect [--quick]``.

A server and a worker of its own run beside. Prints a table for people and, last, one JSON object: share (seconds that the
work waits for Prefect in a step of the embedded recipe, of the step's seconds), task_runs and database_kib a step, and
server_cpu (the server's CPU seconds a step). Database figures are the difference of a long and a short run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.service import Service
from pipeline.rundir import RunPaths, read_result
from tests.tiny import tiny_recipe

EMBEDDED = [
    "warm_start.steps=30", "grpo.rounds=1", "evaluate.problems=8", "evaluate.samples=2", "evaluate.ks=[1, 2]",
    "reject.problems=200", "reject.samples=8", "reject.min_kept=1", "regenerate.steps=1", "reward_model.problems=8",
]  # fmt: skip
TABLES = ("task_run", "task_run_state", "events", "log", "artifact")
SETTLE_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 and 20 steps in place of 12 and 100")
    options = parser.parse_args()
    embedded, tiny = (4, 20) if options.quick else (12, 100)
    with tempfile.TemporaryDirectory() as folder, service(Path(folder) / "home") as server:
        os.environ.update(server.environment(), PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="WARNING")
        figures = {**seconds_a_step(Path(folder), server, embedded), **database_a_step(Path(folder), server, tiny)}
    print(json.dumps(figures))


@contextmanager
def service(home: Path) -> Iterator[Service]:
    """Server and worker on a free port, as ``grpoflow up`` starts them."""
    server = Service(home)
    with server._exclusive():
        server._save({"port": 0})
    server.up(say=lambda line: None)
    try:
        yield server
    finally:
        server.down(say=lambda line: None)


def seconds_a_step(folder: Path, server: Service, steps: int) -> dict[str, float]:
    """Waiting of the embedded recipe's steps for Prefect; the first step is left out, for it imports what it needs."""
    root, begun = folder / "runs", cpu_seconds(server, "server")
    with prefect_seconds() as spent:
        run_flow(root, "embedded", [*EMBEDDED, f"grpo.steps={steps}"], "embedded")
    paths, keys = (
        RunPaths(root, "embedded"),
        [key for key in spent if re.match(r"round-01/step-000[^1]|.*step-00[1-9]", key)],
    )
    work = sum(result.seconds for key in keys if (result := read_result(paths, key)) is not None)
    waited, counted = sum(spent[key] for key in keys), steps - 1
    server_cpu = (cpu_seconds(server, "server") - begun) / steps
    print(
        f"embedded recipe: {1000 * waited / counted:.1f} ms in Prefect of a step of {work / counted:.2f} s; {counted} steps"
    )
    print(f"                 server: {server_cpu:.2f} CPU seconds a step, all other stages of the run included")
    return {"share": round(waited / (waited + work), 5), "server_cpu": round(server_cpu, 3)}


def database_a_step(folder: Path, server: Service, steps: int) -> dict[str, float]:
    """Rows and bytes of the SQLite database that a step adds."""
    database, changes = server.home / "prefect" / "prefect.db", tiny_recipe(folder)
    sizes = []
    before = settled(database)
    for count in (2, 2 + steps):
        run_flow(folder / "runs", "embedded", [*changes, "grpo.rounds=1", f"grpo.steps={count}"], f"tiny-{count}")
        after = settled(database)
        sizes.append({name: after[name] - before[name] for name in after})
        before = after
    a_step = {name: (sizes[1][name] - sizes[0][name]) / steps for name in before}
    print("a step adds      " + ", ".join(f"{a_step[table]:.1f} {table}" for table in TABLES))
    print(f"                 {a_step['kib']:.1f} KiB of database; 1,000 steps: {a_step['kib'] / 1.024:.0f} MB")
    return {"task_runs": round(a_step["task_run"], 2), "database_kib": round(a_step["kib"], 1)}


def run_flow(root: Path, recipe: str, changes: list[str], run_id: str) -> None:
    """The deployments' flow, in this process."""
    from flows.deployed import recipe as flow

    flow(recipe, changes, run_id, None, str(root))


@contextmanager
def prefect_seconds() -> Iterator[dict[str, float]]:
    """Seconds by stage key in which the work waits for Prefect: in ``in_task`` outside the stage, and in the view."""
    import flows.tasks as tasks

    spent: dict[str, float] = {}
    real, key_now = tasks.in_task, ""

    def in_task(key: str, body: Callable[[], Any], reused: bool) -> Any:
        nonlocal key_now
        key_now, inside = key, 0.0

        def timed() -> Any:
            nonlocal inside
            started = time.perf_counter()
            try:
                return body()
            finally:
                inside += time.perf_counter() - started

        started = time.perf_counter()
        try:
            return real(key, timed, reused)
        finally:
            spent[key] = spent.get(key, 0.0) + time.perf_counter() - started - inside

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                spent[key_now] = spent.get(key_now, 0.0) + time.perf_counter() - started

        return call

    methods = {name: getattr(tasks.PrefectView, name) for name in ("progress", "end", "line", "step", "evaluated")}
    tasks.in_task = in_task
    for name, method in methods.items():
        setattr(tasks.PrefectView, name, counted(method))
    try:
        yield spent
    finally:
        tasks.in_task = real
        for name, method in methods.items():
            setattr(tasks.PrefectView, name, method)


def settled(database: Path) -> dict[str, float]:
    """Rows by table and the database's KiB, once the server has written what it was sent (it does so seconds later)."""
    deadline, last, same = time.monotonic() + SETTLE_SECONDS, None, 0
    while same < 4 and time.monotonic() < deadline:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            rows = {t: connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in TABLES}
            pages = connection.execute(
                "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
            )
            size = pages.fetchone()[0] * connection.execute("PRAGMA page_size").fetchone()[0]
        same = same + 1 if rows == last else 0
        last = rows
        time.sleep(3)
    return {**rows, "kib": size / 1024}


def cpu_seconds(server: Service, name: str) -> float:
    """User and system seconds of one of the service's processes so far."""
    fields = Path(f"/proc/{server.process(name)}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
