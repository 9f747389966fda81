"""TRL's GRPOTrainer on the same policy and prompts, its steps timed part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.config import Recipe


@dataclass(slots=True)
class Timing:
    """Seconds of one step: all of it, the sampling, and the rest (reference logprobs, update); completion tokens."""

    whole: float
    sampling: float
    tokens: float

    @property
    def update(self) -> float:
        return self.whole - self.sampling


def require_trl() -> None:
    if find_spec("trl") is None:
        raise SystemExit('the peer of this benchmark is TRL, which is not installed: pip install "grpoflow[test]"')


def trl_steps(
    folder: Path,
    prompts: list[str],
    recipe: Recipe,
    steps: int,
    micro_batch: int,
    scratch: Path,
    now: Callable[[], float],
) -> list[Timing]:
    """Timings of ``steps`` steps after a first one that warms up; ``now`` is the clock."""
    trainer = make_trainer(folder, prompts, recipe, steps + 1, micro_batch, scratch)
    clock = _Clock(now)
    trainer._generate = clock.timed("sampling", trainer._generate)
    trainer.add_callback(_callback(clock, trainer))
    trainer.train()
    return clock.steps[1:]


def make_trainer(folder: Path, prompts: list[str], recipe: Recipe, steps: int, micro_batch: int, scratch: Path) -> Any:
    """GRPOTrainer with the recipe's group size, KL and learning rate."""
    require_trl()
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    group, cpu = recipe.grpo.group_size, recipe.runtime.device == "cpu"
    bfloat16 = recipe.model.dtype == "bfloat16"
    batch = len(prompts) * group
    config = GRPOConfig(
        output_dir=str(scratch / "trl"), per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch, num_generations=group, max_steps=steps,
        beta=recipe.grpo.objective.kl_coefficient, loss_type="grpo", epsilon=0.2, max_grad_norm=1.0,
        max_completion_length=recipe.sampler.max_tokens, temperature=recipe.sampler.temperature, learning_rate=1e-6,
        lr_scheduler_type="constant", use_cpu=cpu, bf16=bfloat16 and not cpu, gradient_checkpointing=False,
        model_init_kwargs={"dtype": recipe.model.dtype}, report_to=[], save_strategy="no", logging_steps=10**6,
        disable_tqdm=True, shuffle_dataset=False, dataloader_pin_memory=False, seed=0,
    )  # fmt: skip
    return GRPOTrainer(
        model=str(folder), reward_funcs=[_length_parity], args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts] * (steps + 1)),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )  # fmt: skip


def _length_parity(completions: list[str], **_: Any) -> list[float]:
    """A reward that costs nothing and differs within groups."""
    return [float(len(completion) % 2) for completion in completions]


class _Clock:
    """Seconds by part of the running step, and the finished steps."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds = {"sampling": 0.0}
        self.started = 0.0
        self.steps: list[Timing] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += self.now() - started

        return run


def _callback(clock: _Clock, trainer: Any) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.seconds = dict.fromkeys(clock.seconds, 0.0)
            clock.started = clock.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            whole = clock.now() - clock.started
            lengths = trainer._metrics["train"]["completions/mean_length"]
            batch = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
            clock.steps.append(Timing(whole, clock.seconds["sampling"], lengths[-1] * batch))

    return Steps()
