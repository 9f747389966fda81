"""Guards: a training step's figures against the recipe's limits, and what follows: a warning, a stop, a step back.

A decision to go back is recorded in the result of the update that crossed (``went_back_to``, ``lr_scale``), and nothing
else remembers it: whoever continues or replays the run reads it there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.guards import GuardsConfig
from pipeline.events import Event, RunStopped
from pipeline.protocols import NotFinite
from pipeline.rundir import RunPaths, StageContext, read_result, step_key
from pipeline.types import StageResult
from stages.update import carried, update_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A training step as the guards see it; None where the recipe has no such figure."""

    kl: float | None = None
    entropy: float | None = None
    length: float | None = None
    truncated: float | None = None
    sampler_gap: float | None = None
    gradient_norm: float | None = None
    reward: float | None = None
    correct: float | None = None


@dataclass(frozen=True, slots=True)
class Crossing:
    """A guard, what was measured, what was allowed, and a sentence without its ending."""

    guard: str
    value: float
    limit: float | None
    message: str


ABOVE = {
    "kl": ("KL(policy || reference) is {:.3g} nats a token", "lower grpo.lr or raise grpo.objective.kl_coefficient"),
    "truncated": ("a share of {:.2f} of the completions was cut at the length limit", "raise sampler.max_tokens"),
    "sampler_gap": (
        "sampler and learner differ by {:.3g} nats a token", "look at the engines' dtypes or set grpo.objective.mismatch"
    ),
    "gradient_norm": ("the gradient's norm is {:.3g}", "lower grpo.lr, and look at the step's rewards"),
}  # fmt: skip
"""Guards with an upper limit: what was measured, and what to do about it."""


def crossings(
    config: GuardsConfig, now: StepFigures, first: StepFigures, recent: Sequence[StepFigures]
) -> list[Crossing]:
    """The limits that a step crosses.

    ``first`` is the run's first step, ``recent`` the round's last ``config.window`` steps, oldest first and the present
    one included. Figures that are missing cross nothing.
    """
    found = []
    for guard, (measured, advice) in ABOVE.items():
        value, limit = getattr(now, guard), getattr(config, guard)
        if value is not None and value > limit:
            found.append(
                Crossing(guard, value, limit, f"{measured.format(value)}, over guards.{guard} = {limit:g}: {advice}")
            )
    if now.entropy is not None and now.entropy < config.entropy:
        found.append(Crossing("entropy", now.entropy, config.entropy, (
            f"the policy's entropy is {now.entropy:.3g} nats a token, under guards.entropy = {config.entropy:g}: it has "
            f"nearly stopped exploring; raise grpo.objective.clip_high or sampler.temperature, or lower grpo.lr"
        )))  # fmt: skip
    found += _length(config, now.length, first.length) + _hacking(config, recent)
    return [crossing for crossing in found if config.action(crossing.guard) != "off"]


def _length(config: GuardsConfig, now: float | None, first: float | None) -> list[Crossing]:
    if not now or not first or 1 / config.length <= now / first <= config.length:
        return []
    return [Crossing("length", now / first, config.length, (
        f"completions have {now:.0f} tokens on average and had {first:.0f} in the first step, a factor over guards.length "
        f"= {config.length:g}: read some of them (grpoflow sql --named longest_correct)"
    ))]  # fmt: skip


def _hacking(config: GuardsConfig, recent: Sequence[StepFigures]) -> list[Crossing]:
    """The mean reward rose and the correct share fell, from the older to the newer half of a full window."""
    pairs = [(step.reward, step.correct) for step in recent if step.reward is not None and step.correct is not None]
    half = config.window // 2
    if len(pairs) < config.window:
        return []
    old, new = ([sum(values) / half for values in zip(*part, strict=True)] for part in (pairs[:half], pairs[-half:]))
    fall = old[1] - new[1]
    if new[0] <= old[0] or fall <= config.hacking:
        return []
    return [Crossing("hacking", fall, config.hacking, (
        f"over the last {config.window} steps the mean reward rose from {old[0]:.3g} to {new[0]:.3g} while the correct "
        f"share fell from {old[1]:.2f} to {new[1]:.2f}, by more than guards.hacking = {config.hacking:g}: something else "
        f"than correctness is learnt; look at the reward's components (grpoflow sql --named components)"
    ))]  # fmt: skip


