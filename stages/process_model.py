"""Process reward model: step labels by Monte Carlo continuation (arXiv 2312.08935), training, and a refresh a round.

Continuations are rollouts like all others, recorded with purpose "process": prompt ids are those of problem and prefix.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeline import store
from pipeline.protocols import Sampler, no_progress
from pipeline.rundir import RunPaths, StageContext, step_key, write_atomic
from pipeline.seeds import content_id
from pipeline.types import Completion, Problem, Rollout, StageResult
from rewards.models import choose_replay
from rewards.process import ProcessRewardModel, measure_steps, train_process_model
from rewards.scoring import Scorer
from rewards.steps import Prefix, SteppedSequence, TokenText, label_steps, step_ends
from stages.checkpoint import new_checkpoint
from stages.reward import read_rewards
from stages.reward_model import is_heldout
from stages.rollout import SHARD, draw_problems, read_rollouts, sample_problems, training_params

STEPS = "steps.json"
"""In the stage's folder: every labelled completion, for the replays of later rounds."""
FIRST = "process-model-00"


def run(
    context: StageContext, sampler: Sampler, tokenizer: Any, scorer: Scorer, problems: Sequence[Problem]
) -> StageResult:
    """Sample completions, label their steps, train the head on the warm start's backbone; measured on held-out problems."""
    config = context.recipe.reward_model
    chosen = draw_problems(context, problems, config.problems)
    rollouts = sample_problems(
        context, sampler, tokenizer, chosen, samples=config.process_samples, purpose="process",
        params=training_params(context),
    )  # fmt: skip
    work = _Labelling(context, sampler, tokenizer, scorer, {p.problem_id: p for p in chosen})
    rows = work.label(rollouts, work.verdicts(rollouts, {}, part=0))
    train, heldout = _split(context, rows)
    metrics = _train(context, "warm-start", train, FIRST)
    measured = _measure(context, FIRST, heldout)
    return StageResult(
        context.key,
        outputs={"checkpoint": f"checkpoints/{FIRST}", "steps": f"stages/{context.key}/{STEPS}"},
        metrics={
            "completions": len(rollouts), "continuations": work.sampled, **metrics,
            **{f"heldout/{k}": v for k, v in measured.items()},
        },
    )  # fmt: skip


def refresh(
    context: StageContext, sampler: Sampler, tokenizer: Any, scorer: Scorer, problems: Sequence[Problem], round_: int
) -> dict[str, Any]:
    """Continual training on steps of the round's rollouts, continued by the new policy, with a replay of earlier labels.

    As many completions as at first. Measured before and after on problems that no process model was trained on.
    """
    config = context.recipe.reward_model
    rollouts, verdicts = _drawn_groups(context, round_)
    work = _Labelling(context, sampler, tokenizer, scorer, {p.problem_id: p for p in problems})
    new, heldout = _split(context, work.label(rollouts, verdicts))
    keys = ["process_model", *(f"round-{past:02d}/refresh" for past in range(1, round_))]
    earlier, _ = _split(context, [row for key in keys for row in labelled_steps(context.paths, key)])
    replay = choose_replay(new, earlier, config.replay, context.seed("process-replay"))
    old, name = f"process-model-{round_ - 1:02d}", f"process-model-{round_:02d}"
    before = _measure(context, old, heldout)
    metrics = _train(context, old, [*new, *replay], name)
    after = _measure(context, name, heldout)
    return {
        "completions": len(rollouts), "continuations": work.sampled, "new": len(new), "replayed": len(replay), **metrics,
        **{f"before/{k}": v for k, v in before.items()}, **{f"after/{k}": v for k, v in after.items()},
    }  # fmt: skip


def labelled_steps(paths: RunPaths, key: str) -> list[SteppedSequence]:
    """The completions whose steps a stage of this run, or of the one it branched off, has labelled."""
    file = (paths.owner(key) or paths).stage(key) / STEPS
    return [SteppedSequence(**row) for row in json.loads(file.read_text(encoding="utf-8"))]


