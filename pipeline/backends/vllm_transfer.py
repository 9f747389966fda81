"""Live weights to a vLLM engine on the same GPU, through vLLM's own weight-transfer engine (CUDA IPC).

Nothing is written: the engine maps the learner's buffers and copies from them. vLLM's trainer side packs the weights
into one buffer at a time and drives the update; here is only what carries its calls to the engine's process.
Source: https://docs.vllm.ai/en/latest/training/weight_transfer/
"""

from __future__ import annotations

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
        """Tell the engine how the weights are packed."""
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
    """Hand the module's parameters over; the checksum of what the engine received, as ``weights_checksum``.

    EngineDied when the engine ends meanwhile, RuntimeError when it refuses.
    """
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    client = EngineClient(engine)
    how = IPCTrainerInitInfo(rank=0, packed=True)
    WeightTransferTrainerFactory.trainer_init(how, client=client, source=ModuleSource(module)).send_weights()
    return client.checksum