def watch(context: StageContext, update: Callable[[], StageResult], round_: int, step: int) -> StageResult:
    """Run a step's update under the guards; the result's metrics say where the policy goes back to, if it does.

    Raises RunStopped when a guard stops the run: the step then is not complete.
    """
    config = context.recipe.guards
    try:
        result, found = _finite(update())
        found += crossings(config, *_steps(context, result, round_, step))
    except NotFinite as error:
        result = StageResult(context.key)
        found = [Crossing("non_finite", error.value, None, f"{error}: nothing was learnt in this step; lower grpo.lr")]
    state = carried(context, round_, step)
    target = None
    for crossing in sorted(found, key=lambda crossing: config.action(crossing.guard) == "stop"):
        action = config.action(crossing.guard)
        if action == "stop" or (action == "go_back" and state.get("times_back", 0) >= config.max_go_backs):
            raise RunStopped(_stop(crossing, config, context.key))
        ending = ""
        if action == "go_back":
            target = last_good(context, round_, step)
            ending = f"; gone back to the policy after update {target}, learning rate x {config.lr_factor:g}"
        _warn(context, crossing, ending)
    if target is not None:
        state = {
            "lr_scale": state.get("lr_scale", 1.0) * config.lr_factor, "times_back": state.get("times_back", 0) + 1,
            "went_back_to": target,
        }  # fmt: skip
    return replace(result, metrics={**result.metrics, **state})


def _finite(result: StageResult) -> tuple[StageResult, list[Crossing]]:
    """The result without figures that are no number, and a crossing when there were some."""
    bad = {n: v for n, v in result.metrics.items() if isinstance(v, float) and not math.isfinite(v)}
    if not bad:
        return result, []
    metrics = {name: value for name, value in result.metrics.items() if name not in bad}
    message = f"{', '.join(bad)} of the update is no finite number; lower grpo.lr"
    return replace(result, metrics=metrics), [Crossing("non_finite", next(iter(bad.values())), None, message)]


def last_good(context: StageContext, round_: int, step: int) -> int:
    """How many updates are behind the policy that a step which crossed goes back to.

    A step measures the policy it began with, so that one is not good; the steps since the last checkpoint before it are
    not either for certain. Never before the head of the round: reference and reward model are those of the round.
    """
    steps, every = context.recipe.grpo.steps, context.recipe.checkpoint_every
    head = (round_ - 1) * steps
    position = _standing(context.paths, head + step - 1, head, steps)
    while position > head:
        position = _standing(context.paths, position - 1, head, steps)
        if (position - head) % every == 0:
            break
    return position


def went_back_to(paths: RunPaths, updates: int, steps: int) -> int | None:
    """Where the policy went back to at update number ``updates`` of rounds of ``steps``; None when that update holds."""
    result = read_result(paths, update_key(updates, steps)) if updates else None
    return None if result is None else result.metrics.get("went_back_to")


def _standing(paths: RunPaths, position: int, head: int, steps: int) -> int:
    """The last update that is in the policy after ``position`` updates, those that were undone passed over."""
    while position > head and (back := went_back_to(paths, position, steps)) is not None:
        position = back
    return position


def _steps(
    context: StageContext, result: StageResult, round_: int, step: int
) -> tuple[StepFigures, StepFigures, list[StepFigures]]:
    """The present step, the run's first one, and the last ones of the round."""
    since = max(1, step - context.recipe.guards.window + 1)
    recent = [_figures(context.paths, round_, number) for number in range(since, step)]
    now = _figures(context.paths, round_, step, result.metrics)
    return now, _figures(context.paths, 1, 1), [*recent, now]


def _figures(paths: RunPaths, round_: int, step: int, update: Any = None) -> StepFigures:
    """A step's figures from its results; those of the update only where they are given."""
    sampled, rewarded = (read_result(paths, f"{step_key(round_, step)}/{kind}") for kind in ("rollout", "reward"))
    update, drawn = update or {}, sampled.metrics if sampled else {}
    return StepFigures(
        kl=update.get("kl"), entropy=update.get("entropy"), length=drawn.get("completion_length"),
        truncated=drawn.get("truncated_share"), sampler_gap=update.get("logprob_gap_mean"),
        gradient_norm=update.get("grad_norm"), reward=rewarded.metrics.get("reward") if rewarded else None,
        correct=rewarded.metrics.get("correct") if rewarded else None,
    )  # fmt: skip


def _stop(crossing: Crossing, config: GuardsConfig, key: str) -> Event:
    why = f"guards.stop names {crossing.guard}"
    if config.action(crossing.guard) == "go_back":
        why = f"the run went back guards.max_go_backs = {config.max_go_backs} times"
    elif crossing.guard == "non_finite":
        why = 'guards.go_back = ["non_finite"] would go on from the last checkpoint'
    message = f"{key}: {crossing.message} ({why}; with that or the limit changed the same command continues)"
    return Event(crossing.guard, "error", message, _plain(crossing.value), crossing.limit)


def _warn(context: StageContext, crossing: Crossing, ending: str) -> None:
    logger.warning("%s: %s%s", context.key, crossing.message, ending)
    if context.tell:
        context.tell(
            Event(crossing.guard, "warning", crossing.message + ending, _plain(crossing.value), crossing.limit)
        )


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
