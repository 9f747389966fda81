"""What a run must not overlook: steps without scores, steps without differences, and a learnt reward that drifts."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config import RewardConfig
from pipeline.events import Event, RunStopped
from pipeline.types import Reward, Rollout
from rewards.measures import auc

logger = logging.getLogger(__name__)


class StepWatch:
    """Looks at each step's rewards. Warns, or stops the run with RunStopped, as the recipe says."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.events: list[Event] = []  # warnings, for the store; taken by the scorer
        self._equal_steps = 0

    def check_unscored(self, rewards: Sequence[Reward], faults: Counter[str]) -> None:
        """More than ``max_unscored`` of the rewards are None; ``faults`` tells the causes."""
        unscored = sum(reward.reward is None for reward in rewards)
        if unscored <= self.config.max_unscored * len(rewards):
            return
        causes = ", ".join(f"{key} {count}" for key, count in faults.most_common(3)) or "no fault was counted"
        message = (
            f"{unscored} of {len(rewards)} rollouts are unscored, more than rewards.max_unscored = "
            f"{self.config.max_unscored:g} allows (most frequent: {causes}): mend that component, remove its weight, or "
            f"raise rewards.max_unscored"
        )
        share = unscored / len(rewards)
        if self.config.unscored_action == "stop":
            message += '; rewards.unscored_action = "warn" carries on'
            raise RunStopped(Event("unscored", "error", message, share, self.config.max_unscored))
        self._warn(Event("unscored", "warning", message, share, self.config.max_unscored))

    def check_equal(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> None:
        """All rewards of a training step were equal, ``equal_steps`` times in a row."""
        pairs = zip(rollouts, rewards, strict=True)
        values = [given.reward for rollout, given in pairs if rollout.purpose == "train" and given.reward is not None]
        if len(values) < 2 or not self.config.equal_steps:
            return
        self._equal_steps = self._equal_steps + 1 if max(values) - min(values) < 1e-9 else 0
        if self._equal_steps < self.config.equal_steps:
            return
        message = (
            f"all {len(values)} rewards of a step were equal ({values[0]:g}) for {self._equal_steps} steps in a row: "
            f"the policy learns nothing. Look at the rollouts and their verdicts: are the answers unparsable, or the "
            f"problems all too hard or all too easy?"
        )
        steps, limit = float(self._equal_steps), float(self.config.equal_steps)
        if self.config.equal_action == "stop":
            message += '; rewards.equal_action = "warn" carries on'
            raise RunStopped(Event("equal_rewards", "error", message, steps, limit))
        self._warn(Event("equal_rewards", "warning", message, steps, limit))

    def _warn(self, event: Event) -> None:
        logger.warning(event.message)
        self.events.append(event)


def summarise_learnt(rewards: Sequence[Reward], component: str = "reward_model") -> dict[str, float | int | None]:
    """How a learnt component stands to the verifier's verdicts over the rewards of, say, a round.

    ``score`` and ``correct``: their means, ``score_error`` and ``correct_error`` the standard errors of these;
    ``correlation``: Pearson's, of score and verdict (point-biserial), ``auc``: chance that a correct rollout scores above
    a wrong one. None where undefined; rollouts that either of the two left unscored do not count.
    """
    pairs = [
        (value, reward.correct)
        for reward in rewards
        if reward.correct is not None and (value := reward.components.get(component)) is not None
    ]
    if not pairs:
        return {"rollouts": 0}
    score, truth = np.array([value for value, _ in pairs]), np.array([correct for _, correct in pairs])
    varied = score.std() > 0 and truth.std() > 0
    return {
        "rollouts": len(pairs),
        "score": float(score.mean()),
        "score_error": float(score.std() / math.sqrt(len(pairs))),
        "correct": float(truth.mean()),
        "correct_error": float(truth.std() / math.sqrt(len(pairs))),
        "correlation": float(np.corrcoef(score, truth)[0, 1]) if varied else None,
        "auc": auc(score, truth),
    }


def drift(
    before: Mapping[str, float | int | None], after: Mapping[str, float | int | None], component: str = "reward_model"
) -> str | None:
    """A warning when the learnt reward rose while correctness fell, each by more than two standard errors; else None.

    ``before`` and ``after`` are two rounds of ``summarise_learnt``, scored by the same model: a refresh moves the scale.
    """
    if not (before.get("rollouts") and after.get("rollouts")):
        return None
    rise, fall = _change(before, after, "score"), -_change(before, after, "correct")
    if rise <= 2.0 or fall <= 2.0:
        return None
    return (
        f"{component} rose from {before['score']:.3f} to {after['score']:.3f} while the share of correct rollouts fell "
        f"from {before['correct']:.3f} to {after['correct']:.3f}: the policy exploits the learnt reward. Keep "
        f"rewards.reward_model_pays at mixed_groups, lower rewards.weights.{component}, or refresh it more often"
    )


def _change(before: Mapping[str, float | int | None], after: Mapping[str, float | int | None], name: str) -> float:
    """The difference of two means in standard errors of the difference; 0 / 0 is 0."""
    difference = (after[name] or 0.0) - (before[name] or 0.0)
    error = math.hypot(after[f"{name}_error"] or 0.0, before[f"{name}_error"] or 0.0)
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0
