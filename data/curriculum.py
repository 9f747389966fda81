"""Which problems a step gets: a pure function of (seed, round, step) and of the pass rates known so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config import DataConfig
from pipeline.seeds import derive_seed
from pipeline.types import Problem


def problems_for_step(
    problems: Sequence[Problem],
    *,
    seed: int,
    round_: int,
    step: int,
    count: int,
    history: Mapping[str, float] | None,
    config: DataConfig,
    steps_before: int = 0,
) -> list[Problem]:
    """``count`` distinct problems for a step of a round (both from 1).

    The walk goes epoch by epoch through the problems in a seeded order; a problem of full weight comes once an epoch,
    one of weight w (see ``problem_weights``) in a share w of the epochs. No problem comes twice in a step, and how
    often this was called before does not matter.

    ``history`` (problem_id → pass rate in [0, 1]) must be the same for every step of a round; with it each round walks
    anew. Without it all rounds are one walk, and ``steps_before`` is the number of steps in the rounds before.
    Raises ValueError when fewer than ``count`` problems have a weight.
    """
    weights = problem_weights(problems, history, config)
    pool = sorted((p for p in problems if weights[p.problem_id] > 0), key=lambda problem: problem.problem_id)
    if len(pool) < count:
        raise ValueError(
            f"a step needs {count} distinct problems but {len(pool)} of {len(problems)} may be drawn: lower "
            f"grpo.problems_per_step, or widen data.curriculum.window or raise data.curriculum.revisit"
        )
    shares = np.array([weights[problem.problem_id] for problem in pool])
    walk_seed = derive_seed(seed, "curriculum", None if history is None else round_)
    target = step - 1 + (steps_before if history is None else 0)
    return [pool[index] for index in _step_of_walk(shares / shares.max(), target, count, walk_seed)]


def problem_weights(
    problems: Sequence[Problem], history: Mapping[str, float] | None, config: DataConfig
) -> dict[str, float]:
    """problem_id → relative weight: the source's, times what the pass rate says (1 where none is known).

    Pass rates inside ``curriculum.window`` count fully, others ``curriculum.revisit``; with ``curriculum.prefer``
    "mixed" the weight is also 4 p (1 - p), at least ``curriculum.revisit``: highest where the group's rewards vary most.
    """
    sources = {name: source.weight for name, source in config.named_sources()}
    low, high = config.curriculum.window
    weights = {}
    for problem in problems:
        weight = sources.get(problem.source, 1.0)
        rate = None if history is None else history.get(problem.problem_id)
        if rate is not None:
            variance = 4.0 * rate * (1.0 - rate) if config.curriculum.prefer == "mixed" else 1.0
            weight *= max(variance, config.curriculum.revisit) if low <= rate <= high else config.curriculum.revisit
        weights[problem.problem_id] = weight
    return weights


def refill_problems(
    problems: Sequence[Problem], *, seed: int, round_: int, step: int, drawn: Sequence[str], count: int
) -> list[Problem]:
    """Up to ``count`` more problems for a step whose groups had no signal; none of the ids in ``drawn``.

    A pure function of its arguments: which problems come depends on (seed, round, step) and on what was drawn already.
    """
    taken = set(drawn)
    rest = [problem for problem in problems if problem.problem_id not in taken]
    rest.sort(key=lambda problem: derive_seed(seed, "refill", round_, step, problem.problem_id))
    return rest[:count]


def refill_count(*, wanted: int, mixed: int, drawn: int, budget: float) -> int:
    """How many more problems to draw for a step so that ``wanted`` groups have mixed rewards (DAPO, arXiv 2503.14476).

    ``mixed`` of the ``drawn`` groups so far have mixed rewards; the need is divided by that rate (at least 1 in 8).
    0 when there are enough, or when ``budget`` × ``wanted`` problems were drawn.

    ``refill_count(wanted=32, mixed=16, drawn=32, budget=3)`` is 32: 16 are missing, every second group is mixed.
    """
    left = int(budget * wanted) - drawn
    if mixed >= wanted or left <= 0:
        return 0
    rate = max(mixed / drawn if drawn else 1.0, 0.125)
    return min(left, int(np.ceil((wanted - mixed) / rate)))


# -- the walk ---------------------------------------------------------------------------------------------------


def _step_of_walk(shares: np.ndarray, target: int, count: int, seed: int) -> list[int]:
    """Positions in the pool of step ``target`` (from 0). ``shares`` [pool] in (0, 1]: participation in epochs.

    A step that straddles two epochs skips what it holds already; what it skipped comes first in the next step.
    """
    ahead: list[int] = []
    epoch = done = 0
    while True:
        whole = len(ahead) // count if len(set(ahead)) == len(ahead) else 0
        if target < done + whole:
            return ahead[(target - done) * count : (target - done + 1) * count]
        done += whole
        ahead = ahead[whole * count :]
        chosen: dict[int, None] = {}
        while len(chosen) < count:
            rest = []
            for index in ahead:
                if len(chosen) < count and index not in chosen:
                    chosen[index] = None
                else:
                    rest.append(index)
            ahead = rest
            if len(chosen) < count:
                ahead = ahead + _epoch(shares, epoch, seed)
                epoch += 1
        if done == target:
            return list(chosen)
        done += 1


def _epoch(shares: np.ndarray, epoch: int, seed: int) -> list[int]:
    """The pool positions that take part in an epoch, in seeded order.

    Position i takes part when its running total of shares passes a whole number, so over n epochs it comes n times its
    share, rounded; a seeded phase keeps problems of one weight from coming all in the same epoch.
    """
    phase = np.random.default_rng(derive_seed(seed, "phase")).random(len(shares))
    taking_part = np.floor((epoch + 1) * shares + phase) > np.floor(epoch * shares + phase)
    taking_part |= shares >= 1.0
    order = np.random.default_rng(derive_seed(seed, "epoch", epoch)).permutation(np.flatnonzero(taking_part))
    return [int(index) for index in order]
