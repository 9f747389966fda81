"""The probe tells weights that arrived from weights that did not, whatever the engines claim."""

import math

import numpy as np
import pytest

from pipeline.backends.probe import check_gap, measure_gap
from pipeline.config import Recipe, SamplerConfig, load_recipe
from pipeline.protocols import PolicyVersion
from pipeline.types import Completion


class FixedSampler:
    """Always the same tokens with the same logprobs."""

    version = PolicyVersion("step-7", "abc")

    def __init__(self, *logprobs: float) -> None:
        self.logprobs = logprobs
        self.asked = []

    def sample(self, prompt_token_ids, params, seeds):
        self.asked.append((prompt_token_ids, params, seeds))
        completion = Completion(tuple(range(len(self.logprobs))), self.logprobs, "length")
        return [[completion] * len(seeds[0])]


class FixedLearner:
    """Says the same logprobs of every sequence."""

    def __init__(self, *logprobs: float) -> None:
        self.answer = np.array(logprobs, dtype=np.float32)
        self.asked = []

    def logprobs(self, sequences, temperature=1.0):
        self.asked.append((sequences, temperature))
        return [self.answer for _ in sequences]


def recipe(**sampler) -> Recipe:
    return Recipe(sampler=SamplerConfig(**sampler))


def test_the_gap_is_the_mean_and_the_largest_difference():
    gap = measure_gap(FixedSampler(-1.0, -2.0), FixedLearner(-1.25, -2.0), [5, 6], recipe(), 1.0)
    # Four completions of two tokens; the differences are 0.25 and 0, their mean 0.125.
    assert (gap.mean, gap.largest, gap.tokens) == (0.125, 0.25, 8)
    assert (gap.sampler, gap.learner) == (-1.0, -1.25)


def test_a_gap_within_the_tolerance_passes():
    gap = check_gap(FixedSampler(-1.0), FixedLearner(-1.0005), [5], recipe(sync_tolerance=1e-3))
    assert gap.largest == pytest.approx(0.0005, rel=1e-3)


def test_a_gap_over_the_tolerance_stops_with_both_numbers_and_the_way_out():
    with pytest.raises(RuntimeError) as error:
        check_gap(FixedSampler(-1.0, -2.0), FixedLearner(-1.0, -4.5), [5], recipe())
    text = str(error.value)
    for part in ("step-7", "-2.000000", "-4.500000", "2.5 nats", "sampler.sync_tolerance is 0.001"):
        assert part in text


@pytest.mark.parametrize("side", ["sampler", "learner"])
def test_nan_on_either_side_stops_the_run(side):
    values = {"sampler": -1.0, "learner": -1.0, side: math.nan}
    with pytest.raises(RuntimeError, match="nan"):
        check_gap(FixedSampler(values["sampler"]), FixedLearner(values["learner"]), [5], recipe())


def test_the_probe_draws_from_the_full_distribution_at_the_recipes_temperature():
    sampler, learner = FixedSampler(-1.0), FixedLearner(-1.0)
    check_gap(sampler, learner, [5, 6], recipe(temperature=0.7, max_tokens=9))
    ((prompts, params, seeds),) = sampler.asked
    assert prompts == [[5, 6]]
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.7, 1.0, 0, 0.0, 9)
    assert len(set(seeds[0])) == 4
    ((sequences, temperature),) = learner.asked
    assert temperature == 0.7
    assert {tuple(s.prompt_token_ids) for s in sequences} == {(5, 6)}


@pytest.mark.parametrize(("field", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1)])
def test_a_recipe_that_trains_on_a_cut_distribution_is_refused_with_the_reason(field, value):
    with pytest.raises(ValueError, match=rf"sampler\.{field} is {value}: training needs the full distribution"):
        load_recipe("embedded", [f"sampler.{field}={value}"])
