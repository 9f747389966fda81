"""The other rows of the unified paradigm (arXiv 2402.03300, Table 10) on the same inputs: SFT, RFT, Online RFT, DPO.

Every gradient has the form  sum of GC x grad logprob  and differs in data source, reward and gradient coefficient GC.
RFT and Online RFT are one loss: they differ in who sampled the completions, which is the flow's business.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from pipeline.config.training import ObjectiveConfig
from pipeline.losses import LossInputs, LossSums, aggregate, grpo_loss, masked, required, sequence_sums, token_sums


def objective_loss(inputs: LossInputs, objective: ObjectiveConfig) -> LossSums:
    """``LossSums`` of the objective's algorithm, with the metrics that every algorithm has."""
    losses = {"grpo": grpo_loss, "sft": sft_loss, "rft": rft_loss, "online_rft": rft_loss, "dpo": dpo_loss}
    result = losses[objective.algorithm](inputs, objective)
    sums, maxima = token_sums(inputs)
    return LossSums(result.loss, sums | result.sums, maxima | result.maxima)


def sft_loss(inputs: LossInputs, objective: ObjectiveConfig) -> LossSums:
    """Sum of -logprob over tokens; its count is tokens, so the loss is the mean negative log-likelihood. GC = 1.

    Example: token probabilities 1/2 and 1/8: (0.693 + 2.079) / 2 = 1.386 nats.
    """
    loss = -masked(inputs.logprobs, inputs.mask).sum()
    return LossSums(loss, {"policy_loss": loss.detach()}, {})


def rft_loss(inputs: LossInputs, objective: ObjectiveConfig) -> LossSums:
    """Sum of -I logprob with I = 1 for correct completions, 0 for others, given as advantages. GC = I (eq. 10)."""
    loss = aggregate(-masked(inputs.advantages, inputs.mask) * masked(inputs.logprobs, inputs.mask), inputs, objective)
    return LossSums(loss, {"policy_loss": loss.detach()}, {})


def dpo_loss(inputs: LossInputs, objective: ObjectiveConfig) -> LossSums:
    """Sum over pairs of -log sigmoid(beta (s_chosen - s_rejected)), s = mean or sum of (logprob - ref) over tokens.

    With ``dpo_length_average`` it is arXiv 2402.03300, eq. 12; without, arXiv 2305.18290, eq. 7. Its count is pairs.
    GC = beta sigmoid(beta (s_rejected - s_chosen)), + on the chosen and - on the rejected (eq. 14 up to beta, which the
    paper leaves out of the coefficient). Example: s equal on both sides: -log 1/2 = 0.693.
    """
    pairs = required(inputs.pairs, "pairs")
    reference = masked(required(inputs.ref_logprobs, "ref_logprobs"), inputs.mask)
    scores = sequence_sums(masked(inputs.logprobs, inputs.mask) - reference, inputs)
    if objective.dpo_length_average:
        scores = scores / inputs.lengths.clamp(min=1).to(scores.dtype)
    margin = objective.dpo_beta * (scores[pairs[:, 0]] - scores[pairs[:, 1]])
    loss = -logsigmoid(margin).sum()
    sums = {"policy_loss": loss.detach(), "dpo_margin": margin.detach().sum()}
    return LossSums(loss, sums | {"dpo_accuracy": (margin > 0).sum().to(torch.float32)}, {})
