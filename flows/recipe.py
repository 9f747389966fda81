"""THE loop: DeepSeekMath's Algorithm 1 (arXiv 2402.03300) inside DeepSeek-R1's pipeline (arXiv 2501.12948), as prose."""

from __future__ import annotations

from functools import partial
from typing import Any

from data.sources import hub_names
from eval.benchmarks import enforce_heldout
from eval.card import write_card
from flows.engines import Engines
from flows.workflow import Workflow
from pipeline.rundir import step_key
from pipeline.types import Problem, StageResult
from stages import (
    base,
    evaluate,
    guards,
    probe,
    process_model,
    refill,
    refresh,
    reject,
    reward,
    reward_model,
    rollout,
    select,
    sft,
    update,
)
from stages.checkpoint import step_checkpoint
from stages.curriculum import step_problems


def run_recipe(flow: Workflow, engines: Engines) -> dict[str, Any]:
    """Run every stage that is not complete yet; returns the metrics of the evaluations by checkpoint.

    A stage's body opens the engines it needs, so a run whose stages are all complete loads no model.
    """
    recipe, paths, stage = flow.recipe, flow.paths, flow.stage
    rounds = recipe.grpo.rounds

    stage("select", lambda context: select.run(context, base.prepare(context), base.gold_check(recipe.rewards)))
    problems = select.load_problems(paths)
    train = [problem for problem in problems if problem.split == "train"]
    heldout = [problem for problem in problems if problem.split == "heldout"]
    enforce_heldout("held-out problems", heldout, (problem.problem_id for problem in train), recipe.evaluate)

    def warm_start(context: Any) -> StageResult:
        pairs = base.worked_solutions(context, train, engines.tokenizer)
        return sft.run(context, engines.policy_from("base"), pairs, recipe.warm_start, "warm-start")

    def train_reward_model(context: Any) -> StageResult:
        sampler = engines.sampler("warm-start")
        return reward_model.run(context, sampler, engines.tokenizer, engines.scorer(None), train)

    def train_process_model(context: Any) -> StageResult:
        sampler = engines.sampler("warm-start")
        return process_model.run(context, sampler, engines.tokenizer, engines.scorer(None), train)

    def probe_difficulty(context: Any) -> StageResult:
        sampler = engines.sampler("warm-start")
        return probe.run(context, sampler, engines.tokenizer, engines.scorer(None), train)

    def sample_for_rejection(context: Any) -> StageResult:
        name = f"round-{rounds:02d}"
        return reject.run(context, engines.sampler(name), engines.tokenizer, engines.scorer(rounds), train)

    def regenerate(context: Any) -> StageResult:
        start = "base" if recipe.regenerate.start == "base" else f"round-{rounds:02d}"
        return sft.run(context, engines.policy_from(start), reject.kept_pairs(paths), recipe.regenerate, "final")

    stage("sft", warm_start)
    if recipe.has_reward_model:
        stage("reward_model", train_reward_model)
    if recipe.has_process_model:
        stage("process_model", train_process_model)
    evaluate_policy(flow, engines, heldout, "warm-start")
    if recipe.data.curriculum.probe_samples:
        stage("probe", probe_difficulty)

    for round_ in range(1, rounds + 1):
        for step in range(1, recipe.grpo.steps + 1):
            explore_and_learn(flow, engines, train, round_, step)
        stage(f"round-{round_:02d}/refresh", partial(refresh_round, engines, train, round_))
        flow.merge_tables(round_)
        evaluate_policy(flow, engines, heldout, f"round-{round_:02d}")

    stage("reject", sample_for_rejection)
    stage("regenerate", regenerate)
    evaluate_policy(flow, engines, heldout, "final")
    flow.merge_tables()
    return flow.evaluations


def explore_and_learn(flow: Workflow, engines: Engines, train: list[Problem], round_: int, step: int) -> None:
    """One step: rollout, reward, update, each a stage with its own result."""
    key, before = step_key(round_, step), (round_ - 1) * flow.recipe.grpo.steps + step - 1
    # RFT learns what the warm start wrote (arXiv 2402.03300, Table 10); every other algorithm explores on-policy.
    offline = flow.recipe.grpo.objective.algorithm == "rft"
    sampled_from = "warm-start" if offline else policy_name(round_, step)

    def explore(context: Any) -> StageResult:
        problems, sampler = step_problems(context, train, round_, step), engines.sampler(sampled_from)
        if flow.recipe.data.curriculum.refill_budget > 1:
            scorer = engines.scorer(round_ - 1)
            return refill.run(context, sampler, engines.tokenizer, scorer, problems, train, round_, step)
        return rollout.run(context, sampler, engines.tokenizer, problems, round_, step)

    def pay(context: Any) -> StageResult:
        steps = flow.recipe.grpo.advantages.supervision == "process"
        return reward.run(context, engines.scorer(round_ - 1, steps=steps), train, f"{key}/rollout")

    def learn(context: Any) -> StageResult:
        learner = engines.policy_after(before)
        engines.hold_reference(round_)
        result = guards.watch(context, partial(update.run, context, learner, round_, step), round_, step)
        engines.updated(context, before + 1, undone="went_back_to" in result.metrics)
        return result

    sampled = flow.stage(f"{key}/rollout", explore)
    rewarded = flow.stage(f"{key}/reward", pay)
    updated = flow.stage(f"{key}/update", learn)
    flow.step_done(round_, step, sampled, rewarded, updated)


def refresh_round(engines: Engines, train: list[Problem], round_: int, context: Any) -> StageResult:
    """The end of a round: the policy becomes the next reference, and the reward models learn the new rollouts."""
    learner, tokenizer = engines.policy_after_round(round_), engines.tokenizer
    scorer = engines.verifier()  # the models that scored leave the memory to those that learn

    def relabel() -> dict[str, Any]:
        sampler = engines.sampler(f"round-{round_:02d}")
        return process_model.refresh(context, sampler, tokenizer, scorer, train, round_)

    return refresh.run(context, learner, round_, relabel)


def evaluate_policy(flow: Workflow, engines: Engines, heldout: list[Problem], name: str) -> None:
    """Evaluate a named policy on the held-out problems, scored by the newest reward model of its time; then its card."""

    def body(context: Any) -> StageResult:
        scorer = engines.scorer(refreshed_before(name, flow.recipe))
        return evaluate.run(context, engines.sampler(name), engines.tokenizer, scorer, heldout, checkpoint=name)

    flow.evaluated(name, flow.stage(f"evaluate/{name}", body))
    write_card(flow.recipe, flow.paths, name, hub_names(flow.recipe.data))


def policy_name(round_: int, step: int) -> str:
    """Name of the policy that samples a step: the warm start, the last round's, or the one after the step before."""
    if (round_, step) == (1, 1):
        return "warm-start"
    return f"round-{round_ - 1:02d}" if step == 1 else step_checkpoint(round_, step - 1)


def refreshed_before(name: str, recipe: Any) -> int:
    """The round whose refresh made the newest reward models when a policy is evaluated."""
    if name == "warm-start":
        return 0
    return recipe.grpo.rounds if name == "final" else int(name.removeprefix("round-"))
