"""A finished run written straight into the store: no model, known figures, hostile text in its completions."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.summary import Sampled, summarise
from pipeline import store
from pipeline.config import load_recipe
from pipeline.rows import update_row
from pipeline.rundir import RunPaths, write_atomic, write_result
from pipeline.types import Problem, Reward, Rollout, StageResult

HOSTILE = (
    "</pre></details><script>alert('x')</script><img src=x onerror=alert(1)> {{ 7 * 7 }} {% raw %} $\\frac{1}{ | `code`"
    " \x00\x1b[31m \u202egnirts desrever ]]> <!-- &amp; 'quoted' \"double\""
)
CHANCE = {"warm-start": 0.3, "round-01": 0.45, "round-02": 0.6, "final": 0.55}


def synthetic_run(
    root: Path,
    run_id: str = "synthetic",
    *,
    problems: int = 24,
    samples: int = 8,
    lift: float = 0.0,
    seed: int = 0,
    first_problem: int = 0,
    overrides: Sequence[str] = (),
) -> RunPaths:
    """Two rounds of three steps; each trained checkpoint answers correctly by chance as in ``CHANCE`` plus ``lift``."""
    sizes = [
        "grpo.rounds=2",
        "grpo.steps=3",
        f"evaluate.samples={samples}",
        f"evaluate.ks=[1,{samples}]",
        f"seed={seed}",
    ]
    recipe = load_recipe("embedded", [*sizes, *overrides])
    paths = RunPaths(root, run_id)
    header = {
        "run_id": run_id, "recipe": recipe.model_dump(mode="json"), "digest": recipe.digest,
        "created_at": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    write_atomic(paths.recipe_file, json.dumps(header))
    chosen = [_problem(first_problem + number) for number in range(problems)]
    rows = [
        {**asdict(p), "prompt_token_ids": list(p.prompt_token_ids), "meta": json.dumps(dict(p.meta))} for p in chosen
    ]
    store.append(paths, "problems", "select", rows)
    funnel = [
        {"rule": "read", "came_in": problems + 6, "set_aside": 0, "kept": problems + 6},
        {"rule": "duplicate", "came_in": problems + 6, "set_aside": 6, "kept": problems},
    ]
    _done(paths, "select", {"funnel": funnel})
    _done(paths, "sft", {"loss": 0.5})
    _done(paths, "reward_model", {"heldout/auc": 0.71, "heldout/rollouts": 40})
    rng = random.Random(derived(seed, run_id))
    _evaluate(paths, recipe, chosen, "warm-start", samples, CHANCE["warm-start"], rng)
    losses = [update_row(run_id, "sft", None, n, {"loss": 1 / n, "epoch": 0, "minibatch": n - 1}) for n in range(1, 6)]
    store.append(paths, "updates", "sft", losses)
    warning = {
        "run_id": run_id, "stage": "round-01/step-0001/reward", "round": 1, "step": 1, "kind": "equal_rewards",
        "severity": "warning", "message": "all rewards <equal>", "value": 0.0, "limit": 0.0, "at": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    store.append(paths, "events", "round-01/step-0001/reward", [warning])
    for round_ in (1, 2):
        for step in (1, 2, 3):
            _step(paths, chosen[:4], round_, step, rng)
        after = {"auc": 0.8, "pairwise_accuracy": 0.75, "calibration_error": 0.05, "brier": 0.2, "rollouts": 20}
        metrics = {f"before/{k}": v for k, v in {**after, "auc": 0.7}.items()} | {
            f"after/{k}": v for k, v in after.items()
        }
        _done(paths, f"round-{round_:02d}/refresh", metrics)
        name = f"round-{round_:02d}"
        _evaluate(paths, recipe, chosen, name, samples, CHANCE[name] + lift, rng)
    _evaluate(paths, recipe, chosen, "final", samples, CHANCE["final"] + lift, rng)
    return paths


def derived(*parts: Any) -> str:
    """A seed for ``random.Random``."""
    return "/".join(map(str, parts))


def _problem(number: int) -> Problem:
    return Problem(
        problem_id=f"p{number:03d}", problem=f"What is {number} + 1? <b>bold</b>", answer=str(number + 1),
        level=number % 3 + 1, subject=("sums & <more>", "$products")[number % 2], source="embedded", split="heldout",
        prompt="Q", prompt_token_ids=(1, 2, 3),
    )  # fmt: skip


def _step(paths: RunPaths, problems: Sequence[Problem], round_: int, step: int, rng: random.Random) -> None:
    base = f"round-{round_:02d}/step-{step:04d}"
    rollouts, rewards = [], []
    for problem in problems:
        for index in range(4):
            correct = rng.random() < 0.4
            rollout, reward = _pair(paths, f"{base}/rollout", problem, index, correct, "train", (round_, step), 1.0)
            rollouts.append(asdict(rollout))
            rewards.append(asdict(reward))
    store.append(paths, "rollouts", f"{base}/rollout", rollouts)
    store.append(paths, "rewards", f"{base}/reward", rewards)
    update = {
        "epoch": 0, "minibatch": 0, "kl": 0.01 * step, "entropy": 1.0 - 0.1 * step, "grad_norm": 0.5,
        "logprob_gap_mean": 1e-6, "logprob_gap_max": 1e-5, "lr": 1e-4,
    }  # fmt: skip
    store.append(paths, "updates", f"{base}/update", [update_row(paths.run_id, f"{base}/update", round_, step, update)])
    for kind in ("rollout", "reward", "update"):
        _done(paths, f"{base}/{kind}", {})


def _evaluate(
    paths: RunPaths,
    recipe: Any,
    problems: Sequence[Problem],
    name: str,
    samples: int,
    chance: float,
    rng: random.Random,
) -> None:
    key = f"evaluate/{name}"
    rollouts, rewards, rows = [], [], []
    for problem in problems:
        for index in range(samples + 1):
            temperature = 1.0 if index < samples else 0.0
            correct = rng.random() < chance
            rollout, reward = _pair(paths, key, problem, index, correct, "evaluate", (None, None), temperature)
            rollouts.append(asdict(rollout))
            rewards.append(asdict(reward))
            rows.append(
                Sampled(
                    problem.problem_id, index, reward.answer, correct, reward.status, "stop", 3, greedy=index == samples
                )
            )
    store.append(paths, "rollouts", key, rollouts)
    store.append(paths, "rewards", key, rewards)
    measures = summarise({p.problem_id: p for p in problems}, rows, recipe.evaluate, 0)
    store.append(paths, "evaluations", key, [
        {"run_id": paths.run_id, "stage": key, "checkpoint": name, "benchmark": "embedded", "temperature": 1.0, **asdict(m)}
        for m in measures
    ])  # fmt: skip
    _done(paths, key, {"checkpoint": name})


def _pair(
    paths: RunPaths,
    key: str,
    problem: Problem,
    index: int,
    correct: bool,
    purpose: Any,
    when: tuple[Any, Any],
    temperature: float,
) -> tuple[Rollout, Reward]:  # fmt: skip
    answer = problem.answer if correct else "wrong"
    rollout = Rollout(
        rollout_id=f"{paths.run_id}/{key}/{problem.problem_id}/{index}", run_id=paths.run_id, stage=key, purpose=purpose,
        round=when[0], step=when[1], group_id=f"{key}/{problem.problem_id}", problem_id=problem.problem_id,
        sample_index=index, seed=index, policy_version="v", policy_checksum="c", engine="fake", temperature=temperature,
        top_p=1.0, top_k=0, min_p=0.0, max_tokens=8, prompt_token_ids=[1, 2, 3], completion_token_ids=[4, 5, 6],
        sampling_logprobs=[-1.0, -1.0, -1.0], finish_reason="stop", text=f"It is \\boxed{{{answer}}}. {HOSTILE}",
    )  # fmt: skip
    reward = Reward(
        rollout.rollout_id,
        float(correct),
        correct,
        "correct" if correct else "incorrect",
        answer,
        {"verifier": float(correct)},
    )
    return rollout, reward


_clock = iter(range(10**6))


def _done(paths: RunPaths, key: str, metrics: dict[str, Any]) -> None:
    at = f"2026-01-01T00:{next(_clock):06d}"
    write_result(paths, StageResult(key, metrics=metrics, seconds=1.5, started_at=at, finished_at=at))
