"""From rollouts to rewards: verdict, components, weighted sum, and every failure counted."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import RewardConfig
from pipeline.events import Event
from pipeline.protocols import Progress, no_progress
from pipeline.types import Problem, Reward, Rollout
from rewards.aggregation import combine, without_in_plain_groups
from rewards.code import CodeRunner, CodeVerdict, tests_of
from rewards.components import LEARNT, PURE, AnswerFormat, Item, check_names
from rewards.procedural import TaskScorer, task_of
from rewards.user_functions import UserFunction
from rewards.verifier import Verdict
from rewards.watch import StepWatch

if TYPE_CHECKING:
    from rewards.workers import VerifierPool

logger = logging.getLogger(__name__)

RewardModel = Callable[[Sequence[Rollout]], list[float | None]]
NO_MODEL = "rewards.weights names {} but none is set: train one, or remove the weight"
ProcessModel = Callable[[Sequence[Rollout]], list[tuple[Sequence[float], Sequence[int]] | None]]


class Scorer:
    """Opened once by the flow: holds the verifier's processes and those of the user's functions.

    ``reward_model`` gives logits; its component is their probability, in [0, 1]. ``process_model`` gives the probability
    at the end of each step; its component is the lowest of them (Math-Shepherd, arXiv 2312.08935, 3.4).

    ``faults`` counts every failure by "component/kind" since the last ``take_faults``. ``reward_model`` and
    ``process_model`` run in this process, on its device: they cannot be killed, so a deadline of theirs would be
    a promise that nothing keeps.
    """

    def __init__(
        self,
        config: RewardConfig,
        answer_format: AnswerFormat,
        reward_model: RewardModel | None = None,
        *,
        process_model: ProcessModel | None = None,
        verifier: VerifierPool | None = None,
    ) -> None:
        check_names(config)
        self.config, self.answer_format = config, answer_format
        self._reward_model, self._process_model = reward_model, process_model
        self._verifier, self._owned = verifier, verifier is None
        self._code = CodeRunner(config)
        self._tasks = TaskScorer(config.function_timeout)
        self._functions: dict[str, UserFunction] = {}
        self._watch = StepWatch(config)
        self.faults: Counter[str] = Counter()

    def __enter__(self) -> Scorer:
        try:
            for name, target in self.config.functions.items():
                if name in self.config.weights:
                    self._functions[name] = UserFunction(name, target, self.config.function_timeout)
            if self._owned:
                from rewards.workers import VerifierPool

                pool = VerifierPool(self.config.workers, self.config.timeout, self.config.memory_mb)
                self._verifier = pool.__enter__()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process. May be called twice."""
        for function in self._functions.values():
            function.close()
        self._functions = {}
        self._tasks.close()
        if self._owned and self._verifier is not None:
            self._verifier.__exit__(None, None, None)
            self._verifier = None

    def set_reward_model(self, reward_model: RewardModel | None) -> None:
        """Use this outcome model from now on (after a refresh)."""
        self._reward_model = reward_model

    def set_process_model(self, process_model: ProcessModel | None) -> None:
        """Use this process model from now on: it fills ``step_rewards`` and ``step_ends``."""
        self._process_model = process_model

    def take_faults(self) -> dict[str, int]:
        """The faults counted since the last call, for a stage's metrics."""
        taken = dict(sorted(self.faults.items()))
        self.faults.clear()
        return taken

    def take_events(self) -> list[Event]:
        """The warnings since the last call, for the store."""
        taken, self._watch.events = self._watch.events, []
        return taken

    # -- scoring ------------------------------------------------------------------------------------------------

    def verify(
        self, problems: Mapping[str, Problem], rollouts: Sequence[Rollout], progress: Progress | None = None
    ) -> list[Reward]:
        """The verdict alone: reward 1, 0 or None, no components; for labels, evaluation and rejection sampling."""
        items = self._items(problems, rollouts, progress or no_progress)
        return [self._reward(item, PURE["verifier"](item, self.config, self.answer_format), {}, None) for item in items]

    def score(
        self, problems: Mapping[str, Problem], rollouts: Sequence[Rollout], progress: Progress | None = None
    ) -> list[Reward]:
        """One reward a rollout, in order. Give whole groups: ``aggregation = "gdpo"`` normalises within them.

        A component that raises, hangs, or returns something else than a finite number leaves its rollouts unscored
        (None), counted in ``faults``. A warning, or RunStopped, when more than ``max_unscored`` of the rollouts are
        unscored or all rewards are equal for ``equal_steps`` steps in a row, as the recipe says.
        """
        progress = progress or no_progress
        items = self._items(problems, rollouts, progress)
        components: list[dict[str, float | None]] = [{} for _ in items]
        steps = self._steps(rollouts)
        for name in self.config.weights:
            # A problem without unit tests has no such component: it is absent, which is neither 0 nor unscored.
            holders = [i for i, item in enumerate(items) if name != "code" or item.code is not None]
            column = _lowest(steps) if name == "process_model" else self._column(name, [items[i] for i in holders])
            for i, value in zip(holders, column, strict=True):
                components[i][name] = value
            progress(len(items), len(items), name)
        groups = [rollout.group_id for rollout in rollouts]
        paid: Sequence[Mapping[str, float | None]] = components
        if self.config.reward_model_pays == "mixed_groups":
            paid = without_in_plain_groups(components, LEARNT, groups, [item.correct for item in items])
        totals = combine(paid, self.config.weights, groups, how=self.config.aggregation)
        rewards = [
            self._reward(item, None if item.correct is None else total, row, ends)
            for item, total, row, ends in zip(items, totals, components, steps, strict=True)
        ]
        self._watch.check_unscored(rewards, self.faults)
        self._watch.check_equal(rollouts, rewards)
        return rewards

    def _items(self, problems: Mapping[str, Problem], rollouts: Sequence[Rollout], progress: Progress) -> list[Item]:
        if self._verifier is None:
            raise RuntimeError("the scorer is not open: use it as `with Scorer(...) as scorer:`")
        missing = sorted({r.problem_id for r in rollouts} - problems.keys())
        if missing:
            raise ValueError(f"{len(missing)} problems of the rollouts were not given, the first is {missing[0]}")
        pairs = [(problems[rollout.problem_id], rollout) for rollout in rollouts]
        answered = [(p, r) for p, r in pairs if tests_of(p) is None and task_of(p) is None]
        maths = [(p.answer, r.text, r.finish_reason) for p, r in answered]
        verdicts = iter(self._verifier.judge_many(maths, progress))
        tasks = iter(self._tasks.judge_many([(p, r.text, r.finish_reason) for p, r in pairs if task_of(p) is not None]))
        codes = iter(
            self._code.judge_many([(p, r.text, r.finish_reason) for p, r in pairs if tests_of(p) is not None], progress)
        )
        items = [
            _code_item(p, r, next(codes)) if tests_of(p) is not None
            else Item(p, r, next(verdicts if task_of(p) is None else tasks))
            for p, r in pairs
        ]  # fmt: skip
        self.faults.update(
            f"{'verifier' if item.code is None else 'code'}/{item.verdict.status}"
            for item in items
            if item.correct is None
        )
        return items

    @staticmethod
    def _reward(
        item: Item, total: float | None, components: Mapping[str, float | None], steps: tuple[Any, Any] | None
    ) -> Reward:
        return Reward(
            rollout_id=item.rollout.rollout_id,
            reward=total,
            correct=item.correct,
            status=item.verdict.status,
            answer=item.verdict.answer,
            components=components,
            step_rewards=None if steps is None else tuple(float(value) for value in steps[0]),
            step_ends=None if steps is None else tuple(int(end) for end in steps[1]),
            seconds=item.verdict.seconds,
        )

    # -- components ---------------------------------------------------------------------------------------------

    def _column(self, name: str, items: Sequence[Item]) -> list[float | None]:
        if name == "reward_model":
            return self._model_column(items)
        if name in PURE:
            outcomes = [self._pure(PURE[name], item) for item in items]
        else:
            outcomes = self._functions[name].call_many([(item.problem, item.rollout.text) for item in items])
        return [self._checked(name, kind, value) for kind, value in outcomes]

    def _pure(self, function: Callable[..., float | None], item: Item) -> tuple[str, Any]:
        try:
            value = function(item, self.config, self.answer_format)
            # None for want of a verdict is counted already, under what the verifier or the tests said.
            return ("value", value) if value is not None or item.correct is not None else ("no_verdict", None)
        except Exception as error:  # one completion that breaks a component must not end the run: counted, unscored
            return "raised", f"{type(error).__name__}: {error}"

    def _model_column(self, items: Sequence[Item]) -> list[float | None]:
        if self._reward_model is None:
            raise RuntimeError(NO_MODEL.format("reward_model"))
        values = self._whole("reward_model", self._reward_model, [item.rollout for item in items])
        scores = [self._checked("reward_model", *outcome) for outcome in values]
        # Paid as a probability: logits have no bound, and a confident model would drown the verifier.
        return [None if score is None else 0.5 * (1.0 + math.tanh(0.5 * score)) for score in scores]

    def _steps(self, rollouts: Sequence[Rollout]) -> list[tuple[Any, Any] | None]:
        if self._process_model is None:
            if "process_model" in self.config.weights:
                raise RuntimeError(NO_MODEL.format("process_model"))
            return [None] * len(rollouts)
        outcomes = self._whole("process_model", self._process_model, rollouts)
        return [self._checked_steps(kind, value) for kind, value in outcomes]

    def _whole(
        self, name: str, model: Callable[[Sequence[Rollout]], Any], rollouts: Sequence[Rollout]
    ) -> list[tuple[str, Any]]:
        try:
            values = model(rollouts)
        except Exception as error:
            return [("raised", f"{type(error).__name__}: {error}")] * len(rollouts)
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(rollouts):
            got = len(values) if hasattr(values, "__len__") else type(values).__name__
            return [("wrong_length", f"expected a list of {len(rollouts)}, got {got}")] * len(rollouts)
        return [("value", value) for value in values]

    def _checked(self, name: str, kind: str, value: Any) -> float | None:
        """The value as a float, or None with the failure counted."""
        if kind == "value" and value is None:
            kind, value = "unscored", "it returned None"
        elif kind == "value" and (isinstance(value, (str, bytes)) or not hasattr(value, "__float__")):
            kind, value = "not_a_number", f"it returned {value!r:.80}"
        elif kind == "value" and not math.isfinite(float(value)):
            kind, value = "not_finite", f"it returned {float(value)}"
        if kind == "value":
            return float(value)
        if kind != "no_verdict":
            self._fault(name, kind, value)
        return None

    def _checked_steps(self, kind: str, value: Any) -> tuple[Any, Any] | None:
        if kind == "value" and value is None:
            kind, value = "unscored", "it returned None"
        elif kind == "value":
            try:
                rewards, ends = [float(reward) for reward in value[0]], [int(end) for end in value[1]]
                good = len(rewards) == len(ends) and all(math.isfinite(reward) for reward in rewards)
            except (TypeError, ValueError, IndexError):
                good = False
            if good:
                return rewards, ends
            kind, value = "not_steps", f"expected (step rewards, step ends), it returned {value!r:.80}"
        self._fault("process_model", kind, value)
        return None

    def _fault(self, name: str, kind: str, detail: object) -> None:
        key = f"{name}/{kind}"
        if not self.faults[key]:
            logger.warning("reward component %s %s: %s; the rollout is unscored", name, kind.replace("_", " "), detail)
        self.faults[key] += 1


def _lowest(steps: Sequence[tuple[Any, Any] | None]) -> list[float | None]:
    """A chain is as good as its weakest step; None without steps."""
    return [min(found[0]) if found and len(found[0]) else None for found in steps]


def _code_item(problem: Problem, rollout: Rollout, code: CodeVerdict) -> Item:
    """A code problem's verdict is that of its tests: correct when all pass."""
    return Item(problem, rollout, Verdict(code.status, None, code.rule, code.seconds), code)
