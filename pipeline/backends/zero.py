"""DeepSpeed's configuration from the recipe, and whole weights and moments out of and into ZeRO's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.backends.learner_state import pick
from pipeline.backends.policy_model import plain_name
from pipeline.config import LearnerConfig, Recipe

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET = 500_000_000
"""Elements reduced or gathered at a time, at most: DeepSpeed's own default, taken down to the model's size."""


def deepspeed_config(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    """The engine's configuration. How many micro-batches a step has is told step by step."""
    config = recipe.learner
    size = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    bucket = max(1, min(BUCKET, size))
    zero: dict[str, Any] = {"stage": config.zero_stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if config.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": min(50_000_000, size), "stage3_max_live_parameters": 1_000_000_000}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    bfloat16 = recipe.model.dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1_000_000_000,
    }


def optimizer_groups(model: nn.Module, config: LearnerConfig) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def share_out(model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    """Leave each rank its part of every parameter (ZeRO-3), in the recipe's type; the parts in float32 where that is
    more than the type holds, by name. All ranks must call.

    One parameter after the other is copied to the rank's device, so that no rank ever holds the model; main memory
    holds the file's pages, once a machine.
    """
    import deepspeed

    deepspeed.zero.Init(module=_OneByOne(model), config_dict_or_path=deepspeed_config(recipe, model))
    dtype, exact = getattr(torch, recipe.model.dtype), {}
    for name, parameter in model.named_parameters():
        part: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        if part.dtype == torch.float32 and dtype != torch.float32:
            exact[name] = part.data
        # Placeholders too: the engine leaves the type of parameters that it did not share out itself.
        part.data, parameter.data = part.data.to(dtype), parameter.data.to(dtype)
    return exact


class _OneByOne(nn.Module):
    """A model whose parameters are copied as they are walked through: DeepSpeed sends the first rank's over the others',
    which would make each page of the mapped file a page of the rank's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self.model.parameters(recurse):
            parameter.data = parameter.data.clone()
            yield parameter


def restore_exact(trained: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Put what ``share_out`` gave into the float32 masters, which the engine has made from the rounded parts."""
    for name, parameter in trained.items():
        if name in exact:
            _master_part(parameter, None).data.copy_(exact[name])


def full_weights(parameters: Mapping[str, Tensor], recipe: Recipe, *, keep: bool) -> dict[str, Tensor]:
    """Whole weights in main memory, LoRA's additions at full precision; empty where not ``keep``. All ranks must call."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    out = {}
    for name, parameter in parameters.items():
        if recipe.learner.lora_rank and parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
        else:
            shards = [parameter] if hasattr(parameter, "ds_id") else []
            with deepspeed.zero.GatheredParameters(shards):
                whole = parameter.detach().clone() if keep else parameter
        if keep:
            out[name] = whole.detach().cpu()
    return out


def full_state(optimizer: Any, trained: Mapping[str, Tensor], recipe: Recipe, *, keep: bool) -> dict[str, Tensor]:
    """What ``Masters.state`` holds, gathered; empty where not ``keep``. All ranks must call."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _link_moments(optimizer)
    out: dict[str, Tensor] = {}
    steps = [state["step"] for state in optimizer.optimizer.state.values() if "step" in state]
    for name, parameter in trained.items():
        kinds: list[tuple[str, Any]] = []
        if recipe.model.dtype != "float32" or recipe.learner.lora_rank:
            kinds.append(("master", lambda p: safe_get_full_fp32_param(p)))
        if steps:
            kinds += [(kind, lambda p, k=kind: safe_get_full_optimizer_state(p, k)) for kind in MOMENTS]
        for kind, get in kinds:
            whole = get(parameter)
            if keep:
                out[f"{kind}/{name}"] = whole.detach().float().cpu().clone()
        if steps and keep:
            out[f"step/{name}"] = torch.tensor(float(steps[0]))
    return out


def restore_masters(
    trained: Mapping[str, Tensor], state: Mapping[str, Tensor], directory: Path, recipe: Recipe
) -> None:
    """Put the float32 masters back where the checkpoint's own weights do not hold them exactly."""
    if recipe.model.dtype == "float32" and not recipe.learner.lora_rank:
        return
    for name, parameter in trained.items():
        _set(parameter, pick(state, "master", name, directory), None)
        _publish(parameter, pick(state, "master", name, directory))


def restore_moments(
    optimizer: Any, trained: Mapping[str, Tensor], state: Mapping[str, Tensor], directory: Path
) -> None:
    """Put AdamW's moments and step count back, into whatever shards there are now."""
    if not any(name.startswith("step/") for name in state):
        return  # saved before the first step
    step = state[next(name for name in state if name.startswith("step/"))]
    for flat in _flat_parameters(optimizer):
        optimizer.optimizer.state[flat] = {
            "step": step.clone(), "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)
        }  # fmt: skip
    _link_moments(optimizer)
    for name, parameter in trained.items():
        for kind in MOMENTS:
            _set(parameter, pick(state, kind, name, directory), kind)


def restore_base(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor], directory: Path) -> None:
    """Put the weights below LoRA's additions back: the checkpoint's own have them merged in."""
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            _publish(parameter, pick(state, "base", plain_name(name), directory))


def _link_moments(optimizer: Any) -> None:
    """Tell each parameter of ZeRO 1 and 2 where its moments are. DeepSpeed itself does so after the first group's first
    step, when the other groups have none yet."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state") and optimizer.optimizer.state:
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _flat_parameters(optimizer: Any) -> Sequence[Tensor]:
    """What AdamW itself sees: this rank's flat float32 partitions."""
    return getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups


def _set(parameter: Any, value: Tensor, kind: str | None) -> None:
    """Write this rank's part of a whole master (kind None) or moment."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if not hasattr(parameter, "ds_id"):
        value = value.to(parameter.device)
        if kind is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)
        return
    part = _master_part(parameter, kind)
    # DeepSpeed's own setter expects a size that divides by the ranks; the last part may be shorter than the others.
    start = part.numel() * parameter._z3_optimizer._get_param_partition_rank(parameter)
    piece = value.flatten()[start : start + part.numel()]
    part.data[: piece.numel()].copy_(piece)


def _master_part(parameter: Any, kind: str | None) -> Tensor:
    """This rank's part of a master (kind None) or moment under ZeRO-3, in place."""
    part, _ = parameter._z3_optimizer._get_fp32_opt_state_partition(
        parameter, release_swap_buffers=False, optim_state_key=kind
    )
    return part


def _publish(parameter: Any, value: Tensor) -> None:
    """Put the rounded master into the module."""
    import deepspeed

    if hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
    else:
        parameter.data.copy_(value)
