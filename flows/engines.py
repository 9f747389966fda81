"""The engines of a run: opened when first needed, kept for the whole run, and where the policy stands.

The policy's position is the number of updates behind it, counted over all rounds. ``policy_after(n)`` brings the learner
there from wherever it is: nothing to do, or the newest intact checkpoint plus a replay of recorded updates.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.backends import open_learner, open_sampler
from pipeline.backends.probe import check_gap
from pipeline.config import Recipe
from pipeline.protocols import Learner, Sampler
from pipeline.rundir import RunPaths, StageContext, checkpoint_maker, step_key
from pipeline.types import Rollout
from rewards.components import LEARNT
from rewards.scoring import Scorer
from stages import update
from stages.checkpoint import (
    is_intact,
    named_when_full,
    prune_step_checkpoints,
    save_checkpoint,
    step_checkpoint,
)
from stages.guards import went_back_to

logger = logging.getLogger(__name__)

STEP = re.compile(r"round-(\d+)(?:-step-(\d+))?")


class Engines:
    """Sampler, learner and scorer of one run. A context manager: leaving it ends their processes."""

    def __init__(self, recipe: Recipe, paths: RunPaths, progress: Any) -> None:
        self.recipe, self.paths, self.progress = recipe, paths, progress
        self.steps = recipe.grpo.steps
        self._learner: Learner | None = None
        self._sampler: Sampler | None = None
        self._sampler_version: str | None = None
        self._scorer: Scorer | None = None
        self._reward_models: dict[str, tuple[str | None, Any]] = {}
        self._at: int | str | None = None
        self._reference: str | None = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in (self._sampler, self._learner, self._scorer):
            if engine is not None:
                engine.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    @cached_property
    def tokenizer(self) -> Any:
        from pipeline.models import load_tokenizer

        return load_tokenizer(self.paths.find_checkpoint("base"), self.recipe.model)

    @property
    def scratch(self) -> Path:
        """A folder for this process alone; on memory-backed storage where there is some."""
        memory = Path("/dev/shm")
        return (memory if memory.is_dir() else self.paths.directory) / f"grpoflow-{os.getpid()}"

    # -- the policy -----------------------------------------------------------------------------------------------

    def policy_from(self, checkpoint: str) -> Learner:
        """The learner with a checkpoint's weights and a fresh optimizer, to be trained away from any position."""
        self._at = None
        self._check_intact(checkpoint)
        return self._load(checkpoint, optimizer=False)

    def policy_of(self, name: str) -> Learner:
        """The learner holding a named policy: warm-start, round-XX, final, or the one after a step of a round."""
        if name == "warm-start":
            return self.policy_after(0)
        if match := STEP.fullmatch(name):
            return self.policy_after((int(match[1]) - 1) * self.steps + int(match[2] or self.steps))
        if self._at != name:
            self._check_intact(name)
            self._load(name, optimizer=False)
            self._at = name
        assert self._learner is not None
        return self._learner

    def policy_after_round(self, round_: int) -> Learner:
        """The learner as it was after a round's last update."""
        return self.policy_after(round_ * self.steps)

    def policy_after(self, updates: int) -> Learner:
        """The learner as it was after ``updates`` updates, with its optimizer; recorded updates are replayed."""
        start, behind = self._way_to(updates)
        if start != self._at:
            self._load(self._checkpoint_name(start), optimizer=start > 0)
        self._at = start
        assert self._learner is not None
        for number in behind:
            round_, step = self.round_and_step(number)
            logger.info("replaying round %d step %d from its recorded rollouts", round_, step)
            self.hold_reference(round_)
            update.run(self._context(f"{step_key(round_, step)}/update"), self._learner, round_, step)
            self._at = number
        self._at = updates
        return self._learner

    def updated(self, context: StageContext, updates: int, *, undone: bool = False) -> None:
        """Tell that an update stage has just moved the learner on to this position; saves a checkpoint when one is due.

        ``undone``: a guard takes the update back. The learner is then nowhere, and whoever asks next loads a checkpoint.
        """
        if undone:
            self._at = None
            return
        self._at = updates
        round_, step = self.round_and_step(updates)
        if step % self.recipe.checkpoint_every == 0 and step < self.steps:
            assert self._learner is not None
            save_checkpoint(context, self._learner, step_checkpoint(round_, step), optimizer=True)
            prune_step_checkpoints(self.paths, self.recipe.keep_checkpoints)

    def hold_reference(self, round_: int) -> None:
        """The reference policy is the policy at the head of the round; none is loaded when nothing reads it."""
        if not self.recipe.grpo.objective.needs_reference or self._learner is None:
            return
        name = self._checkpoint_name((round_ - 1) * self.steps)
        if self._reference != name:
            self._check_intact(name)
            self._learner.load_reference(self.paths.find_checkpoint(name))
            self._reference = name

    def round_and_step(self, updates: int) -> tuple[int, int]:
        """The round and step of update number ``updates`` (from 1)."""
        round_, step = divmod(updates - 1, self.steps)
        return round_ + 1, step + 1

    def _checkpoint_name(self, updates: int) -> str:
        if updates == 0:
            return "warm-start"
        round_, step = self.round_and_step(updates)
        return f"round-{round_:02d}" if step == self.steps else step_checkpoint(round_, step)

    def _way_to(self, updates: int) -> tuple[int, list[int]]:
        """Where to start from (here, or the newest intact checkpoint behind that position), and the updates to replay.

        Updates that guards have undone are passed over: the policy after one is the one that it went back to.
        """
        position, behind = updates, []
        while position != self._at:
            back = went_back_to(self.paths, position, self.steps)
            # A step checkpoint of an undone update would be a crashed attempt's; a round's is saved after the decision.
            if (back is None or position % self.steps == 0) and self._has_checkpoint(position):
                break
            if position == 0:
                raise FileNotFoundError(
                    f"run {self.paths.run_id}: no intact checkpoint at or before update {updates}; resume from stage sft"
                )
            if back is None:
                behind.append(position)
            position = position - 1 if back is None else back
        return position, behind[::-1]

    def _has_checkpoint(self, updates: int) -> bool:
        try:
            directory = self.paths.find_checkpoint(self._checkpoint_name(updates))
        except FileNotFoundError:
            return False
        if not is_intact(directory):
            logger.warning("checkpoint %s is damaged; going back to the one before it", directory.name)
            return False
        return True

    def _check_intact(self, name: str) -> None:
        if not is_intact(self.paths.find_checkpoint(name)):
            raise ValueError(
                f"run {self.paths.run_id}: checkpoint {name!r} is damaged (its files do not match its checksums); make it "
                f"again with --run-id {self.paths.run_id} --resume-from {checkpoint_maker(name)}"
            )

    def _load(self, checkpoint: str, *, optimizer: bool) -> Learner:
        directory = self.paths.find_checkpoint(checkpoint)
        if self._learner is None:
            self._learner = open_learner(self.recipe, directory, self._own_scratch())
        self._learner.load(directory, optimizer=optimizer)
        return self._learner

    # -- sampling and scoring ---------------------------------------------------------------------------------------

    def sampler(self, version: str) -> Sampler:
        """The sampler holding a named policy; a probe prompt proves that the learner's weights have arrived."""
        learner = self.policy_of(version)
        if self._sampler is None:
            self._sampler = open_sampler(self.recipe, self.paths.find_checkpoint("base"), self._own_scratch())
        if not (self._sampler_version == self._sampler.version.name == version):  # "none" after an engine died
            live = learner.live_policy()
            if live is not None:
                self._sampler.load_policy(live, version)
            else:
                folder = self._own_scratch() / "policy"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                with named_when_full(folder):
                    learner.save(folder, optimizer=False)
                self._sampler.load_policy(folder, version)
                shutil.rmtree(folder)
            check_gap(self._sampler, learner, self._probe_prompt, self.recipe)
            self._sampler_version = version
        return self._sampler

    @cached_property
    def _probe_prompt(self) -> list[int]:
        from stages.select import load_problems

        return list(load_problems(self.paths)[0].prompt_token_ids)

    def scorer(self, refreshed: int | None, *, steps: bool = False) -> Scorer:
        """The scorer, with the reward models as refreshed at the end of this round (0: as first trained).

        None while there are none yet: their components are left out. With ``steps`` the process reward model scores the
        end of every step, even where no component asks for it.
        """
        weights, learnt = dict(self.recipe.rewards.weights), refreshed is not None
        outcome = f"reward-model-{refreshed:02d}" if learnt and self.recipe.has_reward_model else None
        stepwise = steps or "process_model" in weights
        process = f"process-model-{refreshed:02d}" if learnt and stepwise and self.recipe.has_process_model else None
        paid = {name: weight for name, weight in weights.items() if learnt or name not in LEARNT}
        if self._scorer is None or self._scorer.config.weights != paid:
            if self._scorer is not None:
                self._scorer.close()
            config = self.recipe.rewards.model_copy(update={"weights": paid})
            self._scorer = Scorer(config, self.recipe.data.answer_format).__enter__()
        self._scorer.set_reward_model(self._learnt(outcome))
        self._scorer.set_process_model(self._learnt(process))
        return self._scorer

    def verifier(self) -> Scorer:
        """The scorer for verdicts alone, its reward models out of memory; what it watches over steps goes on."""
        scorer = self._scorer or self.scorer(None)
        self._reward_models.clear()
        scorer.set_reward_model(None)
        scorer.set_process_model(None)
        return scorer

    def _learnt(self, name: str | None) -> Any:
        """A reward model's scoring function; the newest of each kind stays loaded."""
        if name is None:
            return None
        kind = name.rpartition("-")[0]
        loaded, score = self._reward_models.get(kind, (None, None))
        if loaded != name:
            score = self._load_reward_model(name)
            self._reward_models[kind] = (name, score)
        return score

    def _load_reward_model(self, name: str) -> Any:
        from rewards.models import OutcomeRewardModel
        from rewards.process import ProcessRewardModel

        self._check_intact(name)
        kind = ProcessRewardModel if name.startswith("process") else OutcomeRewardModel
        model = kind.load(self.paths.find_checkpoint(name))

        def score(rollouts: list[Rollout]) -> Any:
            return model.score([(r.prompt_token_ids, r.completion_token_ids) for r in rollouts])

        return score

    def _context(self, key: str) -> StageContext:
        return StageContext(self.recipe, self.paths, key, self.progress)

    def _own_scratch(self) -> Path:
        if not self.scratch.is_dir():
            for left in self.scratch.parent.glob("grpoflow-*"):  # what a killed process could not take away itself
                if not Path(f"/proc/{left.name.removeprefix('grpoflow-')}").is_dir():
                    shutil.rmtree(left, ignore_errors=True)
        self.scratch.mkdir(parents=True, exist_ok=True)
        return self.scratch
