"""A run of the whole recipe small enough for a test: a policy that learns to answer 0 or 1, and is right half the time."""

from __future__ import annotations

import json
from pathlib import Path

from flows.console import Display
from flows.execute import execute
from flows.runs import open_run
from pipeline.config import Recipe
from pipeline.rundir import RunPaths, stage_keys

TINY = [
    "model.embedded.layers=1", "model.embedded.width=32", "model.embedded.heads=2", "model.embedded.kv_heads=1",
    "model.embedded.intermediate=64", "model.embedded.vocabulary=300", "warm_start.steps=40", "warm_start.batch_size=8",
    "warm_start.lr=1e-2", "warm_start.warmup_steps=2", "sampler.max_tokens=12", "reward_model.problems=6",
    "reward_model.samples=2", "grpo.rounds=2", "grpo.steps=3", "grpo.problems_per_step=4", "grpo.group_size=4",
    "grpo.warmup_steps=2", "reject.problems=6", "reject.samples=4", "reject.min_kept=1", "regenerate.steps=3",
    "regenerate.batch_size=4", "evaluate.samples=2", "evaluate.ks=[1, 2]", "evaluate.resamples=100",
    "checkpoint_every=2", "warm_start.checkpoint_every=12", "runtime.threads=1", "data.heldout_share=0.2",
]  # fmt: skip


def tiny_recipe(folder: Path) -> list[str]:
    """Overrides of the embedded recipe; the problems are written into ``folder``."""
    file = folder / "parity.jsonl"
    rows = [
        {
            "problem": f"{n}: odd 1, even 0",
            "answer": str(n % 2),
            "solution": f"\\boxed{{{n % 2}}}",
            "level": n // 25 + 1,
        }
        for n in range(100)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*TINY, f'data.sources=[{{name="file", path="{file}"}}]']


def tiny_run(
    root: Path, *overrides: str, run_id: str = "tiny", resume_from: str | None = None
) -> tuple[Recipe, RunPaths]:
    """Run the tiny recipe (or what is left of it) without Prefect."""
    changes = list(overrides) if resume_from else [*tiny_recipe(root), *overrides]
    recipe, paths = open_run(None if resume_from else "embedded", changes, run_id, resume_from, root)
    execute(recipe, paths, display=Display(len(stage_keys(recipe)), quiet=True))
    return recipe, paths
