"""Rollout: put problems to the policy and record every completion. Also used by every other stage that samples."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from pipeline import store
from pipeline.protocols import Progress, Sampler, SamplingParams, no_progress
from pipeline.rundir import RunPaths, StageContext
from pipeline.seeds import content_id
from pipeline.types import Completion, Problem, Purpose, Rollout, StageResult

logger = logging.getLogger(__name__)

SHARD = 256
"""Completions sampled and recorded together: what a crash can cost. Fixed, so that a resumed stage samples the same."""


def run(
    context: StageContext, sampler: Sampler, tokenizer: Any, problems: Sequence[Problem], round_: int, step: int
) -> StageResult:
    """Sample G completions of each of the step's problems with the current policy."""
    config = context.recipe.grpo
    rows = sample_problems(
        context, sampler, tokenizer, problems, samples=config.group_size, purpose="train",
        params=training_params(context), round_=round_, step=step,
    )  # fmt: skip
    return StageResult(context.key, metrics=rollout_metrics(rows))


def training_params(context: StageContext) -> SamplingParams:
    """How training rollouts are drawn."""
    config = context.recipe.sampler
    return SamplingParams(
        max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k,
        min_p=config.min_p, stop=tuple(config.stop),
    )  # fmt: skip


def draw_problems(context: StageContext, problems: Sequence[Problem], count: int) -> list[Problem]:
    """Up to ``count`` of the problems, drawn by the stage's seed: the same in every attempt."""
    return random.Random(context.seed("problems")).sample(list(problems), min(count, len(problems)))


def sample_problems(
    context: StageContext,
    sampler: Sampler,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    samples: int,
    purpose: Purpose,
    params: SamplingParams,
    round_: int | None = None,
    step: int | None = None,
    first_part: int = 0,
    first_index: int = 0,
) -> list[Rollout]:
    """Record ``samples`` completions a problem under the stage's key, a shard at a time; returns them all.

    A shard that is already on disk was recorded by an attempt that a crash ended: it is read, never sampled again.
    """
    problems_per_shard = max(1, SHARD // samples)
    shards = [problems[i : i + problems_per_shard] for i in range(0, len(problems), problems_per_shard)]
    total, done = len(problems) * samples, 0
    for number, shard in enumerate(shards):
        part = first_part + number
        if not store.has(context.paths, "rollouts", context.key, part):
            indices = range(first_index, first_index + samples)
            seeds = [[context.seed(p.problem_id, index) for index in indices] for p in shard]
            prompts = [p.prompt_token_ids for p in shard]
            progress = _offset(context.progress or no_progress, done, total)
            if context.meter:
                context.meter.before_sampling(context.key, len(shard) * samples, params.max_tokens)
            completions = sampler.sample(prompts, params, seeds, progress)
            rows = _rows(
                context, sampler, tokenizer, shard, completions, seeds, purpose, params, round_, step, first_index
            )
            store.append(context.paths, "rollouts", context.key, rows, part=part)
            if context.meter:
                context.meter.sampled(sum(len(row.completion_token_ids) for row in rows))
        done += len(shard) * samples
    last_index = first_index + samples
    return [r for r in read_rollouts(context.paths, context.key) if first_index <= r.sample_index < last_index]


def read_rollouts(paths: RunPaths, key: str) -> list[Rollout]:
    """The recorded rollouts of a stage, in the order they were recorded."""
    return [Rollout(**row) for row in store.read(paths, "rollouts", key).to_pylist()]


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What a rollout stage tells: counts, mean length in tokens, truncated share, seconds of sampling."""
    tokens = sum(len(r.completion_token_ids) for r in rollouts)
    count = max(1, len(rollouts))
    return {
        "rollouts": len(rollouts),
        "completion_tokens": tokens,
        "completion_length": tokens / count,
        "truncated_share": sum(r.finish_reason == "length" for r in rollouts) / count,
        "policy_version": rollouts[0].policy_version if rollouts else "",
    }


def _rows(
    context: StageContext,
    sampler: Sampler,
    tokenizer: Any,
    problems: Sequence[Problem],
    completions: Sequence[Sequence[Completion]],
    seeds: Sequence[Sequence[int]],
    purpose: Purpose,
    params: SamplingParams,
    round_: int | None,
    step: int | None,
    first_index: int,
) -> list[Rollout]:
    run_id, version = context.paths.run_id, sampler.version
    rows = []
    for problem, group, group_seeds in zip(problems, completions, seeds, strict=True):
        group_id = content_id(run_id, context.key, problem.problem_id)
        texts = tokenizer.batch_decode([list(c.token_ids) for c in group], skip_special_tokens=True)
        for offset, (completion, seed, text) in enumerate(zip(group, group_seeds, texts, strict=True)):
            index = first_index + offset
            rollout = Rollout(
                rollout_id=content_id(run_id, context.key, problem.problem_id, index),
                run_id=run_id, stage=context.key, purpose=purpose, round=round_, step=step, group_id=group_id,
                problem_id=problem.problem_id, sample_index=index, seed=seed, policy_version=version.name,
                policy_checksum=version.checksum, engine=context.recipe.sampler.engine, temperature=params.temperature,
                top_p=params.top_p, top_k=params.top_k, min_p=params.min_p, max_tokens=params.max_tokens,
                prompt_token_ids=list(problem.prompt_token_ids), completion_token_ids=list(completion.token_ids),
                sampling_logprobs=list(completion.logprobs), finish_reason=completion.finish_reason, text=text,
                seconds=completion.seconds,
            )  # fmt: skip
            rows.append(rollout)
    return rows


def _offset(progress: Progress, before: int, total: int) -> Progress:
    started = time.monotonic()

    def report(done: int, _: int, note: str = "") -> None:
        rate = done / max(1e-9, time.monotonic() - started)
        progress(before + done, total, note or f"{rate:.0f} completions/s")

    return report
