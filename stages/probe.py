"""Probe: how hard the training problems are for the warm start, asked before the first round when no history tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.protocols import Sampler
from pipeline.rundir import StageContext
from pipeline.types import Problem, StageResult
from rewards.scoring import Scorer
from stages.reward import reward_metrics, score_rollouts
from stages.rollout import draw_problems, rollout_metrics, sample_problems, training_params


def run(
    context: StageContext, sampler: Sampler, tokenizer: Any, scorer: Scorer, problems: Sequence[Problem]
) -> StageResult:
    """Sample ``probe_samples`` completions of the probed problems and judge them: the curriculum reads their pass rates.

    They are rollouts like any others, of purpose "probe" and of no round.
    """
    config = context.recipe.data.curriculum
    chosen = draw_problems(context, problems, config.probe_problems or len(problems))
    rollouts = sample_problems(
        context, sampler, tokenizer, chosen, samples=config.probe_samples, purpose="probe",
        params=training_params(context),
    )  # fmt: skip
    rewards = score_rollouts(context, scorer, chosen, rollouts)
    return StageResult(context.key, metrics={**rollout_metrics(rollouts), **reward_metrics(rewards)})
