"""vLLM's IPC weight transfer without a GPU: the CUDA functions that it calls pass arrays, the rest is vLLM's own.

``PolicyLoader`` is the worker extension of the engine's process; importing it there makes the replacements.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.weight_transfer import ipc_engine

from pipeline.backends import vllm_extension


def _share(weight: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
    """In place of ``reduce_tensor``: what it returns has seven entries or more, and vLLM sets the seventh."""
    return None, (weight.detach().numpy(), *[None] * 6)


def _open(array: Any, *_: Any) -> torch.Tensor:
    """In place of ``rebuild_cuda_tensor``."""
    return torch.from_numpy(array.copy())


REPLACED: list[tuple[Any, str, Any]] = [
    (ipc_engine, "reduce_tensor", _share),
    (ipc_engine, "rebuild_cuda_tensor", _open),
    (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="no GPU")),
    (torch.cuda, "ipc_collect", lambda: None),
    (torch.accelerator, "current_device_index", lambda: 0),
    (torch.accelerator, "synchronize", lambda: None),
]


class PolicyLoader(vllm_extension.PolicyLoader):
    """As the sampler's own, in a process where arrays stand for handles."""

    for _where, _name, _new in REPLACED:
        setattr(_where, _name, _new)
