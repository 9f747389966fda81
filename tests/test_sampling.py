"""How one token is drawn, in vocabularies that are searched at once and in those that are searched by blocks."""

import math

import numpy as np
import pytest
import torch

from pipeline.backends.sampling import pick_tokens
from pipeline.protocols import SamplingParams

FREE = SamplingParams(8)
SIZES = [5, 512, 513, 1100, 49152]


def logits(rows: int, size: int) -> torch.Tensor:
    """Every seventh token is impossible."""
    drawn = 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    drawn[:, ::7] = -torch.inf
    return drawn


@pytest.mark.parametrize("size", SIZES)
def test_the_token_is_the_inverse_of_the_cumulative_distribution(size):
    given, draw = logits(200, size), np.random.default_rng(0).random(200)
    ids, logprobs = pick_tokens(given, FREE, torch.from_numpy(draw))
    weights = np.exp(given.double().numpy())
    running = np.cumsum(weights / weights.sum(-1, keepdims=True), -1)
    for row, (i, u) in enumerate(zip(ids.tolist(), draw, strict=True)):
        # float32 probabilities: within 1e-5 of the exact one's edges.
        assert running[row, i] > u - 1e-5
        assert i == 0 or running[row, i - 1] < u + 1e-5
    torch.testing.assert_close(logprobs, torch.log_softmax(given, -1).gather(1, ids[:, None])[:, 0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-53])
def test_an_impossible_token_is_never_drawn(size, uniform):
    given = logits(50, size)
    ids, logprobs = pick_tokens(given, FREE, torch.full((50,), uniform, dtype=torch.float64))
    assert (ids % 7 != 0).all()
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize(("likely", "size"), [([1, 4], 5), ([3, 700], 1100), ([511, 512], 1024), ([1099], 1100)])
def test_the_ends_of_the_distribution_are_its_first_and_last_possible_token(likely, size):
    given = torch.full((2, size), -torch.inf)
    given[:, likely] = 0.0
    ids, logprobs = pick_tokens(given, FREE, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ids.tolist() == [likely[0], likely[-1]]
    torch.testing.assert_close(logprobs, torch.full((2,), -math.log(len(likely))))


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_drawn_alike_whatever_the_other_rows(size):
    given, draw = logits(64, size), torch.from_numpy(np.random.default_rng(1).random(64))
    ids, logprobs = pick_tokens(given, FREE, draw)
    for rows in (slice(0, 1), slice(3, 20), slice(63, 64)):
        some, theirs = pick_tokens(given[rows], FREE, draw[rows])
        assert torch.equal(some, ids[rows])
        assert torch.equal(theirs, logprobs[rows])


@pytest.mark.parametrize("size", [5, 1100])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told(size, broken, temperature):
    given = logits(3, size)
    given[1, 3] = broken
    with pytest.raises(ValueError, match=r"logits are not numbers.*earlier checkpoint"):
        pick_tokens(given, SamplingParams(8, temperature=temperature), torch.full((3,), 0.5, dtype=torch.float64))


def test_frequencies_in_a_vocabulary_of_blocks_are_the_probabilities():
    # Tokens 3, 600 and 1,000 of 1,100 with 1/2, 3/8 and 1/8: of 8,000 evenly spaced uniforms 4,000, 3,000 and 1,000.
    given = torch.full((1, 1100), -torch.inf)
    given[0, 3], given[0, 600], given[0, 1000] = math.log(4), math.log(3), 0.0
    uniforms = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    ids, logprobs = pick_tokens(given.expand(8000, -1), FREE, uniforms)
    assert torch.bincount(ids)[[3, 600, 1000]].tolist() == [4000, 3000, 1000]
    torch.testing.assert_close(logprobs[ids == 600], torch.full((3000,), math.log(3 / 8)))
