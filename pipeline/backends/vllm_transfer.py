"""Live weights to a vLLM engine on the same GPU, through vLLM's own weight-transfer engine (CUDA IPC).

Nothing is written: the engine maps the learner's parameters and copies from them. vLLM's trainer side drives the update;
here is only what carries its calls to the engine's process.
Source: https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.backends.vllm_child import ChildEngine

if TYPE_CHECKING:
    from torch import nn


class EngineClient:
    """vLLM's ``VLLMWeightSyncClient``: each call is a message to the engine's process, and waits for its answer."""

    def __init__(self, engine: ChildEngine) -> None:
        self._engine = engine
        self.checksum = ""
        """Of the weights that the engine received, once the update is finished."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tell the engine how the weights come."""
        self._ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Open an update; what arrives from here on counts into the checksum."""
        self._ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have the engine take the weights at these addresses; they are copied when this returns."""
        self._ask("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update: repacked weights, no prefix of the weights before, and a checksum of what came."""
        del weight_version  # ours is the checksum
        self.checksum = self._ask("finish_weight_update")

    def _ask(self, method: str, *arguments: Any) -> str:
        self._engine.send(("transfer", method, arguments))
        kind, text = self._engine.receive()
        if kind == "refused":
            raise RuntimeError(f"{self._engine.name} did not take the learner's weights ({method}): {text}")
        return text


def send_weights(engine: ChildEngine, module: nn.Module) -> str:
    """Hand the module's parameters over as they lie (``check_names`` has passed them); the checksum of what the engine
    received, as ``weights_checksum``.

    EngineDied when the engine ends meanwhile, RuntimeError when it refuses.
    """
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    client = EngineClient(engine)
    how = IPCTrainerInitInfo(rank=0, packed=False)  # packed, a tensor of more than the buffer's 1 GiB would not fit
    WeightTransferTrainerFactory.trainer_init(how, client=client, source=ModuleSource(module)).send_weights()
    return client.checksum


def check_names(module: nn.Module, checkpoint: Path) -> None:
    """ValueError when the policy's files hold other tensors than its parameters: the engine knows the files' names."""
    from safetensors import safe_open

    filed: set[str] = set()
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            filed.update(opened.keys())
    strange = [name for name, _ in module.named_parameters() if name not in filed]
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    strange += [name for name in module.state_dict() if name not in tied]  # buffers
    if strange:
        raise ValueError(
            f"sampler.vllm.weight_sync is 'ipc', which hands over parameters under the names of the policy's files, but "
            f"{strange[0]} is not one of both (fused experts and buffers are not): set sampler.vllm.weight_sync = 'checkpoint'"
        )
