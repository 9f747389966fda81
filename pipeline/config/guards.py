"""What a run is watched for, and what it may cost. Nothing here shapes a stage's work: it may change while a run goes on."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from pipeline.config.section import Section

Guard = Literal["kl", "entropy", "length", "truncated", "sampler_gap", "gradient_norm", "hacking", "non_finite"]
StageKind = Literal[
    "select", "sft", "reward_model", "process_model", "rollout", "reward", "update", "refresh", "reject", "regenerate",
    "evaluate",
]  # fmt: skip


class GuardsConfig(Section):
    """Figures watched after every training step: crossing a limit warns, unless ``off``, ``stop`` or ``go_back`` names it.

    Unscored rollouts and steps of equal rewards are watched by ``rewards.max_unscored`` and ``rewards.equal_steps``.
    """

    kl: float = Field(default=1.0, gt=0.0)
    """Largest mean KL(policy || reference) of a step, in nats a token: how far a round may take the policy."""
    entropy: float = Field(default=0.005, ge=0.0)
    """Least mean entropy of the policy, in nats a token: below it, completions of a problem are nearly all the same."""
    length: float = Field(default=4.0, gt=1.0)
    """Factor by which the mean completion length may differ, up or down, from that of the run's first step."""
    truncated: float = Field(default=0.5, ge=0.0, le=1.0)
    """Largest share of a step's completions that are cut at ``sampler.max_tokens``."""
    sampler_gap: float = Field(default=0.1, gt=0.0)
    """Largest mean |learner - sampler| logprob of a step's tokens, in nats: how far off-policy the sampler may be."""
    gradient_norm: float = Field(default=100.0, gt=0.0)
    """Largest norm of a step's gradient before it is scaled down to ``learner.max_grad_norm``."""
    hacking: float = Field(default=0.1, ge=0.0, le=1.0)
    """Fall of the correct share that is let pass while the mean reward rises, from the older to the newer half of the
    round's last ``window`` steps. More says that something else than correctness is learnt."""
    window: int = Field(default=10, ge=2)
    """Steps that ``hacking`` looks at; longer sees slower drifts and takes longer to see any."""
    off: tuple[Guard, ...] = ()
    """Guards that are not watched, for example ["length"]. non_finite always is."""
    stop: tuple[Guard, ...] = ()
    """Guards that stop the run; the same command continues it once the limit is changed. non_finite (a gradient that is
    no number: nothing was learnt) stops it unless ``go_back`` names it."""
    go_back: tuple[Guard, ...] = ()
    """Guards that undo updates: the policy becomes that of the last checkpoint (see ``checkpoint_every``) before it
    crossed, of the same round, and the learning rate shrinks. The steps count as done and their rollouts stay."""
    lr_factor: float = Field(default=0.5, gt=0.0, le=1.0)
    """The learning rate of all later steps is multiplied by this each time the run goes back."""
    max_go_backs: int = Field(default=3, ge=1)
    """How often a run goes back; the next crossing stops it."""

    @model_validator(mode="after")
    def _check(self) -> GuardsConfig:
        for guard in get_args(Guard):
            named = [name for name in ("off", "stop", "go_back") if guard in getattr(self, name)]
            if len(named) > 1:
                raise ValueError(
                    f"guards.{named[0]} and guards.{named[1]} both name {guard!r}: leave it in one of them"
                )
        if "non_finite" in self.off:
            raise ValueError(
                "guards.off names 'non_finite': a policy that is no number cannot be trained on; name it in "
                "guards.go_back, or nowhere (it then stops the run)"
            )
        return self

    def action(self, guard: str) -> Literal["off", "warn", "stop", "go_back"]:
        """What crossing this guard's limit leads to."""
        if guard in self.go_back:
            return "go_back"
        if guard in self.stop or guard == "non_finite":
            return "stop"
        return "off" if guard in self.off else "warn"


class CostsConfig(Section):
    """The most a run may spend over all its processes. It stops before it would go over, and goes on once that is raised.

    A child run counts its own work, not what it inherits.
    """

    tokens: int | None = Field(default=None, ge=1)
    """Completion tokens sampled, those of reward models and evaluations too; None is no limit."""
    seconds: float | None = Field(default=None, gt=0.0)
    """Seconds of stages: of the complete ones, and of the one at work, which is ended when they are used up."""
    disk_gb: float | None = Field(default=None, gt=0.0)
    """GB (10^9 bytes) of the run's folder, looked at before each stage."""
