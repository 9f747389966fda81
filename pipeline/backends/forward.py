"""A causal language model run on a ``TokenBatch``: hidden states once, then the head at the completion positions only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pipeline.backends.plan_attention import ATTENTION, plan_tensors, register_plan_attention
from pipeline.backends.token_logprobs import token_logprobs
from pipeline.batching import Layout, TokenBatch

ROWS = 64
"""Tokens laid end to end are filled up to a multiple of this: oneDNN makes a kernel for each new number of rows, which
would cost a tenth of a small policy's step."""


class PolicyForward(nn.Module):
    """``forward(batch, temperature)`` gives (logprobs [N], entropy [N]) of the batch's completion tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        register_plan_attention()
        self.model = model

    def forward(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        device = head.weight.device
        hidden = _hidden_states(self.model, batch, device)
        predictors = torch.as_tensor(batch.predictors, device=device)
        targets = torch.as_tensor(batch.targets, device=device)
        chosen = hidden.flatten(0, 1).index_select(0, predictors)
        return token_logprobs(chosen, head.weight, getattr(head, "bias", None), targets, temperature)


def _hidden_states(model: Any, batch: TokenBatch, device: torch.device) -> Tensor:
    """[R, C, D] from the decoder under the head; adapters inside it are applied."""
    backbone = getattr(model, model.base_model_prefix)
    unused = 0 if batch.plan is None else -batch.input_ids.shape[1] % ROWS
    inputs = {
        "input_ids": pad(torch.as_tensor(batch.input_ids, device=device), (0, unused)),
        "position_ids": pad(torch.as_tensor(batch.position_ids, device=device), (0, unused)),
        "use_cache": False,
    }
    if batch.plan is None:
        mask = torch.as_tensor(batch.attention_mask, device=device)
        return backbone(attention_mask=mask, **inputs).last_hidden_state
    with planned_attention(model.config):
        # A 4-D mask is taken as it is; the plan is what says who sees whom.
        nothing = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
        plan = plan_tensors(batch.plan, device, unused)
        return backbone(attention_mask=nothing, plan=plan, **inputs).last_hidden_state


@contextmanager
def planned_attention(config: Any) -> Iterator[None]:
    """The model's attention follows the plan that it is given; afterwards it is the model's own again."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def choose_layout(model: Any) -> Layout:
    """ "shared" where the model's attention can be given a plan, else "padded" with the model's own attention.

    ValueError for a model whose logits are more than its head's product, since the head is run by itself.
    """
    config = model.config
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"model {config._name_or_path}: {name} is {getattr(config, name)}: the learner knows only models "
                f"whose logits are the head's product with the last hidden state; choose another model"
            )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = kinds == {"full_attention"} and getattr(config, "attn_logit_softcapping", None) is None
    return "shared" if plain and getattr(model, "_supports_attention_backend", False) else "padded"
