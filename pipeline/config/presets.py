"""Full sets of choices for ``grpo.objective`` and ``grpo.advantages``, by name.

``grpo.preset = "modern"`` in a recipe (or ``--set grpo.preset=modern``) stands for every field of the set. It is taken
apart when the recipe is read, so that the resolved recipe shows the fields alone; like any value, it replaces what a
base recipe says and gives way to fields named beside it or later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.training import AdvantageConfig, ObjectiveConfig

PAPER = (
    ObjectiveConfig(
        algorithm="grpo", ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.2, delta=None,
        aggregation="sequence_mean", kl_coefficient=0.04, kl_estimator="k3", kl_weighted=False, mismatch="none",
        mismatch_max=2.0, mismatch_min=0.0, mask_truncated=False,
    ),
    AdvantageConfig(supervision="outcome", scale="group", ddof=0, epsilon=1e-6),
)  # fmt: skip
"""arXiv 2402.03300: a ratio a token, clipped alike on both sides; the mean over a completion's tokens, then over
completions (eq. 3); KL to the reference in the loss, by k3 (eq. 4) at 0.04 (section 4.2); rewards less the group's mean
over its standard deviation (4.1.2; process supervision, 4.1.3, is ``grpo.advantages.supervision``). The paper names no
clip bound: 0.2 is PPO's (arXiv 1707.06347), and with one update an exploration, as there, nothing is clipped.

Worked: rewards (1, 0, 0, 0) have mean .25 and deviation .433: advantages 1.732 and three times -.577. On-policy, at the
reference, a completion of 10 tokens moves each of its tokens by a tenth of its advantage over the step's completions.
"""

MODERN = (
    ObjectiveConfig(
        algorithm="grpo", ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.28, delta=None,
        aggregation="token_mean", kl_coefficient=0.0, kl_estimator="k3", kl_weighted=False, mismatch="token_truncate",
        mismatch_max=2.0, mismatch_min=0.0, mask_truncated=True,
    ),
    AdvantageConfig(supervision="outcome", scale="batch", ddof=0, epsilon=1e-6),
)  # fmt: skip
"""DAPO (arXiv 2503.14476): no KL and so no reference model (2.3), the upper clip at 0.28 so that unlikely tokens can
grow (3.1), every token of the step weighs the same (3.3), truncated completions left out (3.4, overlong filtering).
Rewards less the group's mean over the *step's* deviation (arXiv 2508.08221; arXiv 2510.13786 chose it too):
a group's own makes a problem that is nearly always solved, or never, weigh most (Dr. GRPO, arXiv 2503.20783). Tokens are
weighed by min(2, learner's / sampler's probability) (truncated importance sampling,
https://fengyao.notion.site/off-policy-rl), which matters where another engine samples.

Worked: completions of 2 and 8 tokens share one weight a token, 1/10; under "paper" they have 1/4 and 1/16.
"""

PRESETS = {"paper": PAPER, "modern": MODERN}


def preset_fields(name: Any) -> dict[str, dict[str, Any]]:
    """The set's ``objective`` and ``advantages`` as recipe data; ValueError for a name that is none."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"grpo.preset is {name!r}: expected one of {', '.join(map(repr, PRESETS))}, or leave it out")
    objective, advantages = PRESETS[name]
    return {
        "objective": objective.model_dump(include=objective.model_fields_set),
        "advantages": advantages.model_dump(include=advantages.model_fields_set),
    }


def expand_preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe data with ``grpo.preset`` replaced by its fields; those that stand beside it win."""
    grpo = data.get("grpo")
    if not isinstance(grpo, Mapping) or "preset" not in grpo:
        return dict(data)
    given = {name: value for name, value in grpo.items() if name != "preset"}
    for section, fields in preset_fields(grpo["preset"]).items():
        beside = given.get(section, {})
        given[section] = {**fields, **beside} if isinstance(beside, Mapping) else beside
    return {**data, "grpo": given}
