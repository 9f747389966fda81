"""What a billion rollouts cost, from the slope between two sizes: ``python -m tests.bench.store_scale [--data DIR]``.

Bytes and files are proportional to rollouts; a query's seconds are a straight line through 100,000 and a million rollouts
of 64 tokens in steps of 50,000, rounds of four steps merged. ``--data DIR`` keeps and reuses the rollouts. Last, one JSON
object: bytes_per_rollout, billion_tb, billion_files, billion_slowest_minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

from pipeline import store
from pipeline.lineage import Lineage
from pipeline.queries import QUERIES, named_sql
from tests.bench.store import GIB, fill, timed
from tests.bench.store_data import Size

SIZES = {"small": Size(runs=1, rounds=1, steps=2, rows=50_000), "large": Size(runs=1, rounds=5, steps=4, rows=50_000)}
BILLION = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder for the synthetic runs, kept and reused")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data or Path(scratch)
        for name, size in SIZES.items():
            fill(data / name, size)
        figures = bytes_and_files(data / "large", SIZES["large"].rollouts)
        figures["billion_slowest_minutes"] = round(slowest_minutes(data), 1)
    print(json.dumps(figures))


def bytes_and_files(root: Path, rollouts: int) -> dict[str, float]:
    """Bytes a rollout by table, and what a billion are."""
    total, count = 0.0, 0
    for folder in sorted(root.glob("*/tables/*")):
        files = [path.stat().st_size for path in folder.rglob("*.parquet")]
        total, count = total + sum(files), count + len(files)
        print(f"{folder.name:<18} {sum(files) / rollouts:>10.1f} bytes a rollout in {len(files)} files")
    return {
        "bytes_per_rollout": round(total / rollouts, 1), "billion_tb": round(total / rollouts * BILLION / 1e12, 3),
        "billion_files": round(count / rollouts * BILLION),
    }  # fmt: skip


def slowest_minutes(data: Path) -> float:
    """Minutes of the slowest named query over a billion rollouts that does not read texts or tokens."""
    small, large = (seconds_of_queries(data / name) for name in SIZES)
    between = SIZES["large"].rollouts - SIZES["small"].rollouts
    slowest = 0.0
    for name, query in QUERIES.items():
        minutes = (large[name] + (large[name] - small[name]) / between * (BILLION - SIZES["large"].rollouts)) / 60
        note = "  (reads texts)" if query.tokens else ""
        print(
            f"{name:<18} {small[name]:>8.3f} s {large[name]:>8.3f} s {max(0.0, minutes):>9.1f} min at a billion{note}"
        )
        slowest = slowest if query.tokens else max(slowest, minutes)
    return slowest


def seconds_of_queries(root: Path) -> dict[str, float]:
    """Median seconds of each named query over a folder of runs; each opens the store anew."""
    components = Lineage(root.resolve(), None).components()
    texts = {name: named_sql(name, components) for name in QUERIES}
    return {name: timed(partial(store.sql, text, root=root, gib=GIB), 3) for name, text in texts.items()}


if __name__ == "__main__":
    main()
