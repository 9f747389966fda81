"""The sampler that runs a transformers model in this process: the embedded default, and any other causal LM.

Each prompt is prefilled once and its cache forked to its completions; a finished completion leaves the batch at once and
a waiting one takes its slot. In float32 on the CPU a completion's ids and logprobs do not depend on what else is in the
batch, bit for bit: each row sees the same matrix products (rows come in blocks of 16, below which MKL's kernels
round differently) and its own random stream.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.backends.decode_cache import ATTENTION, CHUNK, PromptStates, SlotCache, register_attention, round_up
from pipeline.backends.request import check_request
from pipeline.backends.sampling import UniformStream, draw_uniforms, pick_tokens
from pipeline.backends.stopping import StopStrings
from pipeline.products import packed
from pipeline.protocols import PolicyVersion, Progress, SamplingParams, no_progress
from pipeline.types import Completion, FinishReason

if TYPE_CHECKING:
    from torch import nn

    from pipeline.config import Recipe

ROWS = 16
"""Rows (and prompt tokens) are padded to a multiple of this: from here on the CPU's kernels give a row the same bits."""
PROMPTS_AHEAD = 16
"""Prompts prefilled together, and kept until their completions have slots."""


class TransformersSampler:
    """``pipeline.protocols.Sampler`` over one transformers model; shares a live module's weights without a copy."""

    def __init__(self, recipe: Recipe, tokenizer_directory: Path) -> None:
        from pipeline.models import load_tokenizer

        self._cache_tokens = recipe.sampler.cache_tokens
        self._config = recipe.model
        self._device = _device(recipe.runtime.device)
        self._tokenizer = load_tokenizer(tokenizer_directory, recipe.model)
        self._model: Any = None
        self.version = PolicyVersion("none", "")
        register_attention()

    def load_policy(self, source: Path | nn.Module, name: str) -> PolicyVersion:
        """Hold these weights; a live module is held as it is, so that the learner's later updates are seen too."""
        from pipeline.models import weights_checksum

        if isinstance(source, torch.nn.Module):
            model: Any = source
        else:
            from pipeline.models import load_model

            model = load_model(source, self._config, device=str(self._device))
        _check_supported(model)
        self._model = model
        self.version = PolicyVersion(name, weights_checksum(model))
        return self.version

    def sample(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[Sequence[int]],
        progress: Progress = no_progress,
    ) -> list[list[Completion]]:
        """``out[p][g]`` was drawn with ``seeds[p][g]``; see ``pipeline.protocols.Sampler``."""
        if self._model is None:
            raise ValueError("the sampler holds no policy yet: call load_policy first")
        config = self._model.config
        context = getattr(config, "max_position_embeddings", None)
        check_request(prompt_token_ids, params, seeds, context=context, vocabulary=config.vocab_size)
        from pipeline.models import eos_token_ids

        with _sampling_mode(self._model):
            batch = _Batch(self._model, eos_token_ids(self._model), params, self._cache_tokens)
            if params.stop:
                batch.stop = StopStrings(params.stop, self._tokenizer)
            return batch.run(prompt_token_ids, seeds, progress)

    def close(self) -> None:
        """Let the model go."""
        self._model = None


class _Row:
    """One running completion."""

    __slots__ = ("index", "prompt", "started", "stream")

    def __init__(self, prompt: int, index: int, seed: int) -> None:
        self.prompt = prompt
        self.index = index
        self.stream = UniformStream(seed)
        self.started = time.perf_counter()


