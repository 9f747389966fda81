"""Every objective by hand-computed numbers, gradient coefficients by autograd, invariants, and extremes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from pipeline.config import ObjectiveConfig
from pipeline.losses import LossInputs, aggregate, grpo_loss, kl_estimate, loss_count, mismatch_weights
from pipeline.losses_unified import objective_loss

LN2 = math.log(2)
KINDS = [
    {"ratio": ratio, "surrogate": surrogate, "aggregation": aggregation, "kl_estimator": kl, "kl_weighted": weighted}
    for ratio, surrogate, aggregation, (kl, weighted) in itertools.product(
        ("token", "sequence"), ("clip", "cispo"), ("sequence_mean", "token_mean", "constant"),
        (("k1", False), ("k2", False), ("k3", False), ("k3", True)),
    )
]  # fmt: skip


def objective(**fields: object) -> ObjectiveConfig:
    return ObjectiveConfig(**{"kl_coefficient": 0.0, "max_tokens": 8, **fields})  # type: ignore[arg-type]


def inputs(logprobs: list[float], lengths: list[int], **fields: object) -> LossInputs:
    """Token tensors in float64; lists become tensors, advantages default to 1."""
    tensors = {name: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for name, v in fields.items()}
    size = torch.tensor(lengths)
    return LossInputs(
        logprobs=torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        advantages=tensors.pop("advantages", torch.ones(len(logprobs), dtype=torch.float64)),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), size),
        lengths=size,
        mask=tensors.pop("mask", torch.ones(len(logprobs), dtype=torch.bool)),
        **tensors,
    )


def random_inputs(lengths: list[int], seed: int = 0) -> LossInputs:
    draw = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    old = -3 * torch.rand(n, generator=draw, dtype=torch.float64) - 0.1
    noise = [torch.randn(n, generator=draw, dtype=torch.float64) * scale for scale in (0.3, 0.3, 0.05, 1.0)]
    return inputs(
        (old + noise[0]).tolist(), lengths, advantages=noise[3], old_logprobs=old,
        ref_logprobs=old + noise[1], sampling_logprobs=old + noise[2],
    )  # fmt: skip


def gradient(data: LossInputs, config: ObjectiveConfig, count: float = 1.0) -> Tensor:
    (grad,) = torch.autograd.grad(objective_loss(data, config).loss / count, data.logprobs)
    return grad


# -- numbers by hand ----------------------------------------------------------------------------------------------


def test_clipped_surrogate_of_two_ratios() -> None:
    data = inputs([math.log(1.5), math.log(0.5)], [2], old_logprobs=[0.0, 0.0])
    # -min(1.5, 1.2) - min(0.5, 0.8) = -1.7; over its length 2: -0.85
    assert grpo_loss(data, objective()).loss.item() == pytest.approx(-0.85)


def test_negative_advantages_are_clipped_from_below_and_bounded_by_delta() -> None:
    data = inputs([math.log(0.5), math.log(9.0)], [2], old_logprobs=[0.0, 0.0], advantages=[-1.0, -1.0])
    # -min(-0.5, -0.8) = 0.8 and -min(-9, -1.2) = 9: sum 9.8; with delta 4 the second is -min(-4, -1.2) = 4: sum 4.8
    assert grpo_loss(data, objective(aggregation="token_mean")).loss.item() == pytest.approx(9.8)
    assert grpo_loss(data, objective(aggregation="token_mean", delta=4.0)).loss.item() == pytest.approx(4.8)


def test_clip_higher_moves_only_the_upper_bound() -> None:
    data = inputs([math.log(1.5)], [1], old_logprobs=[0.0])
    # min(1.5, 1.28) = 1.28
    assert grpo_loss(data, objective(clip_high=0.28)).loss.item() == pytest.approx(-1.28)


def test_cispo_weighs_the_logprob_and_keeps_every_gradient() -> None:
    data = inputs([math.log(0.3), math.log(0.9)], [2], old_logprobs=[math.log(0.1), math.log(0.9)])
    config = objective(surrogate="cispo", clip_high=1.0, aggregation="token_mean")
    # ratios 3 (capped at 2) and 1: -(2 ln 0.3 + ln 0.9) = 2.408 + 0.105
    assert grpo_loss(data, config).loss.item() == pytest.approx(-2 * math.log(0.3) - math.log(0.9))
    assert gradient(data, config).tolist() == pytest.approx([-2.0, -1.0])


def test_sequence_ratio_is_the_geometric_mean() -> None:
    data = inputs([math.log(1.21), 0.0, math.log(2.0)], [2, 1], old_logprobs=[0.0, 0.0, 0.0])
    # exp((ln 1.21 + 0) / 2) = 1.1 for both tokens of the first, clip(2) = 1.2 for the second: mean 1.1, then 1.2
    assert grpo_loss(data, objective(ratio="sequence")).loss.item() == pytest.approx(-1.1 - 1.2)


def test_counts_of_the_three_aggregations() -> None:
    lengths, cut = [2, 6], [False, True]
    assert [loss_count(lengths, cut, objective(aggregation=a)) for a in ("sequence_mean", "token_mean", "constant")] == [
        2.0, 8.0, 16.0,  # sequences; 2 + 6 tokens; 2 sequences x max_tokens 8
    ]  # fmt: skip
    masked = [
        loss_count(lengths, cut, objective(aggregation=a, mask_truncated=True))
        for a in ("sequence_mean", "token_mean", "constant")
    ]
    assert masked == [1.0, 2.0, 8.0]
    assert loss_count([], [], objective()) == 1.0


@pytest.mark.parametrize(("estimator", "value"), [("k1", -LN2), ("k2", LN2**2 / 2), ("k3", 1 - LN2)])
def test_kl_estimators_at_twice_the_probability(estimator: str, value: float) -> None:
    # d = ln 2: k1 = -0.693, k2 = 0.240, k3 = 2 - 0.693 - 1 = 0.307
    got = kl_estimate(torch.tensor([-LN2]), torch.tensor([0.0]), objective(kl_estimator=estimator))
    assert got.item() == pytest.approx(value)


def test_weighted_kl_is_multiplied_by_the_ratio() -> None:
    data = inputs([math.log(0.4)], [1], old_logprobs=[math.log(0.2)], ref_logprobs=[math.log(0.8)], advantages=[0.0])
    # ratio 2, d = ln 2: 0.5 x 2 x (1 - ln 2)
    config = objective(kl_coefficient=0.5, kl_weighted=True)
    assert grpo_loss(data, config).loss.item() == pytest.approx(1 - LN2)


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        # w = 3, 1, 0.1 of one sequence and 1 of another
        ({"mismatch": "token_truncate"}, [2, 1, 0.1, 1]),
        ({"mismatch": "token_mask", "mismatch_min": 0.5}, [0, 1, 0, 1]),
        # exp((ln 3 + 0 + ln 0.1) / 3) = 0.3^(1/3) = 0.669: inside [0.5, 2], outside [0.7, 2]
        ({"mismatch": "sequence_mask", "mismatch_min": 0.5}, [1, 1, 1, 1]),
        ({"mismatch": "sequence_mask", "mismatch_min": 0.7}, [0, 0, 0, 1]),
    ],
)
def test_mismatch_weights(fields: dict[str, object], weights: list[float]) -> None:
    data = inputs([0.0] * 4, [3, 1], sampling_logprobs=[-math.log(3), 0.0, math.log(10), 0.0])
    got = mismatch_weights(torch.zeros(4, dtype=torch.float64), data, objective(**fields))
    assert got is not None and got.tolist() == pytest.approx(weights)


def test_mismatch_correction_leaves_the_kl_alone() -> None:
    data = inputs([math.log(0.5)], [1], ref_logprobs=[0.0], sampling_logprobs=[math.log(0.01)])
    config = objective(kl_coefficient=1.0, mismatch="token_mask")
    # w = 50 > 2: the policy term (-1) is dropped, k3 = 2 - ln 2 - 1 stays
    assert grpo_loss(data, config).loss.item() == pytest.approx(1 - LN2)


def test_sft_is_the_negative_log_likelihood() -> None:
    data = inputs([math.log(0.5), math.log(0.125)], [1, 1])
    # ln 2 + ln 8 = 4 ln 2, over 2 tokens
    assert objective_loss(data, objective(algorithm="sft")).loss.item() / 2 == pytest.approx(2 * LN2)


@pytest.mark.parametrize(("average", "margin"), [(True, 0.5 * (2.0 - 1.0)), (False, 0.5 * (4.0 - 1.0))])
def test_dpo_of_one_pair(average: bool, margin: float) -> None:
    # log ratios to the reference: chosen (1, 3), mean 2, sum 4; rejected (1): 1
    data = inputs([-1.0, -1.0, -1.0], [2, 1], ref_logprobs=[-2.0, -4.0, -2.0], pairs=torch.tensor([[0, 1]]))
    config = objective(algorithm="dpo", dpo_beta=0.5, dpo_length_average=average)
    assert objective_loss(data, config).loss.item() == pytest.approx(math.log(1 + math.exp(-margin)))


# -- gradient coefficients (arXiv 2402.03300, Table 10): gradient of the loss by a token's logprob = -GC / (count |o|) -----


@pytest.mark.parametrize("process", [False, True])
def test_grpo_gradient_is_advantage_plus_kl_pull(process: bool) -> None:
    data = random_inputs([3, 1, 5])
    on_policy = LossInputs(
        logprobs=data.logprobs, sequence=data.sequence, lengths=data.lengths, mask=data.mask,
        # process supervision: one advantage a token; outcome supervision: one a completion
        advantages=data.advantages if process else data.advantages[data.sequence], ref_logprobs=data.ref_logprobs,
    )  # fmt: skip
    beta = 0.04
    assert data.ref_logprobs is not None
    coefficient = on_policy.advantages + beta * ((data.ref_logprobs - data.logprobs).exp() - 1)
    expected = -coefficient / (3 * data.lengths[data.sequence])
    torch.testing.assert_close(gradient(on_policy, objective(kl_coefficient=beta), count=3), expected)


@pytest.mark.parametrize("algorithm", ["rft", "online_rft"])
def test_rft_gradient_is_the_indicator(algorithm: str) -> None:
    data = inputs([-1.0, -2.0, -3.0], [2, 1], advantages=[1.0, 1.0, 0.0])
    # I = 1 for the first completion of 2 tokens, 0 for the second; 2 sequences
    assert gradient(data, objective(algorithm=algorithm), count=2).tolist() == pytest.approx([-0.25, -0.25, 0.0])


def test_sft_gradient_is_one_a_token() -> None:
    data = inputs([-1.0, -2.0, -3.0], [2, 1])
    assert gradient(data, objective(algorithm="sft"), count=3).tolist() == pytest.approx([-1 / 3] * 3)


@pytest.mark.parametrize("average", [True, False])
def test_dpo_gradient_is_the_sigmoid_of_the_margin(average: bool) -> None:
    data = inputs([-1.0, -2.0, -0.5], [2, 1], ref_logprobs=[-1.5, -2.5, -2.0], pairs=torch.tensor([[0, 1]]))
    config = objective(algorithm="dpo", dpo_beta=0.3, dpo_length_average=average)
    chosen, rejected = (0.5, 1.5) if average else (1.0, 1.5)
    coefficient = 0.3 / (1 + math.exp(-0.3 * (rejected - chosen)))
    share = 2 if average else 1
    expected = [-coefficient / share, -coefficient / share, coefficient]
    assert gradient(data, config).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_gradient_is_zero_at_the_reference_and_pulls_towards_it(estimator: str) -> None:
    # below, at and above the reference: descending the loss must raise, keep and lower the logprob
    data = inputs([-2.0, -1.0, -0.5], [3], ref_logprobs=[-1.0] * 3, advantages=[0.0] * 3)
    grad = gradient(data, objective(kl_coefficient=1.0, kl_estimator=estimator))
    assert grad[0] < 0 and grad[1] == 0 and grad[2] > 0


# -- invariants ---------------------------------------------------------------------------------------------------


def _part(data: LossInputs, chosen: list[int]) -> LossInputs:
    keep = torch.cat([torch.nonzero(data.sequence == b)[:, 0] for b in chosen])
    lengths = data.lengths[chosen]
    fields = {
        name: getattr(data, name)[keep]
        for name in ("logprobs", "advantages", "mask", "old_logprobs", "ref_logprobs", "sampling_logprobs")
    }
    return LossInputs(sequence=torch.repeat_interleave(torch.arange(len(chosen)), lengths), lengths=lengths, **fields)


@pytest.mark.parametrize("mismatch", ["none", "token_truncate", "token_mask", "sequence_mask"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_micro_batches_and_order_change_nothing(kind: dict[str, object], mismatch: str) -> None:
    data = random_inputs([3, 1, 5, 2])
    config = objective(kl_coefficient=0.3, mismatch=mismatch, mismatch_max=1.05, mismatch_min=0.95, **kind)
    whole = objective_loss(data, config).loss
    parts = sum((objective_loss(_part(data, chosen), config).loss for chosen in ([3, 0], [2], [1])), torch.zeros(()))
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(loss, data.logprobs)[0] for loss in (whole, parts)]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-12)


def test_on_policy_means_the_detached_current_logprobs() -> None:
    data = random_inputs([4, 2])
    explicit = LossInputs(
        logprobs=data.logprobs, advantages=data.advantages, sequence=data.sequence, lengths=data.lengths,
        mask=data.mask, old_logprobs=data.logprobs.detach(),
    )  # fmt: skip
    implied = LossInputs(
        logprobs=data.logprobs, advantages=data.advantages, sequence=data.sequence, lengths=data.lengths, mask=data.mask
    )
    torch.testing.assert_close(gradient(explicit, objective()), gradient(implied, objective()))
    sums = grpo_loss(implied, objective()).sums
    assert sums["ratio_mean"].item() == 6 and sums["clip_low"].item() == 0 and sums["clip_high"].item() == 0


def test_metrics_count_clipped_tokens_on_the_side_where_the_gradient_stops() -> None:
    data = inputs(
        [math.log(0.5), math.log(2.0), math.log(2.0), 0.0], [4],
        old_logprobs=[0.0] * 4, advantages=[-1.0, 1.0, -1.0, 1.0],
    )  # fmt: skip
    result = grpo_loss(data, objective())
    # ratio 0.5 pushed down: low; 2 pushed up: high; 2 pushed down: not clipped; 1: inside. Mean ratio (0.5+2+2+1)/4
    assert [result.sums[k].item() for k in ("clip_low", "clip_high", "ratio_mean")] == pytest.approx([1, 1, 5.5])
    assert result.maxima["ratio_max"].item() == pytest.approx(2.0)
    grad = gradient(data, objective())
    assert grad[0] == 0 and grad[1] == 0 and grad[2] > 0 and grad[3] < 0


# -- extremes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_extreme_ratios_stay_finite(kind: dict[str, object], dtype: torch.dtype) -> None:
    far = [-50.0, 0.0, 50.0, -200.0, 200.0]
    logprobs = torch.full((5,), -1.0, dtype=dtype, requires_grad=True)
    shift = torch.tensor(far, dtype=dtype)
    data = LossInputs(
        logprobs=logprobs, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=dtype), sequence=torch.arange(5),
        lengths=torch.ones(5, dtype=torch.long), mask=torch.ones(5, dtype=torch.bool), old_logprobs=-1 - shift,
        ref_logprobs=-1 + shift, sampling_logprobs=-1 - shift,
    )  # fmt: skip
    result = objective_loss(data, objective(kl_coefficient=0.1, mismatch="token_truncate", **kind))
    (grad,) = torch.autograd.grad(result.loss, logprobs)
    assert torch.isfinite(result.loss) and torch.isfinite(grad).all()
    assert all(torch.isfinite(v).all() for v in [*result.sums.values(), *result.maxima.values()])


def test_ratio_of_e_50_is_computed_not_cut() -> None:
    data = inputs([0.0], [1], old_logprobs=[-50.0], advantages=[-1.0])
    assert grpo_loss(data, objective()).loss.item() == pytest.approx(math.exp(50))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_masked_positions_may_hold_minus_infinity(kind: dict[str, object]) -> None:
    config = objective(kl_coefficient=0.1, mismatch="sequence_mask", **kind)
    inf = -math.inf
    mask = torch.tensor([True, False, True])
    wild = inputs([-1.0, inf, -2.0], [2, 1], mask=mask, old_logprobs=[-1.1, inf, -2.0], ref_logprobs=[-1.0, inf, -1.5],
                  sampling_logprobs=[-1.0, inf, -2.0], advantages=[1.0, math.nan, -1.0])  # fmt: skip
    tame = inputs([-1.0, -9.0, -2.0], [2, 1], mask=mask, old_logprobs=[-1.1, 0.0, -2.0], ref_logprobs=[-1.0, 0.0, -1.5],
                  sampling_logprobs=[-1.0, 0.0, -2.0], advantages=[1.0, 5.0, -1.0])  # fmt: skip
    results = [objective_loss(data, config) for data in (wild, tame)]
    grads = [torch.autograd.grad(r.loss, d.logprobs)[0] for r, d in zip(results, (wild, tame), strict=True)]
    assert torch.equal(results[0].loss, results[1].loss) and torch.isfinite(results[0].loss)
    assert torch.equal(grads[0], grads[1]) and grads[0][1] == 0
    assert all(torch.isfinite(value).all() for value in results[0].sums.values())


def test_an_empty_completion_adds_nothing() -> None:
    with_empty = inputs([-1.0, -2.0], [1, 0, 1], advantages=[1.0, -1.0], old_logprobs=[-1.2, -2.1])
    without = inputs([-1.0, -2.0], [1, 1], advantages=[1.0, -1.0], old_logprobs=[-1.2, -2.1])
    for ratio in ("token", "sequence"):
        results = [grpo_loss(data, objective(ratio=ratio)).loss for data in (with_empty, without)]
        assert torch.equal(results[0], results[1])


def test_aggregate_divides_by_length_only_under_sequence_mean() -> None:
    data = inputs([-1.0] * 4, [3, 1])
    ones = torch.ones(4, dtype=torch.float64)
    # 3/3 + 1/1 = 2; 4 tokens
    assert aggregate(ones, data, objective()).item() == pytest.approx(2.0)
    assert aggregate(ones, data, objective(aggregation="token_mean")).item() == 4.0


def test_a_missing_array_is_named() -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        grpo_loss(inputs([-1.0], [1]), objective(kl_coefficient=0.1))


def test_which_objectives_read_the_reference() -> None:
    needs = {
        (algorithm, kl): objective(algorithm=algorithm, kl_coefficient=kl).needs_reference
        for algorithm in ("grpo", "rft", "online_rft", "dpo", "sft")
        for kl in (0.0, 0.1)
    }
    assert {key for key, needed in needs.items() if needed} == {("grpo", 0.1), ("dpo", 0.0), ("dpo", 0.1)}