def _drawn_groups(context: StageContext, round_: int) -> tuple[list[Rollout], dict[str, bool | None]]:
    """The first completions of groups drawn from a round, with their recorded verdicts."""
    config, groups, verdicts = context.recipe.reward_model, dict[str, list[Rollout]](), dict[str, bool | None]()
    for step in range(1, context.recipe.grpo.steps + 1):
        for rollout in read_rollouts(context.paths, f"{step_key(round_, step)}/rollout"):
            groups.setdefault(rollout.group_id, []).append(rollout)
        for reward in read_rewards(context.paths, f"{step_key(round_, step)}/reward"):
            verdicts[reward.rollout_id] = reward.correct
    drawn = random.Random(context.seed("groups")).sample(list(groups.values()), min(config.problems, len(groups)))
    return [rollout for group in drawn for rollout in group[: config.process_samples]], verdicts


def _split(
    context: StageContext, rows: Sequence[SteppedSequence]
) -> tuple[list[SteppedSequence], list[SteppedSequence]]:
    """Training and held-out rows: the problems that are held out from the outcome model are held out here too."""
    heldout = [is_heldout(context, row.problem_id) for row in rows]
    chosen = [[row for row, out in zip(rows, heldout, strict=True) if out is side] for side in (False, True)]
    return chosen[0], chosen[1]


def _train(context: StageContext, start: str, rows: Sequence[SteppedSequence], name: str) -> dict[str, Any]:
    with new_checkpoint(context.paths, name) as partial:
        metrics = train_process_model(
            context.paths.find_checkpoint(start), rows, context.recipe.reward_model, seed=context.seed("process-train"),
            out=partial, progress=context.progress,
        )  # fmt: skip
    return {f"train/{k}": v for k, v in metrics.items()}


def _measure(context: StageContext, name: str, rows: Sequence[SteppedSequence]) -> dict[str, Any]:
    model = ProcessRewardModel.load(context.paths.find_checkpoint(name))
    scores = model.score([(row.prompt_token_ids, row.completion_token_ids) for row in rows])
    return measure_steps([rewards for rewards, _ in scores], rows)


