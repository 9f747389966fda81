"""Small hand-made runs for the tests of the store: every value is chosen, nothing is drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import store
from pipeline.rows import update_row
from pipeline.rundir import RunPaths, step_key, write_result
from pipeline.types import StageResult


def new_run(root: Path, run_id: str, **header: Any) -> RunPaths:
    """A run with nothing but its recipe.json."""
    paths = RunPaths(root, run_id)
    paths.directory.mkdir(parents=True)
    paths.recipe_file.write_text(json.dumps({"run_id": run_id, "recipe": {"name": "hand-made"}, **header}))
    return paths


def rollout_row(paths: RunPaths, key: str, index: int = 0, **changes: Any) -> dict[str, Any]:
    """A rollout of three tokens of problem p0."""
    row = {
        "rollout_id": f"{paths.run_id}:{key}:{index}", "run_id": paths.run_id, "stage": key, "purpose": "train",
        "round": 1, "step": 1, "group_id": f"{paths.run_id}:{key}:g{index // 4}", "problem_id": f"p{index // 4}",
        "sample_index": index % 4, "seed": index, "policy_version": "warm-start", "policy_checksum": "c0",
        "engine": "transformers", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8,
        "prompt_token_ids": [1, 2], "completion_token_ids": [5, 6, 7 + index], "sampling_logprobs": [-0.5, -0.25, -1.0],
        "finish_reason": "stop", "text": f"the answer is {index}", "seconds": 0.5,
    }  # fmt: skip
    return row | changes


def reward_row(rollout_id: str, correct: bool | None, **changes: Any) -> dict[str, Any]:
    """A verdict; None is a grader that timed out."""
    status = {True: "correct", False: "incorrect", None: "timeout"}[correct]
    value = None if correct is None else float(correct)
    row = {
        "rollout_id": rollout_id, "reward": value, "correct": correct, "status": status, "answer": "42",
        "components": {"accuracy": value, "format": 1.0}, "seconds": 0.01,
    }  # fmt: skip
    return row | changes


def advantage_row(rollout_id: str, advantage: float | None = 0.5, **changes: Any) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id, "advantage": advantage, "group_mean": 0.5, "group_std": 0.5, "zero_variance": False,
    } | changes  # fmt: skip


def problem_row(problem_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "problem_id": problem_id, "problem": f"What is {problem_id}?", "answer": "42", "level": 1, "source": "hand",
        "split": "train", "prompt": f"<user>{problem_id}", "prompt_token_ids": [1, 2], "meta": "{}",
    } | changes  # fmt: skip


def record_step(paths: RunPaths, round_: int, step: int, verdicts: Sequence[bool | None], **changes: Any) -> list[str]:
    """A whole step (groups of four) with its results; returns the rollout ids."""
    key = step_key(round_, step)
    rows = [rollout_row(paths, f"{key}/rollout", i, round=round_, step=step, **changes) for i in range(len(verdicts))]
    ids = [row["rollout_id"] for row in rows]
    store.append(paths, "rollouts", f"{key}/rollout", rows)
    judge_step(paths, round_, step, ids, verdicts)
    credit_step(paths, round_, step, ids)
    for stage in ("rollout", "reward", "update"):
        write_result(paths, StageResult(f"{key}/{stage}", seconds=2.0))
    return ids


def judge_step(
    paths: RunPaths, round_: int, step: int, ids: Sequence[str], verdicts: Sequence[bool | None], **changes: Any
) -> None:
    rows = [reward_row(i, verdict, **changes) for i, verdict in zip(ids, verdicts, strict=True)]
    store.append(paths, "rewards", f"{step_key(round_, step)}/reward", rows)


def credit_step(paths: RunPaths, round_: int, step: int, ids: Sequence[str]) -> None:
    key = f"{step_key(round_, step)}/update"
    store.append(paths, "advantages", key, [advantage_row(i) for i in ids])
    metrics = {"loss": 0.25, "kl": 0.01, "tokens": 3.0 * len(ids), "epoch": 0, "minibatch": 0, "logprob_gap_max": 0.125}
    store.append(paths, "updates", key, [update_row(paths.run_id, key, round_, step, metrics)])


def finish_round(paths: RunPaths, round_: int) -> None:
    write_result(paths, StageResult(f"round-{round_:02d}/refresh", seconds=1.0))


def ids_of(rows: Sequence[Any]) -> list[str]:
    return sorted(row[0] for row in rows)
