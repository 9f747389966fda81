"""Evaluate: samples and a greedy completion of every held-out problem, scored, summarised with intervals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eval.summary import Measure, Sampled, summarise
from pipeline import store
from pipeline.protocols import Sampler, SamplingParams
from pipeline.rundir import StageContext
from pipeline.seeds import derive_seed
from pipeline.types import Problem, Reward, Rollout, StageResult
from rewards.measures import logit
from rewards.scoring import Scorer
from stages.reward import reward_metrics, score_rollouts
from stages.rollout import rollout_metrics, sample_problems

GREEDY_PART = 100_000
"""First part number of the greedy completions; samples take the numbers below."""


def run(
    context: StageContext,
    sampler: Sampler,
    tokenizer: Any,
    scorer: Scorer,
    problems: Sequence[Problem],
    *,
    checkpoint: str,
) -> StageResult:
    """Evaluate the policy that the sampler holds. A killed evaluation continues with the problems that are left."""
    chosen = choose(context, problems)
    rollouts = _sample(context, sampler, tokenizer, chosen)
    rewards = score_rollouts(context, scorer, chosen, rollouts)
    rows = [sampled(r, v) for r, v in zip(rollouts, rewards, strict=True)]
    benchmark = "+".join(sorted({problem.source for problem in chosen}))
    measures = summarise({p.problem_id: p for p in chosen}, rows, context.recipe.evaluate, context.seed("bootstrap"))
    if not store.has(context.paths, "evaluations", context.key):
        table = [_row(context, measure, checkpoint, benchmark) for measure in measures]
        store.append(context.paths, "evaluations", context.key, table)
    return StageResult(
        context.key,
        metrics={
            **rollout_metrics(rollouts), **reward_metrics(rewards), "checkpoint": checkpoint, "benchmark": benchmark,
            **{_name(m): [m.value, m.low, m.high] for m in measures if m.slice == "all"},
        },
    )  # fmt: skip


def choose(context: StageContext, problems: Sequence[Problem]) -> list[Problem]:
    """The held-out problems of every evaluation of this run: the same for each checkpoint, so comparisons are paired."""
    limit = context.recipe.evaluate.problems
    if limit is None or limit >= len(problems):
        return list(problems)
    return random.Random(derive_seed(context.recipe.seed, "evaluate")).sample(list(problems), limit)


def sampled(rollout: Rollout, reward: Reward) -> Sampled:
    """What the metrics need to know of one scored completion."""
    outcome, process = (reward.components.get(name) for name in ("reward_model", "process_model"))  # probabilities
    return Sampled(
        problem_id=rollout.problem_id,
        sample_index=rollout.sample_index,
        answer=reward.answer,
        correct=reward.correct,
        status=reward.status,
        finish_reason=rollout.finish_reason,
        n_tokens=len(rollout.completion_token_ids),
        reward_model_score=None if outcome is None else logit(outcome),
        process_model_score=None if process is None else logit(process),
        greedy=rollout.temperature == 0,
    )


def _sample(context: StageContext, sampler: Sampler, tokenizer: Any, problems: Sequence[Problem]) -> list[Rollout]:
    config, engine = context.recipe.evaluate, context.recipe.sampler
    max_tokens = config.max_tokens or engine.max_tokens
    params = SamplingParams(
        max_tokens=max_tokens, temperature=config.temperature, top_p=config.top_p, stop=tuple(engine.stop)
    )
    rollouts = sample_problems(
        context, sampler, tokenizer, problems, samples=config.samples, purpose="evaluate", params=params
    )
    if config.greedy:
        greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=tuple(engine.stop))
        rollouts += sample_problems(
            context, sampler, tokenizer, problems, samples=1, purpose="evaluate", params=greedy,
            first_part=GREEDY_PART, first_index=config.samples,
        )  # fmt: skip
    return rollouts


def _name(measure: Measure) -> str:
    return measure.metric.replace("@k", f"@{measure.k}") if measure.k is not None else measure.metric


def _row(context: StageContext, measure: Measure, checkpoint: str, benchmark: str) -> dict[str, Any]:
    return {
        "run_id": context.paths.run_id, "stage": context.key, "checkpoint": checkpoint, "benchmark": benchmark,
        "temperature": context.recipe.evaluate.temperature, **asdict(measure),
    }  # fmt: skip
