"""``grpoflow evaluate --completions``: completions that were made elsewhere, judged by the verifier and summarised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.completions import evaluate_completions, result_json, result_lines
from pipeline.config import RewardConfig
from pipeline.rundir import write_atomic
from rewards.workers import VerifierPool


def evaluate_file(
    file: Path, *, columns: Sequence[str] = (), ks: Sequence[int] | None = None, out: Path | None = None
) -> list[str]:
    """The table of the file's models, line by line; every measure goes to ``out`` as JSON.

    ``columns`` are "ours=theirs", such as "gold=answer". ValueError names what is wrong with the file or the mapping.
    """
    mapping = {}
    for column in columns:
        ours, separator, theirs = column.partition("=")
        if not separator or not theirs:
            raise ValueError(f"--column {column!r}: expected ours=theirs, for example gold=answer")
        mapping[ours.strip()] = theirs.strip()
    config = RewardConfig()
    with VerifierPool(config.workers, config.timeout, config.memory_mb) as pool:
        results = evaluate_completions(file, pool.judge_many, columns=mapping, ks=ks)
    if out is not None:
        write_atomic(out, result_json(results))
    return result_lines(results)