class _Batch:
    """One call of ``sample``. Running completions are rows 0..n-1 of the cache and of every array."""

    def __init__(self, model: Any, ends: frozenset[int], params: SamplingParams, cache_tokens: int) -> None:
        self.model = model
        self.params = params
        self.ends = np.array(sorted(ends), dtype=np.int64)
        self.cache_tokens = cache_tokens
        self.device = next(model.parameters()).device
        self.stop: StopStrings | None = None
        self.rows: list[_Row] = []
        self.cache: SlotCache | None = None

    def run(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], progress: Progress
    ) -> list[list[Completion]]:
        """Decode until nothing runs and nothing waits."""
        out: list[list[Completion | None]] = [[None] * len(group) for group in seeds]
        total = sum(len(group) for group in seeds)
        waiting = deque((p, g, seed) for p, group in enumerate(seeds) for g, seed in enumerate(group))
        self._size(prompts, total)
        done, tokens, started = 0, 0, time.perf_counter()
        while waiting or self.rows:
            if waiting and self._room():
                self._admit(waiting, prompts)
            else:
                self._decode()
            tokens += len(self.rows)
            for row, completion in self._retire():
                out[row.prompt][row.index] = completion
                done += 1
            progress(done, total, f"{tokens / (time.perf_counter() - started):,.0f} tok/s")
        return [[completion for completion in group if completion is not None] for group in out]

    def _size(self, prompts: Sequence[Sequence[int]], total: int) -> None:
        longest = max(len(prompt) for prompt in prompts)
        self.capacity = round_up(longest + self.params.max_tokens, CHUNK)
        self.slots = min(total, self.cache_tokens // self.capacity)
        if self.slots < 1:
            raise ValueError(
                f"sampler.cache_tokens is {self.cache_tokens}, but the longest prompt ({longest} tokens) and max_tokens "
                f"({self.params.max_tokens}) need {self.capacity} (rounded up) for one completion: raise it or lower max_tokens"
            )
        self.position = np.zeros(self.slots, dtype=np.int64)
        self.age = np.zeros(self.slots, dtype=np.int64)
        self.ids = np.zeros((self.slots, self.params.max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((self.slots, self.params.max_tokens), dtype=np.float32)
        self.finished = np.zeros(self.slots, dtype=bool)
        self.stopped = np.zeros(self.slots, dtype=bool)
        self.prefilled: dict[int, tuple[PromptStates, int, torch.Tensor]] = {}

    def _room(self) -> bool:
        """Free slots worth a prefill: an eighth of them, so that the prompts come in batches."""
        return self.slots - len(self.rows) >= max(1, self.slots // 8)

    # -- admission ----------------------------------------------------------------------------------------------

    def _admit(self, waiting: deque[tuple[int, int, int]], prompts: Sequence[Sequence[int]]) -> None:
        """Fill the free slots from the head of the queue and draw each new completion's first token."""
        first = len(self.rows)
        taken = [waiting.popleft() for _ in range(min(self.slots - first, len(waiting)))]
        logits = []
        for prompt, group in itertools.groupby(taken, key=lambda entry: entry[0]):
            if prompt not in self.prefilled:
                needed = dict.fromkeys([prompt, *(p for p, _, _ in taken if p > prompt), *(p for p, _, _ in waiting)])
                self._prefill(list(needed)[:PROMPTS_AHEAD], prompts)
            states, index, last = self.prefilled[prompt]
            members = list(group)
            rows = slice(len(self.rows), len(self.rows) + len(members))
            if self.cache is None:
                self.cache = SlotCache(states, self.slots, self.capacity)
            self.cache.fork(states, index, rows)
            self.position[rows] = len(prompts[prompt])
            self.rows += [_Row(p, g, seed) for p, g, seed in members]
            logits.append(last.expand(len(members), -1))
        open_prompt = waiting[0][0] if waiting else len(prompts)
        self.prefilled = {p: kept for p, kept in self.prefilled.items() if p >= open_prompt}
        self.age[first : len(self.rows)] = 0
        self._pick(torch.cat(logits), first)

    def _prefill(self, indices: list[int], prompts: Sequence[Sequence[int]]) -> None:
        """States and last logits of these prompts, each padded on the left to a multiple of ROWS: a padded length that
        depends on the prompt alone, so that its bits do too."""
        indices.sort(key=lambda p: len(prompts[p]))
        for padded, group in itertools.groupby(indices, key=lambda p: round_up(len(prompts[p]), ROWS)):
            members = list(group)
            ids = torch.zeros((len(members), padded), dtype=torch.long)
            for i, p in enumerate(members):
                ids[i, padded - len(prompts[p]) :] = torch.as_tensor(prompts[p])
            lengths = torch.tensor([len(prompts[p]) for p in members], device=self.device)
            states = PromptStates(lengths, padded)
            position = (torch.arange(padded, device=self.device)[None] - (padded - lengths)[:, None]).clamp_(min=0)
            logits = self._forward(ids.to(self.device), position, states)
            for i, p in enumerate(members):
                self.prefilled[p] = (states, i, logits[i])

    # -- decoding -----------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every running completion."""
        n = len(self.rows)
        padded = round_up(n, ROWS)
        assert self.cache is not None
        position = torch.zeros((padded, 1), dtype=torch.long)
        ids = torch.zeros((padded, 1), dtype=torch.long)
        position[:n, 0] = torch.from_numpy(self.position[:n])
        ids[:n, 0] = torch.from_numpy(self.ids[np.arange(n), self.age[:n] - 1])
        position = position.to(self.device)
        self.cache.begin_step(position[:n, 0], int(self.position[:n].max()) + 1)
        logits = self._forward(ids.to(self.device), position, self.cache)[:n]
        self.position[:n] += 1
        self._pick(logits, 0)

    def _forward(self, ids: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        """Last logits [B, V]. The 4-D mask keeps transformers from making its own; the attention takes the cache's."""
        mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        out = self.model(
            input_ids=ids,
            position_ids=position,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=min(ROWS, ids.shape[1]),  # of a prompt too: the head's product has at least ROWS rows
            cache=cache,
        )
        return out.logits[:, -1]

    def _pick(self, logits: torch.Tensor, first: int) -> None:
        """Draw one token for rows ``first``.. and note which rows are finished."""
        rows = slice(first, len(self.rows))
        age = self.age[rows].copy()
        uniforms = None
        if self.params.temperature > 0:
            drawn = draw_uniforms([row.stream for row in self.rows[rows]], age)
            uniforms = torch.from_numpy(drawn).to(self.device)
        picked, logprobs = pick_tokens(logits, self.params, uniforms)
        ids = picked.cpu().numpy()
        index = np.arange(first, len(self.rows))
        self.ids[index, age] = ids
        self.logprobs[index, age] = logprobs.cpu().numpy()
        stopped = np.isin(ids, self.ends)
        if self.stop is not None:
            stopped |= [self.stop.ends(self.ids[i, : a + 1].tolist()) for i, a in zip(index, age, strict=True)]
        self.age[rows] = age + 1
        self.stopped[rows] = stopped
        self.finished[rows] = stopped | (age + 1 >= self.params.max_tokens)

    # -- retirement ---------------------------------------------------------------------------------------------

    def _retire(self) -> Iterator[tuple[_Row, Completion]]:
        """Yield finished completions and close the gaps with the last running rows."""
        n = len(self.rows)
        if not self.finished[:n].any():
            return
        now = time.perf_counter()
        for i in np.flatnonzero(self.finished[:n]):
            row, age = self.rows[i], self.age[i]
            reason: FinishReason = "stop" if self.stopped[i] else "length"
            ids, logprobs = tuple(self.ids[i, :age].tolist()), tuple(self.logprobs[i, :age].tolist())
            yield row, Completion(ids, logprobs, reason, seconds=now - row.started)
        keep = np.flatnonzero(~self.finished[:n])
        target = np.flatnonzero(self.finished[: len(keep)])
        source = keep[keep >= len(keep)]
        if len(target):
            assert self.cache is not None
            to = [torch.from_numpy(index).to(self.device) for index in (source, target)]
            self.cache.move(to[0], to[1], int(self.position[source].max()))
            for array in (self.position, self.age, self.ids, self.logprobs):
                array[target] = array[source]
            for s, t in zip(source, target, strict=True):
                self.rows[t] = self.rows[s]
        self.finished[:n] = False
        del self.rows[len(keep) :]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@contextmanager
def _sampling_mode(model: Any) -> Iterator[None]:
    """Evaluation mode, no autograd and the cache's attention; the module is given back as it was."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = ATTENTION
    try:
        with torch.inference_mode(), packed(model):
            yield
    finally:
        model.config._attn_implementation = attention
        model.train(training)


def _check_supported(model: Any) -> None:
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown or not getattr(model, "_supports_attention_backend", False):
        what = f"layers of type {', '.join(sorted(unknown))}" if unknown else "attention of its own"
        raise ValueError(
            f"{type(model).__name__} has {what}, which the transformers sampler cannot cache: set sampler.engine = 'vllm'"
        )