class _Labelling:
    """Samples, judges and records what ``label_steps`` asks for; what an earlier attempt recorded is read."""

    def __init__(
        self, context: StageContext, sampler: Sampler, tokenizer: Any, scorer: Scorer, problems: Mapping[str, Problem]
    ) -> None:
        self.context, self.sampler, self.tokenizer = context, sampler, tokenizer
        self.scorer, self.problems = scorer, problems
        self.sampled = 0

    def label(self, rollouts: Sequence[Rollout], verdicts: Mapping[str, bool | None]) -> list[SteppedSequence]:
        """Label the steps of whole completions, given their verdicts, and write them into the stage's folder."""
        text, config = TokenText(self.tokenizer), self.context.recipe.reward_model
        whole = [
            (
                Prefix(r.problem_id, tuple(r.prompt_token_ids), tuple(r.completion_token_ids)),
                step_ends(text.pieces(r.completion_token_ids), config.step_delimiter),
                verdicts[r.rollout_id],
            )
            for r in rollouts
        ]
        rows = label_steps(whole, self.continue_from, config.step_labels)
        write_atomic(self.context.paths.stage(self.context.key) / STEPS, json.dumps([asdict(row) for row in rows]))
        return rows

    def continue_from(self, prefixes: Sequence[Prefix]) -> list[list[bool | None]]:
        """Verdicts of ``continuations`` completions of each prefix."""
        count = self.context.recipe.reward_model.continuations
        # By length, so that the prefixes of a shard leave about as many tokens to the limit.
        order = sorted(range(len(prefixes)), key=lambda index: len(prefixes[index].completion_token_ids))
        size = max(1, SHARD // count)
        shards = [order[start : start + size] for start in range(0, len(order), size)]
        found: list[list[bool | None]] = [[] for _ in prefixes]
        for number, shard in enumerate(shards):
            # Parts 0.. of the stage are its whole completions.
            rows = self._shard([prefixes[index] for index in shard], number * size, part=10_000 + number)
            (self.context.progress or no_progress)(number + 1, len(shards), "continuations")
            for index, verdicts in zip(shard, rows, strict=True):
                found[index] = verdicts
        return found

    def _shard(self, prefixes: Sequence[Prefix], first: int, part: int) -> list[list[bool | None]]:
        context, count = self.context, self.context.recipe.reward_model.continuations
        limit = training_params(context)
        longest = max(len(prefix.completion_token_ids) for prefix in prefixes)
        params = replace(limit, max_tokens=max(1, limit.max_tokens - longest))
        seeds = [[context.seed("continue", *_digest(prefix), i) for i in range(count)] for prefix in prefixes]
        ids = [[content_id(context.paths.run_id, context.key, *_digest(p), i) for i in range(count)] for p in prefixes]
        if not store.has(context.paths, "rollouts", context.key, part):
            prompts = [[*prefix.prompt_token_ids, *prefix.completion_token_ids] for prefix in prefixes]
            if context.meter:
                context.meter.before_sampling(context.key, len(prefixes) * count, params.max_tokens)
            drawn = self.sampler.sample(prompts, params, seeds)
            rows = [
                self._row(prefix, completion, rollout_id, seed, first + number, i, params.max_tokens)
                for number, (prefix, group) in enumerate(zip(prefixes, drawn, strict=True))
                for i, (completion, rollout_id, seed) in enumerate(zip(group, ids[number], seeds[number], strict=True))
            ]
            store.append(context.paths, "rollouts", context.key, [asdict(row) for row in rows], part=part)
            if context.meter:
                context.meter.sampled(sum(len(row.completion_token_ids) for row in rows))
        wanted = {rollout_id for group in ids for rollout_id in group}
        rollouts = [r for r in read_rollouts(context.paths, context.key) if r.rollout_id in wanted]
        before = {i: prefix.completion_token_ids for prefix, group in zip(prefixes, ids, strict=True) for i in group}
        verdicts = self.verdicts(rollouts, before, part)
        self.sampled += len(rollouts)
        return [[verdicts[rollout_id] for rollout_id in group] for group in ids]

    def _row(
        self, prefix: Prefix, completion: Completion, rollout_id: str, seed: int, number: int, i: int, max_tokens: int
    ) -> Rollout:
        context, config, version = self.context, self.context.recipe.sampler, self.sampler.version
        reward_model = context.recipe.reward_model
        return Rollout(
            rollout_id=rollout_id, run_id=context.paths.run_id, stage=context.key, purpose="process", round=None,
            step=None, group_id=content_id(context.paths.run_id, context.key, *_digest(prefix)),
            problem_id=prefix.problem_id,
            # Past those of the whole completions: the two never share an index.
            sample_index=reward_model.process_samples + number * reward_model.continuations + i,
            seed=seed, policy_version=version.name, policy_checksum=version.checksum, engine=config.engine,
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p,
            max_tokens=max_tokens, prompt_token_ids=[*prefix.prompt_token_ids, *prefix.completion_token_ids],
            completion_token_ids=list(completion.token_ids), sampling_logprobs=list(completion.logprobs),
            finish_reason=completion.finish_reason,
            text=self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True), seconds=completion.seconds,
        )  # fmt: skip

    def verdicts(
        self, rollouts: Sequence[Rollout], before: Mapping[str, Sequence[int]], part: int
    ) -> dict[str, bool | None]:
        """Verdicts by rollout id, recorded; a continuation is judged together with the prefix ``before`` it."""
        context = self.context
        if not store.has(context.paths, "rewards", context.key, part):
            whole = [self._joined(rollout, before.get(rollout.rollout_id, ())) for rollout in rollouts]
            rewards = self.scorer.verify(self.problems, whole)
            store.append(context.paths, "rewards", context.key, [asdict(reward) for reward in rewards], part=part)
        return {reward.rollout_id: reward.correct for reward in read_rewards(context.paths, context.key)}

    def _joined(self, rollout: Rollout, before: Sequence[int]) -> Rollout:
        if not before:
            return rollout
        text = self.tokenizer.decode([*before, *rollout.completion_token_ids], skip_special_tokens=True)
        return replace(rollout, text=text)


def _digest(prefix: Prefix) -> tuple[str, str]:
    """What names a prefix: its problem and a hash of its tokens."""
    return prefix.problem_id, content_id(*prefix.completion_token_ids)
