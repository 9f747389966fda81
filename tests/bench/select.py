"""Benchmark of the selection: GSM8K and MATH against their tests, decontamination and web selection in a stream.

``python -m tests.bench.select [--quick]`` prints a table and, as its last line, one JSON object. Times are CPU seconds of
one core (medians of five runs, of one with --quick); nothing is read from the network. ``--million`` selects a synthetic
set of a million rows instead, made from one template, which is the hard case for every rule that compares problems.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data.decontaminate import Decontaminator, Reference
from data.funnel import select_problems
from data.sources import load_source
from pipeline.config import DataConfig, SourceConfig, load_recipe
from pipeline.config.data import DecontaminateConfig
from stages.select import funnel_lines
from stages.select_web import select_web_files
from tests.tokenizers_for_tests import embedded_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TESTS = {"gsm8k": "gsm8k_test", "math": "math_test", "math500": "math500", "svamp": "svamp", "mgsm": "mgsm"}


def main() -> None:
    """Measure, print a table, and end with the JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of the selection.")
    parser.add_argument("--quick", action="store_true", help="one run each, a smaller stream")
    parser.add_argument("--million", action="store_true", help="a million synthetic rows, for their time and memory")
    arguments = parser.parse_args()
    if arguments.million:
        select_million()
        return
    if not SHARED.is_dir():
        raise SystemExit(
            f"{SHARED}: the public problem sets are not there; put gsm8k_train.parquet and the others into it"
        )
    runs, copies = (1, 12) if arguments.quick else (5, 20)
    texts = pq.read_table(SHARED / "web_text.parquet", columns=["text"]).column("text").to_pylist() * copies
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    index, scan = decontaminate(texts)
    figures: dict[str, float] = {
        "gsm8k_math_seconds": median_seconds(select_gsm8k_and_math, runs),
        "decontaminate_mb_s": megabytes / (median_seconds(index, runs) + median_seconds(scan, runs)),
        "decontaminate_stream_mb_s": megabytes / median_seconds(scan, runs),
    }
    with tempfile.TemporaryDirectory() as folder:
        figures["web_mb_s"] = megabytes / median_seconds(select_web(Path(folder), copies), runs)
    goals = {"gsm8k_math_seconds": "< 10", "web_mb_s": ">= 3"}
    for name, value in figures.items():
        print(f"{name:28}{value:10.2f}   goal {goals.get(name, '>= 10')}")
    print(f"stream of {megabytes:.0f} MB, peak memory {peak_gib():.2f} GiB")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def median_seconds(work: Callable[[], object], runs: int) -> float:
    """Median CPU seconds of ``work`` over the runs, after none to warm up: a user's first run counts too."""
    seconds = []
    for _ in range(runs):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def select_gsm8k_and_math() -> None:
    """Both training sets against all test sets, every rule but the verifier's."""
    sources = [SourceConfig(name=name, path=str(SHARED / f"{name}_train.parquet")) for name in ("gsm8k", "math")]
    benchmarks = tuple(benchmark(name) for name in TESTS)
    config = DataConfig(sources=tuple(sources), benchmarks=benchmarks, template="plain", max_prompt_tokens=2000)
    selection = select_problems(config, 0, embedded_tokenizer(), lambda problems: [None] * len(problems))
    assert len(selection.problems) > 20_000


def references() -> list[Reference]:
    """The problems and worked solutions of the GSM8K and MATH tests."""
    found = []
    for name in ("gsm8k", "math"):
        for problem in load_source(benchmark(name), DataConfig(), 0):
            found.append(Reference(name, problem.meta["row"], "problem", problem.problem))
            found.append(Reference(name, problem.meta["row"], "solution", problem.solution or ""))
    return found


def benchmark(name: str) -> SourceConfig:
    """A test set, from its local file."""
    return SourceConfig(name=name, path=str(SHARED / f"{TESTS[name]}.parquet"))


def decontaminate(texts: list[str]) -> tuple[Callable[[], object], Callable[[], None]]:
    """Building the index of the tests, and scanning a stream of web pages with it."""
    found = references()
    scanner = Decontaminator(found, DecontaminateConfig())

    def scan() -> None:
        for _ in scanner.scan(iter(texts)):
            pass

    return lambda: Decontaminator(found, DecontaminateConfig()), scan


def select_web(folder: Path, copies: int) -> Callable[[], None]:
    """From file to file: training, scoring, decontamination and near-duplicates; each copy of a page has another URL."""
    rows = pq.read_table(SHARED / "web_text.parquet", columns=["text", "label"]).to_pylist()
    pages = [(f"https://site{number % 97}.org/{number}", row["text"]) for number, row in enumerate(rows * copies)]
    pq.write_table(pa.table(dict(zip(("url", "text"), zip(*pages, strict=True), strict=True))), folder / "pool.parquet")
    seed_pages = [row["text"] for row in rows if row["label"] == "math"][:300]
    pq.write_table(pa.table({"text": seed_pages}), folder / "seed.parquet")
    data = DataConfig(benchmarks=(benchmark("gsm8k"), benchmark("math")))
    recipe = load_recipe("embedded").model_copy(update={"data": data})

    def select() -> None:
        files = str(folder / "pool.parquet"), str(folder / "seed.parquet")
        select_web_files(recipe, *files, folder / "kept.jsonl", write=lambda _: None)

    return select


def select_million() -> None:
    """A million rows of one template through every rule, with the verifier's stood in for; ends with its JSON line."""
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "million.jsonl"
        with file.open("w") as out:
            out.writelines(json.dumps(row) + "\n" for row in template_rows(1_000_000))
        source = SourceConfig(name="file", path=str(file))
        config = DataConfig(sources=(source,), template="plain", max_prompt_tokens=1000)
        selection = select_problems(config, 0, embedded_tokenizer(), lambda problems: [None] * len(problems))
    for line in funnel_lines(selection.funnel):
        print(line)
    figures = {"million_seconds": round(time.process_time() - started, 1), "million_gib": round(peak_gib(), 2)}
    print(json.dumps(figures))


def template_rows(count: int) -> Iterator[dict[str, str]]:
    """Word problems that differ in names, things and numbers only."""
    rng = random.Random(0)
    names = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
    things = ("apples", "pens", "coins", "eggs", "cards", "bricks", "shells")
    for _ in range(count):
        first, second, boxes = rng.randrange(1, 10_000), rng.randrange(1, 10_000), rng.randrange(2, 100)
        name, thing = rng.choice(names), rng.choice(things)
        yield {
            "problem": f"{name} had {first} {thing} and found {second} more on the way to school. Then {name} put them "
            f"into {boxes} boxes and gave none away. How many {thing} are there in all the boxes now?",
            "answer": str(first + second),
            "solution": f"{name} has {first} + {second} = {first + second} {thing}.",
        }


def peak_gib() -> float:
    """The most memory this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
