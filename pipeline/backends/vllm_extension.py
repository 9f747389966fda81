"""What vLLM's workers need to take over a policy: reload, repack, report. Imported inside vLLM's processes only.

Given to vLLM as ``--worker-extension-cls pipeline.backends.vllm_extension.PolicyLoader``, by the sampler for the engines
that it starts and by the user for those that run elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pipeline.models import combine_checksums, tensor_digest


class PolicyLoader:
    """Mixed into vLLM's worker; its methods are called through ``collective_rpc``."""

    def load_policy(self, directory: str) -> str:
        """Take over the weights of a checkpoint folder; the checksum of what was received, as ``weights_checksum``."""
        from vllm.config import LoadConfig
        from vllm.model_executor.model_loader import get_model_loader

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        model_config = runner.vllm_config.model_config
        # The engine starts with dummy weights: its own loader cannot read a folder.
        loader: Any = get_model_loader(LoadConfig(load_format="safetensors"))
        model_config.model, model_config.model_weights, model_config.revision = directory, "", None
        received: dict[str, bytes] = {}
        runner.reload_weights(weights_iterator=_hashed(loader.get_all_weights(model_config, model), received))
        pack_heads(model)
        return combine_checksums(received)

    def watch_transfer(self) -> None:
        """Take note of all that vLLM's weight transfer loads, until ``finish_transfer``."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        self._received: dict[str, bytes] = {}
        load, received = type(model).load_weights, self._received
        model.load_weights = lambda weights: load(model, _hashed(weights, received))

    def finish_transfer(self) -> str:
        """Repack what was transferred; the checksum of what was received, as ``weights_checksum``."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        del model.load_weights
        pack_heads(model)
        return combine_checksums(self._received)


def pack_heads(model: torch.nn.Module) -> None:
    """Pack again every matrix that the CPU build keeps both plain and packed: the output head and the embedding.

    Without it a head that is tied to the embedding goes on computing with the packed copy of the weights before: vLLM
    packs a layer when its own weights are loaded, and a tied head has none.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _hashed(weights: Any, received: dict[str, bytes]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        received[name] = tensor_digest(name, weight)
        yield name, weight
