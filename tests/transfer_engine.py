"""vLLM's IPC weight transfer with arrays in place of CUDA handles: all but the handles is vLLM's own, on any machine.

``PolicyLoader`` is the worker extension of the engine's process: importing it puts ``ArrayEngine`` in the place of vLLM's.
"""

from __future__ import annotations

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
)

from pipeline.backends import vllm_extension


class ArrayTrainer(IPCTrainerWeightTransferEngine):
    """The trainer's side: sends in two chunks, as a packed transfer of a large model does."""

    def __init__(self, *, client, source, is_sender=True, packed=False, packed_buffer_size_bytes=0):
        self.client, self.source, self.is_sender, self.packed = client, source, is_sender, packed

    @classmethod
    def trainer_init(cls, init_info: IPCTrainerInitInfo, *, client, source=None):
        assert init_info.packed
        client.init_weight_transfer_engine({"packed": True})
        return cls(client=client, source=source, packed=True)

    def _send(self, source):
        pairs = list(source)
        for chunk in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]):
            self._do_send(
                names=[name for name, _ in chunk],
                dtype_names=[str(weight.dtype).removeprefix("torch.") for _, weight in chunk],
                shapes=[list(weight.shape) for _, weight in chunk],
                ipc_handles=[{"array": (weight.detach().numpy(),)} for _, weight in chunk],
            )

    @staticmethod
    def _post_send_sync() -> None:
        """There is no GPU to wait for."""


class ArrayEngine(IPCWeightTransferEngine):
    """The engine's side."""

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        assert self.packed
        arrays = [handle["array"][0] for handle in update_info.ipc_handles]
        self.model.load_weights(
            [(name, torch.from_numpy(array.copy())) for name, array in zip(update_info.names, arrays, strict=True)]
        )


class PolicyLoader(vllm_extension.PolicyLoader):
    """What the sampler gives to vLLM's workers, in a process whose transfer engine takes arrays."""


WeightTransferEngineFactory._registry["ipc"] = lambda: ArrayEngine
