"""Synthetic runs for the store's benchmark: the shape of real rows, made by numpy, recorded and merged by the store."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline import store
from pipeline.rows import update_row
from pipeline.rundir import RunPaths, step_key, write_result
from pipeline.schema import arrow_schema
from pipeline.types import StageResult

GROUP, TOKENS, PROBLEMS, VOCABULARY = 16, 64, 5000, 4096
WORDS = np.array(["so", "then", "we", "add", "times", "and", "gives", "apples", "minus", "left", "each", "per"])


@dataclass(frozen=True)
class Size:
    """``runs`` x ``rounds`` x ``steps`` steps of ``rows`` rollouts (a multiple of ``GROUP``)."""

    runs: int
    rounds: int
    steps: int
    rows: int

    @property
    def rollouts(self) -> int:
        return self.runs * self.rounds * self.steps * self.rows


def make_run(root: Path, number: int, size: Size) -> RunPaths:
    """One run with all its steps recorded and its rounds merged."""
    paths = new_run(root, f"synthetic-{number}")
    rng = np.random.default_rng(number)
    store.append(paths, "problems", "select", problems())
    for round_ in range(1, size.rounds + 1):
        for step in range(1, size.steps + 1):
            record_step(paths, rng, round_, step, size.rows)
        write_result(paths, StageResult(f"round-{round_:02d}/refresh", seconds=1.0))
        store.compact(paths, round_, grace=0.0)
    return paths


def new_run(root: Path, run_id: str) -> RunPaths:
    paths = RunPaths(root, run_id)
    paths.directory.mkdir(parents=True)
    header = {"run_id": run_id, "recipe": {"name": "synthetic"}, "created_at": "2026-01-01T00:00:00+00:00"}
    paths.recipe_file.write_text(json.dumps(header))
    return paths


def problems() -> list[dict[str, object]]:
    """Rows of the problems table: five levels, problem ids that the rollouts name."""
    return [
        {
            "problem_id": problem_id(i), "problem": f"How many are {i} and {i + 1}?", "answer": str(2 * i + 1),
            "level": i % 5 + 1, "source": "synthetic", "split": "train", "prompt": f"Q{i}", "prompt_token_ids": [1, 2],
            "meta": "{}",
        }
        for i in range(PROBLEMS)
    ]  # fmt: skip


def problem_id(i: int) -> str:
    return f"{i * 2654435761 % 2**48:024x}"


def record_step(paths: RunPaths, rng: np.random.Generator, round_: int, step: int, rows: int) -> None:
    """Rollouts, rewards, advantages and updates of one step, with the results of its stages."""
    key = step_key(round_, step)
    rollouts = rollout_table(paths.run_id, f"{key}/rollout", rng, round_, step, rows)
    ids = rollouts.column("rollout_id")
    store.append(paths, "rollouts", f"{key}/rollout", rollouts)
    correct = rng.random(rows) < 0.2 + 0.1 * round_
    store.append(paths, "rewards", f"{key}/reward", reward_table(ids, correct, rng))
    credit = [pa.array((correct - 0.5).astype(np.float32)), pa.array(np.full(rows, 0.5)), pa.array(np.full(rows, 0.5))]
    flags = [pa.array(np.zeros(rows, bool)), pa.nulls(rows, pa.list_(pa.float32()))]
    store.append(
        paths, "advantages", f"{key}/update", pa.table([ids, *credit, *flags], schema=arrow_schema("advantages"))
    )
    metrics = {"loss": 0.1, "kl": 0.01, "logprob_gap_mean": 1e-4, "logprob_gap_max": 1e-2, "ess": 0.99, "epoch": 0}
    store.append(paths, "updates", f"{key}/update", [update_row(paths.run_id, f"{key}/update", round_, step, metrics)])
    for stage in ("rollout", "reward", "update"):
        write_result(paths, StageResult(f"{key}/{stage}", seconds=1.0))


def reward_table(ids: pa.ChunkedArray, correct: np.ndarray, rng: np.random.Generator) -> pa.Table:
    rows = len(correct)
    scores = [correct.astype(float), (rng.random(rows) < 0.9).astype(float), rng.random(rows)]
    values = pa.array(np.stack(scores, 1).reshape(-1))
    names = pa.array(["accuracy", "format", "reward_model"] * rows)
    maps = pa.MapArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * 3), names, values)
    nothing = [pa.nulls(rows, pa.list_(pa.float64())), pa.nulls(rows, pa.list_(pa.int32()))]
    answers = pa.array(rng.integers(0, 500, rows).astype(str))
    status = pa.array(np.where(correct, "correct", "incorrect"))
    columns = [ids, scores[0] + 0.1 * scores[1], correct, status, answers, maps, *nothing, np.full(rows, 1e-3)]
    return pa.table([c if isinstance(c, (pa.Array, pa.ChunkedArray)) else pa.array(c) for c in columns],
                    schema=arrow_schema("rewards"))  # fmt: skip


def rollout_table(
    run_id: str, key: str, rng: np.random.Generator, round_: int | None, step: int | None, rows: int
) -> pa.Table:
    """Rollouts of ``TOKENS`` tokens on average, in groups of ``GROUP``, a third of them twins of another's tokens."""
    lengths = rng.integers(TOKENS // 2, TOKENS * 3 // 2 + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = rng.zipf(1.3, offsets[-1]).astype(np.uint64) % VOCABULARY
    asked = np.repeat(rng.integers(0, PROBLEMS, rows // GROUP), GROUP)
    words = WORDS[rng.integers(0, len(WORDS), (rows, 24))]
    values = {
        "rollout_id": hex_ids(rng, rows), "run_id": run_id, "stage": key, "purpose": "train", "round": round_,
        "step": step, "group_id": repeated(hex_ids(rng, rows // GROUP)),
        "problem_id": pa.array([problem_id(i) for i in range(PROBLEMS)]).take(pa.array(asked)),
        "sample_index": np.tile(np.arange(GROUP), rows // GROUP), "seed": rng.integers(0, 2**62, rows),
        "policy_version": f"round-{round_}-step-{step}", "policy_checksum": "0" * 16, "engine": "transformers",
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 96,
        "prompt_token_ids": lists(np.arange(rows + 1, dtype=np.int32) * 24, rng.integers(0, VOCABULARY, rows * 24)),
        "completion_token_ids": lists(offsets, tokens),
        "sampling_logprobs": pa.ListArray.from_arrays(offsets, -rng.exponential(0.3, offsets[-1]).astype(np.float32)),
        "finish_reason": np.where(lengths > 90, "length", "stop"), "text": [" ".join(row) for row in words.tolist()],
        "seconds": rng.random(rows),
    }  # fmt: skip
    return pa.table(
        [column(values[f.name], f.type, rows) for f in arrow_schema("rollouts")], schema=arrow_schema("rollouts")
    )


def column(value: object, type_: pa.DataType, rows: int) -> pa.Array:
    if isinstance(value, pa.Array):
        return value
    return pa.array(value, type_) if isinstance(value, (np.ndarray, list)) else pa.repeat(pa.scalar(value, type_), rows)


def lists(offsets: np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int32)))


def hex_ids(rng: np.random.Generator, count: int) -> pa.Array:
    """Random ids of 24 hexadecimal digits."""
    text = rng.bytes(12 * count).hex().encode()
    offsets = np.arange(count + 1, dtype=np.int32) * 24
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text))


def repeated(ids: pa.Array) -> pa.Array:
    return ids.take(pa.array(np.repeat(np.arange(len(ids)), GROUP)))


def copies(root: Path, run: RunPaths, count: int) -> None:
    """``count`` runs with the files of one, each under its own name."""
    for number in range(count):
        target = root / f"run-{number:04d}"
        shutil.copytree(run.directory, target)
        header = run.header | {"run_id": target.name}
        (target / "recipe.json").write_text(json.dumps(header))


def rollout_rows(rows: int) -> list[dict[str, object]]:
    """Rollouts as the stages hand them over: one mapping a completion."""
    table = rollout_table("run", "key", np.random.default_rng(0), 1, 1, rows)
    return table.to_pylist()
