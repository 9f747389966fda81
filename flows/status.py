"""``grpoflow status``: what is done, running and to do, and the rewards so far."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.runs import find_run, read_recipe, run_ids, run_stages
from flows.service import lock_holder
from pipeline.rundir import RunPaths, read_result


def print_runs(root: Path) -> None:
    """One line a run."""
    ids = run_ids(root)
    if not ids:
        print(f"no runs in {root}: start one with `grpoflow run`")
        return
    table = Table(
        title=f"Runs in {root}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for column in ("run", "started", "stages", "state", "next"):
        table.add_column(column)
    for run_id in ids:
        paths = RunPaths(root, run_id)
        try:
            keys = run_stages(paths, read_recipe(paths))
            left = [key for key in keys if read_result(paths, key) is None]
        except (ValueError, FileNotFoundError) as error:
            table.add_row(escape(run_id), "", "", "cannot be read", escape(str(error)))
            continue
        table.add_row(
            run_id, paths.header.get("created_at", ""), f"{len(keys) - len(left)}/{len(keys)}", state(paths, left),
            left[0] if left else "",
        )  # fmt: skip
    Console().print(table)


def print_run(root: Path, run_id: str) -> None:
    """One run: its stages by group, how long they took, rewards by step, and where it would go on."""
    paths = find_run(root, run_id)
    keys = run_stages(paths, read_recipe(paths))
    results = {key: read_result(paths, key) for key in keys}
    left = [key for key in keys if results[key] is None]
    console = Console()
    console.print(
        f"run {run_id}: {state(paths, left)}; {len(keys) - len(left)} of {len(keys)} stages done", markup=False
    )
    parent = paths.header.get("parent")
    if parent:
        console.print(f"child of {parent}, from {paths.header['resume_from']}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("stage", "state", "ended, UTC", "seconds", "reward", "correct"):
        right = column in ("seconds", "reward", "correct")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for key in keys:
        result = results[key]
        if result is None:
            if key == left[0]:
                table.add_row(key, "running" if lock_held(paths) else "next", "", "", "", "")
            continue
        if key.endswith(("/rollout", "/update")):
            continue  # one line a step is enough: its reward stage
        inherited = "" if paths.result_file(key).is_file() else "inherited"
        numbers = [result.metrics.get(name) for name in ("reward", "correct")]
        table.add_row(
            key, inherited or "done", result.finished_at[5:16].replace("T", " "), f"{result.seconds:.1f}",
            *(f"{n:.3f}" if isinstance(n, float) else "" for n in numbers),
        )  # fmt: skip
    console.print(table)
    for line in stops(paths, left):
        console.print(line, markup=False)
    if left:
        console.print(f"{len(left)} stages to do, from {left[0]}: grpoflow run --run-id {run_id}", markup=False)


def stops(paths: RunPaths, left: list[str]) -> list[str]:
    """What ended the run, where a guard, a cost target or a timeout stopped a stage that is still to do: the last one."""
    from pipeline import store

    rows = [
        row for row in store.read(paths, "events").to_pylist() if row["severity"] == "error" and row["stage"] in left
    ]
    newest = sorted(rows, key=lambda row: row["at"])[-1:]
    return [f"stopped {row['at']:%m-%d %H:%M}: {row['message']}" for row in newest]


def state(paths: RunPaths, left: list[str]) -> str:
    """complete, running (since when, by whom) or stopped."""
    if not left:
        return "complete"
    if holder := lock_held(paths):
        since = datetime.fromtimestamp(paths.lock_file.stat().st_mtime, UTC).isoformat(timespec="seconds")
        return f"running ({holder}, since {since})"
    return "stopped"


def lock_held(paths: RunPaths) -> str | None:
    """Who works on the run, or None."""
    return lock_holder(paths.lock_file) if paths.lock_file.is_file() else None
