"""Benchmark of the selection: GSM8K and MATH against their tests, decontamination and web selection in a stream.

``python -m tests.bench.select [--quick]`` prints a table and, as its last line, one JSON object. Times are CPU seconds of
one core (medians of five runs, of one with --quick); nothing is read from the network.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from data.decontaminate import Decontaminator, Reference
from data.funnel import select_problems
from data.sources import load_source
from data.web import Page, select_pages
from pipeline.config import DataConfig, SourceConfig
from pipeline.config.data import DecontaminateConfig, WebConfig
from tests.tokenizers_for_tests import embedded_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TESTS = {"gsm8k": "gsm8k_test", "math": "math_test", "math500": "math500", "svamp": "svamp", "mgsm": "mgsm"}


def main() -> None:
    """Measure, print a table, and end with the JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of the selection.")
    parser.add_argument("--quick", action="store_true", help="one run each, a smaller stream")
    quick = parser.parse_args().quick
    if not SHARED.is_dir():
        raise SystemExit(
            f"{SHARED}: the public problem sets are not there; put gsm8k_train.parquet and the others into it"
        )
    runs, copies = (1, 4) if quick else (5, 20)
    texts = pq.read_table(SHARED / "web_text.parquet", columns=["text"]).column("text").to_pylist() * copies
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    figures: dict[str, float] = {
        "gsm8k_math_seconds": median_seconds(select_gsm8k_and_math, runs),
        "decontaminate_mb_s": megabytes / median_seconds(decontaminate(texts), runs),
        "web_mb_s": megabytes / median_seconds(select_web(texts), runs),
    }
    goals = {"gsm8k_math_seconds": "< 10", "decontaminate_mb_s": ">= 10", "web_mb_s": ">= 3"}
    for name, value in figures.items():
        print(f"{name:24}{value:10.2f}   goal {goals[name]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"stream of {megabytes:.0f} MB, peak memory {peak:.2f} GiB")
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
    benchmarks = [SourceConfig(name=name, path=str(SHARED / f"{file}.parquet")) for name, file in TESTS.items()]
    config = DataConfig(sources=tuple(sources), benchmarks=tuple(benchmarks), template="plain", max_prompt_tokens=2000)
    selection = select_problems(config, 0, embedded_tokenizer(), lambda problems: [None] * len(problems))
    assert len(selection.problems) > 20_000


def decontaminate(texts: list[str]) -> Callable[[], None]:
    """A stream of web pages against the problems and solutions of the GSM8K and MATH tests; building the index counts."""
    references = []
    for name in ("gsm8k", "math"):
        source = SourceConfig(name=name, path=str(SHARED / f"{name}_test.parquet"))
        for problem in load_source(source, DataConfig(), 0):
            references.append(Reference(name, problem.meta["row"], "problem", problem.problem))
            references.append(Reference(name, problem.meta["row"], "solution", problem.solution or ""))

    def scan() -> None:
        for _ in Decontaminator(references, DecontaminateConfig()).scan(iter(texts)):
            pass

    return scan


def select_web(texts: list[str]) -> Callable[[], None]:
    """One iteration over the stream: training, scoring, decontamination and near-duplicates of what is kept."""
    labels = pq.read_table(SHARED / "web_text.parquet", columns=["label"]).column("label").to_pylist()
    seed_pages = [text for text, label in zip(texts, labels, strict=False) if label == "math"][:300]
    pages = [Page(f"https://site{number % 97}.org/{number}", text) for number, text in enumerate(texts)]

    def select() -> None:
        select_pages(lambda: pages, seed_pages, [], WebConfig(), 0)

    return select


if __name__ == "__main__":
    main()
