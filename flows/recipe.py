"""THE loop: DeepSeekMath's Algorithm 1 (arXiv 2402.03300) inside DeepSeek-R1's pipeline (arXiv 2501.12948), as prose."""

from __future__ import annotations

from typing import Any

from data.curriculum import problems_for_step
from flows.engines import Engines
from flows.workflow import Workflow
from pipeline.rundir import step_key
from stages import base, evaluate, reject, reward, reward_model, rollout, select, sft, update
from stages.checkpoint import prune_step_checkpoints, save_checkpoint, step_checkpoint


def run_recipe(flow: Workflow, engines: Engines) -> dict[str, Any]:
    """Run every stage that is not complete yet; returns the metrics of the evaluations by checkpoint.

    A stage's body opens what it needs, so a run whose stages are all complete loads no model.
    """
    recipe, paths = flow.recipe, flow.paths
    grpo, learned = recipe.grpo, bool(recipe.rewards.weights.get("reward_model"))

    flow.stage("select", lambda context: select.run(context, base.prepare(context), flow.accept_gold(engines)))
    problems = select.load_problems(paths)
    train = [problem for problem in problems if problem.split == "train"]
    heldout = [problem for problem in problems if problem.split == "heldout"]
    by_id = {problem.problem_id: problem for problem in problems}

    def warm_start(context: Any) -> Any:
        pairs = base.worked_solutions(context, train, engines.tokenizer)
        return sft.run(context, engines.policy_from("base"), pairs, recipe.warm_start, "warm-start")

    def train_reward_model(context: Any) -> Any:
        engines.policy_of("warm-start")
        return reward_model.run(
            context, engines.sampler("warm-start"), engines.tokenizer, engines.scorer(None), train
        )

    def evaluate_policy(name: str, scored_by: str | None) -> None:
        def body(context: Any) -> Any:
            engines.policy_for(name)
            return evaluate.run(
                context, engines.sampler(name), engines.tokenizer, engines.scorer(scored_by), heldout,
                checkpoint=name, benchmark=flow.benchmark,
            )  # fmt: skip

        flow.evaluated(name, flow.stage(f"evaluate/{name}", body))

    flow.stage("sft", warm_start)
    if learned:
        flow.stage("reward_model", train_reward_model)
    scored_by = "reward-model-00" if learned else None
    evaluate_policy("warm-start", scored_by)

    for round_ in range(1, grpo.rounds + 1):
        for step in range(1, grpo.steps + 1):
            run_step(flow, engines, train, by_id, round_, step, scored_by)
        flow.stage(f"round-{round_:02d}/refresh", lambda context, r=round_: refresh(context, engines, r, learned))
        scored_by = f"reward-model-{round_:02d}" if learned else None
        evaluate_policy(f"round-{round_:02d}", scored_by)

    def reject_sampling(context: Any) -> Any:
        engines.policy_after(grpo.rounds * grpo.steps)
        sampler = engines.sampler(f"round-{grpo.rounds:02d}")
        return reject.run(context, sampler, engines.tokenizer, engines.scorer(scored_by), train)

    def regenerate(context: Any) -> Any:
        start = "base" if recipe.regenerate.start == "base" else f"round-{grpo.rounds:02d}"
        return sft.run(context, engines.policy_from(start), reject.kept_pairs(paths), recipe.regenerate, "final")

    flow.stage("reject", reject_sampling)
    flow.stage("regenerate", regenerate)
    evaluate_policy("final", scored_by)
    return flow.evaluations


def run_step(
    flow: Workflow, engines: Engines, train: list, by_id: dict, round_: int, step: int, scored_by: str | None
) -> None:
    """One exploration: rollout, reward, update, each a stage with its own result."""
    key, before = step_key(round_, step), (round_ - 1) * flow.recipe.grpo.steps + step - 1

    def explore(context: Any) -> Any:
        chosen = problems_for_step(
            train, seed=flow.recipe.seed, round_=round_, step=step, count=flow.recipe.grpo.problems_per_step,
            history=None, config=flow.recipe.data,
        )  # fmt: skip
        engines.policy_after(before)
        return rollout.run(context, engines.sampler(version_name(round_, step)), engines.tokenizer, chosen, round_, step)

    def learn(context: Any) -> Any:
        learner = engines.policy_after(before)
        engines.hold_reference(round_)
        result = update.run(context, learner, round_, step)
        engines.updated(before + 1)
        if step % flow.recipe.checkpoint_every == 0 and step < flow.recipe.grpo.steps:
            save_checkpoint(context, learner, step_checkpoint(round_, step), optimizer=True)
            prune_step_checkpoints(flow.paths, flow.recipe.keep_checkpoints)
        return result

    sampled = flow.stage(f"{key}/rollout", explore)
    rewarded = flow.stage(
        f"{key}/reward", lambda context: reward.run(context, engines.scorer(scored_by), by_id, f"{key}/rollout")
    )
    updated = flow.stage(f"{key}/update", learn)
    flow.step_line(round_, step, sampled, rewarded, updated)


def refresh(context: Any, engines: Engines, round_: int, learned: bool) -> Any:
    """End of a round: the policy becomes the next round's reference, and the reward model learns the new rollouts."""
    learner = engines.policy_after(round_ * context.recipe.grpo.steps)
    save_checkpoint(context, learner, f"round-{round_:02d}", optimizer=True)
    return reward_model.refresh(context, round_, learned)


def version_name(round_: int, step: int) -> str:
    """Name of the policy that samples a step: the warm start, or the policy after the step before."""
    if (round_, step) == (1, 1):
        return "warm-start"
    return f"round-{round_ - 1:02d}" if step == 1 else step_checkpoint(round_, step - 1)
