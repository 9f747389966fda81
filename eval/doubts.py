"""What a reader should doubt in a run's figures, each as one sentence with its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.gather import Evaluation, RunFacts

FEW_PROBLEMS = 200
WIDE_POINTS = 5.0
"""Half widths of intervals above this many points hide most differences between recipes."""
UNSCORED, TRUNCATED, GAP, ZERO_VARIANCE = 0.01, 0.05, 0.02, 0.5


def doubts(run: RunFacts) -> list[str]:
    """Sentences, the weightiest first. There is always at least one: a run is one seed."""
    found: list[str] = []
    for benchmark in run.benchmarks:
        evaluations = [e for e in run.evaluations if e.benchmark == benchmark]
        found += _few_problems(benchmark, evaluations) + _overlap(benchmark, evaluations)
        for evaluation in evaluations:
            found += _evaluation(evaluation)
    found += _training(run)
    found += [f"{row['times']:,} × {row['severity']} ({row['kind']}), the last: {row['message']}" for row in run.events]
    if not run.evaluations:
        found.append("No evaluation is complete: nothing here says how good the policy is.")
    found.append(
        f"One training seed (seed {run.recipe['seed']}): the intervals hold for other problems and completions, "
        f"not for another training of the same recipe."
    )
    return found


def _few_problems(benchmark: str, evaluations: list[Evaluation]) -> list[str]:
    rows = [row for e in evaluations if (row := e.get("pass@k", 1))]
    if not rows:
        return []
    problems = min(row["n_problems"] for row in rows)
    half = max(50 * (row["high"] - row["low"]) for row in rows)
    if problems >= FEW_PROBLEMS and half <= WIDE_POINTS:
        return []
    return [
        f"{benchmark}: {problems} problems give pass@1 within ±{half:.1f} points at 95 %; smaller differences between "
        f"checkpoints are only told by the paired comparison, if at all."
    ]


def _overlap(benchmark: str, evaluations: list[Evaluation]) -> list[str]:
    flagged = [row for e in evaluations[-1:] if (row := e.get("pass@k", 1, "contaminated=yes"))]
    return [
        f"{benchmark}: {row['n_problems']} problems are flagged as contaminated by selection; "
        f"their pass@1 is {100 * row['value']:.1f} %."
        for row in flagged
    ]


def _evaluation(evaluation: Evaluation) -> list[str]:
    found = []
    where = f"{evaluation.benchmark}, {evaluation.checkpoint}"
    unscored, truncated = evaluation.get("unscored_share"), evaluation.get("truncated_share")
    if unscored and unscored["value"] > UNSCORED:
        found.append(f"{where}: {100 * unscored['value']:.1f} % of the completions have no verdict and count nowhere.")
    if truncated and truncated["value"] > TRUNCATED:
        found.append(
            f"{where}: {100 * truncated['value']:.1f} % of the completions were cut at the length limit; "
            f"a longer limit would measure another accuracy."
        )
    return found


def _training(run: RunFacts) -> list[str]:
    found = []
    steps = run.steps
    found += _hacking(steps)
    unscored = [row["unscored_share"] for row in steps if row["unscored_share"]]
    if unscored and max(unscored) > UNSCORED:
        found.append(
            f"Training: up to {100 * max(unscored):.1f} % of a step's completions were unscored and not learnt from."
        )
    gaps = [row["gap_mean"] for row in steps if row["gap_mean"] is not None]
    if gaps and max(gaps) > GAP:
        found.append(
            f"Training: sampler and learner differ by up to {max(gaps):.3f} nats a token on average; "
            f"updates are off-policy by that much."
        )
    flat = [row["zero_variance_share"] for row in steps if row["zero_variance_share"] is not None]
    if flat and sum(flat) / len(flat) > ZERO_VARIANCE:
        found.append(
            f"Training: {100 * sum(flat) / len(flat):.0f} % of the groups had equal rewards and taught nothing "
            f"(too easy or too hard problems)."
        )
    newest = {row["model"]: row for row in run.reward_models}
    for model, row in newest.items():
        if row.get("auc") is not None and row["auc"] < 0.6:
            found.append(
                f"Reward model ({model}): its AUC on held-out rollouts ends at {row['auc']:.2f}, little better than chance."
            )
    return found


def _hacking(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The reward rose while correctness fell, from the first quarter of the steps to the last."""
    rows = [row for row in steps if row["reward"] is not None and row["correct"] is not None]
    quarter = len(rows) // 4
    if not quarter:
        return []
    reward, correct = (
        [sum(row[name] for row in part) / quarter for part in (rows[:quarter], rows[-quarter:])]
        for name in ("reward", "correct")
    )
    if reward[1] <= reward[0] or correct[1] >= correct[0]:
        return []
    return [
        f"Training: the mean reward rose from {reward[0]:.3g} to {reward[1]:.3g} (first and last quarter of the steps) while "
        f"the correct share fell from {100 * correct[0]:.1f} to {100 * correct[1]:.1f} %: something else than correctness is "
        f"being learnt; look at the reward components."
    ]
