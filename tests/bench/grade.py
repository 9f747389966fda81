"""Verdicts a second on real model outputs against math-verify called serially, and agreement with published labels.

``python -m tests.bench.grade [--quick]``. Ours judges every row of both files, each time in a new pool, so starting the
worker counts. math-verify, called as its README shows, judges evenly spaced rows of the same files.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from pipeline.types import FinishReason
from rewards.literals import parse_literal
from rewards.workers import Verdict, VerifierPool

SHARED = Path(__file__).resolve().parents[3] / "shared"
FILES = ("gsm8k_model_outputs", "math_qwen_rm_samples")
NEVER_PAID = ("reward_hack", "truncated", "think_tags", "malicious", "empty")


@dataclass(frozen=True, slots=True)
class Output:
    """One real completion with its published label."""

    file: str
    where: str
    gold: str
    completion: str
    label: bool
    issue: str | None


def read_outputs(name: str) -> list[Output]:
    rows = pq.read_table(SHARED / "data" / f"{name}.parquet").to_pylist()
    return [
        Output(
            name,
            f"{r['model']} question {r['test_row']}" if "model" in r else f"problem {r['idx']} sample {r['sample']}",
            r["gold"],
            r["completion"],
            r["label"],
            r.get("label_issue"),
        )
        for r in rows
    ]


def ours(outputs: list[Output]) -> list[bool]:
    """Right or not, by a new pool with one worker."""
    return [verdict.status == "correct" for verdict in judged([(o.gold, o.completion, "stop") for o in outputs])]


def judged(cases: list[tuple[str, str, FinishReason]]) -> list[Verdict]:
    with VerifierPool(1) as pool:
        return pool.judge_many(cases)


def theirs(outputs: list[Output]) -> list[bool]:
    """Right or not, by math-verify's parse and verify with their default time-outs."""
    from math_verify import parse, verify

    return [bool(verify(parse(f"${o.gold}$"), parse(o.completion))) for o in outputs]


def timed(judge: Callable[[list[Output]], list[bool]], outputs: list[Output]) -> tuple[list[bool], float]:
    """The verdicts and how many a second."""
    started = time.perf_counter()
    verdicts = judge(outputs)
    return verdicts, len(outputs) / (time.perf_counter() - started)


def share(verdicts: list[bool], labels: list[bool]) -> float:
    return sum(v == label for v, label in zip(verdicts, labels, strict=True)) / len(labels)


def case_figures() -> tuple[float, int]:
    """Accuracy on the labelled cases, and how many cheats were paid."""
    lines = (SHARED / "verify" / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    verdicts = [v.status == "correct" for v in judged([(row["gold"], row["completion"], "stop") for row in rows])]
    paid = sum(v and not r["expected"] and r["kind"] in NEVER_PAID for r, v in zip(rows, verdicts, strict=True))
    return share(verdicts, [row["expected"] for row in rows]), paid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rows for math-verify, the same work for ours")
    arguments = parser.parse_args()
    if not (SHARED / "data").is_dir():
        raise SystemExit(f"the data of this benchmark are not at {SHARED}: it needs data/ and verify/ there")
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    outputs = [output for name in FILES for output in read_outputs(name)]
    labels = [output.label for output in outputs]
    rows = 60 if arguments.quick else 400
    # Other rows in each run: math-verify remembers what it has parsed, and so do our literals.
    samples = [outputs[start :: len(outputs) // rows] for start in range(5)]
    theirs(outputs[5:10])  # loads sympy, outside the clock

    rates: dict[str, list[float]] = {"ours": [], "math-verify": []}
    their_verdicts: list[bool] = []
    for sample in samples:  # in turn, so that a busy machine slows both
        parse_literal.cache_clear()
        our_verdicts, rate = timed(ours, outputs)
        rates["ours"].append(rate)
        verdicts, rate = timed(theirs, sample)
        their_verdicts += verdicts
        rates["math-verify"].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    accuracy, paid = case_figures()

    print(f"{'':14}{'verdicts/s':>12}{'slowest':>10}{'fastest':>10}{'rows':>7}{'agreement':>11}")
    for name, values, agreement, count in (
        ("ours", rates["ours"], share(our_verdicts, labels), len(outputs)),
        (
            "math-verify",
            rates["math-verify"],
            share(their_verdicts, [o.label for s in samples for o in s]),
            len(their_verdicts),
        ),
    ):
        print(f"{name:14}{medians[name]:12.1f}{min(values):10.1f}{max(values):10.1f}{count:7}{agreement:11.4f}")
    for file in FILES:
        pairs = [(o, v) for o, v in zip(outputs, our_verdicts, strict=True) if o.file == file]
        different = [(o, v) for o, v in pairs if v != o.label]
        print(f"\n{file}: {len(pairs)} rows, {1 - len(different) / len(pairs):.4f} agree, {len(different)} differ")
        for output, verdict in different:
            last = output.completion[-70:].replace("\n", " ")
            print(f"  {output.where}: gold {output.gold!r}, label {output.label}, ours {verdict}; …{last}")
            print(f"    {output.issue or 'no issue is recorded for this label'}")
    print(f"\ncases.jsonl: {accuracy:.4f} as labelled; cheats paid in {', '.join(NEVER_PAID)}: {paid}")
    ratio = medians["ours"] / medians["math-verify"]
    figures = {"vs_math_verify": ratio, "agreement": share(our_verdicts, labels), "cases_accuracy": accuracy}
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
