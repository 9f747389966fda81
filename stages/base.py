"""What the run starts from: the base checkpoint with its tokenizer, and the worked solutions of the warm start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from data.prompts import training_pair
from data.sources import load_source
from eval.card import CARD
from pipeline.config import RewardConfig
from pipeline.models import load_tokenizer, prepare_base
from pipeline.rundir import StageContext
from pipeline.types import Problem, TrainSequence
from rewards.code import CodeRunner, CodeVerdict, tests_of
from rewards.procedural import TaskScorer, task_of
from rewards.verifier import Verdict
from rewards.workers import VerifierPool
from stages.checkpoint import MANIFEST, is_intact, new_checkpoint


def prepare(context: StageContext) -> Any:
    """The tokenizer of ``checkpoints/base``, which is built or resolved first where it is not there yet.

    The embedded policy's tokenizer is trained on the texts of the training problems and their worked solutions.
    """
    recipe, final = context.recipe, context.paths.checkpoint("base")
    if not is_intact(final):
        corpus: list[str] = []
        if recipe.model.name == "embedded":
            for source in recipe.data.sources:
                loaded = load_source(source, recipe.data, recipe.seed)
                corpus += [text for p in loaded if p.split == "train" for text in (p.problem, p.solution or "")]
        with new_checkpoint(context.paths, "base") as partial:
            folder = prepare_base(recipe.model, corpus, recipe.seed, partial)
            if folder != partial:  # a model that lies elsewhere is named, not copied; its checksums are kept
                for file in folder.iterdir():
                    # Whatever is written into a model card, the model stays the same.
                    if file.is_file() and file.name not in (MANIFEST, CARD):
                        (partial / file.name).symlink_to(file.resolve())
    return load_tokenizer(final, recipe.model)


def worked_solutions(context: StageContext, problems: Sequence[Problem], tokenizer: Any) -> list[TrainSequence]:
    """SFT pairs of the problems that have a solution; those that do not fit the completion limit are left out."""
    limit = context.recipe.sampler.max_tokens
    pairs = []
    for problem in problems:
        if problem.solution:
            prompt, completion = training_pair(problem, tokenizer)
            if len(completion) <= limit:
                pairs.append(TrainSequence(problem.problem_id, problem.problem_id, prompt, completion))
    return pairs


def gold_check(config: RewardConfig) -> Callable[[Sequence[Problem]], list[str | None]]:
    """A function that says of each problem why its gold cannot be used, or None: it must be correct against itself."""

    def check(problems: Sequence[Problem]) -> list[str | None]:
        codes = [p for p in problems if tests_of(p) is not None]
        tasks = [p for p in problems if task_of(p) is not None]
        maths = [p for p in problems if tests_of(p) is None and task_of(p) is None]
        with VerifierPool(config.workers, config.timeout, config.memory_mb) as pool:
            verdicts = pool.judge_many([(p.answer, f"\\boxed{{{p.answer}}}", "stop") for p in maths])
        judged = iter([_gold_fault(verdict, "verifier") for verdict in verdicts])
        scorer = TaskScorer(config.function_timeout)
        try:
            scored = scorer.judge_many([(p, f"\\boxed{{{p.answer}}}", "stop") for p in tasks])
        finally:
            scorer.close()
        scores = iter([_gold_fault(verdict, "task's scorer") for verdict in scored])
        # Of a code problem whose solution has no program, only the form of the tests can be checked.
        tried = iter(CodeRunner(config).judge_many([(p, p.solution or "", "stop") for p in codes]))
        return [
            _tests_fault(next(tried)) if tests_of(p) is not None else next(judged if task_of(p) is None else scores)
            for p in problems
        ]

    return check


def _gold_fault(verdict: Verdict, judge: str) -> str | None:
    return None if verdict.status == "correct" else f"the {judge} says {verdict.status} of the gold itself"


def _tests_fault(verdict: CodeVerdict) -> str | None:
    usable = verdict.status in ("correct", "no_answer")
    return None if usable else f"its own solution against its tests is {verdict.status}: {verdict.rule}"
