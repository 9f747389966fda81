"""One GRPO step (sampling, reference logprobs, update) against TRL's GRPOTrainer, and an update's peak memory.

``python -m tests.bench.step [--quick] [--threads N] [--device cuda] [--policy embedded|smollm2|FOLDER] [--no-memory]
[--prompts N] [--tokens N] [--steps N]``

Same weights, prompts, group size, limits, KL on, dtype and threads; each draws its own completions, whose lengths are
ragged and the same on average, and ratios are of tokens a second. "update" is all but the sampling: reference
logprobs, forward, backward, optimizer. Turns alternate between the two where ``--quick`` is not given. Each of our
parts is also given over its floor: the time of its matrix products alone at the machine's own measured rate.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.backends.torch_learner import TorchLearner
from pipeline.backends.transformers_sampler import TransformersSampler
from pipeline.config import Recipe, load_recipe
from pipeline.models import load_tokenizer, prepare_base
from pipeline.products import multiply
from pipeline.protocols import SamplingParams
from pipeline.types import TrainSequence
from tests.bench.memory import memory_ratio
from tests.bench.sample import chat_questions
from tests.bench.trl_side import Timing, require_trl, trl_steps

Parts = dict[str, tuple[float, float]]
"""Seconds and floor in seconds of sampling, reference logprobs, and update."""
PEAK_SIZE = 1024
"""Side of the square matrices whose product measures what the machine can do."""


def main() -> None:
    arguments = read_arguments()
    require_trl()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        recipe = bench_recipe(arguments)
        folder = policy_folder(arguments.policy, recipe, scratch)
        texts = prompt_texts(arguments, folder, recipe)
        ours, theirs, parts = run_turns(folder, texts, recipe, arguments, scratch)
    report("TRL", theirs)
    report("grpoflow", ours)
    report_floors(parts)
    learning = [part for name, part in parts.items() if name != "sampling"]
    result: dict[str, float | None] = {
        "step_vs_trl": rate(ours, "whole") / rate(theirs, "whole"),
        "update_vs_trl": rate(ours, "update") / rate(theirs, "update"),
        "memory_vs_trl": None
        if arguments.no_memory
        else memory_ratio(arguments.quick, arguments.threads, arguments.device),
        "mfu": sum(floor for _, floor in learning) / sum(seconds for seconds, _ in learning),
    }
    print(json.dumps({key: None if value is None else round(value, 3) for key, value in result.items()}))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of two steps of a quarter of the prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--policy", default="embedded")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--micro-batch", type=int, default=64, help="TRL's per_device_train_batch_size")
    parser.add_argument("--prompts", type=int, help="prompts of a step, 8 completions each")
    parser.add_argument("--tokens", type=int, default=128, help="longest completion")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a turn, after one that warms up")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count processor seconds: for a machine that others use"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave the memory measurement out")
    arguments = parser.parse_args()
    small = arguments.policy != "embedded"
    arguments.prompts = arguments.prompts or ((4 if small else 8) if arguments.quick else (8 if small else 32))
    arguments.turns = 1 if arguments.quick else 3
    arguments.now = time.process_time if arguments.cpu_time else time.perf_counter
    arguments.micro_batch = min(arguments.micro_batch, arguments.prompts * 8)
    return arguments


def bench_recipe(arguments: argparse.Namespace) -> Recipe:
    name = arguments.policy if arguments.policy in {"embedded", "smollm2"} else str(arguments.policy)
    return load_recipe(
        "embedded",
        [f"model.name={name}", f"model.dtype={arguments.dtype}", f"runtime.device={arguments.device}",
         "grpo.group_size=8", "grpo.objective.kl_coefficient=0.04", f"sampler.max_tokens={arguments.tokens}"],
    )  # fmt: skip


def prompt_texts(arguments: argparse.Namespace, folder: Path, recipe: Recipe) -> list[str]:
    """Sums; a chat model gets them in its own format, in which it ends by itself: lengths are ragged as people meet them."""
    tokenizer = load_tokenizer(folder, recipe.model)
    if arguments.policy == "embedded" or not tokenizer.chat_template:
        pairs = zip(range(100, 100 + arguments.prompts), range(300, 999), strict=False)
        return [f"{a} + {b} + {a * b % 97} =" for a, b in pairs]
    asked = [[{"role": "user", "content": text}] for text in chat_questions(arguments.prompts)]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in asked]


def policy_folder(name: str, recipe: Recipe, scratch: Path) -> Path:
    """Weights and tokenizer. The embedded policy is taught to end after some 44 tokens, so that lengths are ragged."""
    if name != "embedded":
        return prepare_base(recipe.model, (), 0, scratch / "policy", chat_template=False)
    folder = prepare_base(recipe.model, ["345 + 278 = 623. The sum is 623."] * 20, 0, scratch / "base")
    learner, draw = TorchLearner(recipe, folder), np.random.default_rng(0)
    end = load_tokenizer(folder, recipe.model).eos_token_id
    objective = recipe.grpo.objective.model_copy(update={"algorithm": "sft"})
    for _ in range(25):
        lengths = np.clip(draw.geometric(1 / 44, 64), 2, 127)
        pairs = [
            TrainSequence("", "", tuple(draw.integers(5, 200, 8).tolist()), (*draw.integers(5, 200, n).tolist(), end))
            for n in lengths
        ]
        learner.step(pairs, objective, 3e-3)
    taught = scratch / "policy"
    taught.mkdir()
    learner.save(taught, optimizer=False)
    return taught


def run_turns(
    folder: Path, texts: list[str], recipe: Recipe, arguments: argparse.Namespace, scratch: Path
) -> tuple[list[Timing], list[Timing], Parts]:
    ours: list[Timing] = []
    theirs: list[Timing] = []
    parts: list[Parts] = []
    for _ in range(arguments.turns):
        theirs += trl_steps(folder, texts, recipe, arguments.steps, arguments.micro_batch, scratch, arguments.now)
        timings, some = our_steps(folder, texts, recipe, arguments.steps, arguments.now)
        ours += timings
        parts += some
    medians = {name: tuple(statistics.median(part[name][i] for part in parts) for i in (0, 1)) for name in parts[0]}
    return ours, theirs, medians  # type: ignore[return-value]


def our_steps(
    folder: Path, texts: list[str], recipe: Recipe, steps: int, now: Callable[[], float]
) -> tuple[list[Timing], list[Parts]]:
    """Timings of our steps after a first one, as a whole and by part."""
    tokenizer = load_tokenizer(folder, recipe.model)
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    learner, sampler = TorchLearner(recipe, folder), TransformersSampler(recipe, folder)
    learner.load_reference(folder)
    module: Any = learner.live_policy()
    rate = matmul_rate(module, now)
    timings, parts = [], []
    for step in range(steps + 1):
        started = now()
        sampler.load_policy(module, f"step-{step}")
        seeds = [[1000 * step + 8 * p + g for g in range(8)] for p in range(len(prompts))]
        drawn = sampler.sample(prompts, SamplingParams(recipe.sampler.max_tokens), seeds)
        sampled = now()
        sequences = to_sequences(prompts, drawn)
        references = learner.reference_logprobs(sequences)
        for sequence, reference in zip(sequences, references, strict=True):
            object.__setattr__(sequence, "ref_logprobs", reference)
        referred = now()
        metrics = learner.step(sequences, recipe.grpo.objective, 1e-6)
        ended = now()
        timings.append(Timing(ended - started, sampled - started, metrics["tokens"]))
        seconds = {"sampling": sampled - started, "reference": referred - sampled, "update": ended - referred}
        work = operations(module, metrics["input_tokens"], metrics["tokens"])
        parts.append({name: (seconds[name], work[name] / rate) for name in seconds})
    return timings[1:], parts[1:]


def to_sequences(prompts: list[list[int]], drawn: list[list[Any]]) -> list[TrainSequence]:
    out = []
    for p, group in enumerate(drawn):
        rewards = np.array([float(len(completion.token_ids) % 2) for completion in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for g, (completion, advantage) in enumerate(zip(group, advantages, strict=True)):
            size = len(completion.token_ids)
            out.append(
                TrainSequence(
                    f"{p}-{g}", str(p), tuple(prompts[p]), completion.token_ids,
                    advantages=np.full(size, advantage, np.float32),
                    sampling_logprobs=np.asarray(completion.logprobs, np.float32),
                )
            )  # fmt: skip
    return out


def operations(module: Any, inputs: float, outputs: float) -> dict[str, float]:
    """Operations by part, without attention's own: 2 a weight and token, layers on every input (prompts once a group),
    the head at completion positions. A backward is twice its forward, and the head's runs the forward again."""
    tables = (module.get_input_embeddings().weight, module.get_output_embeddings().weight)
    inside = sum(p.numel() for p in module.parameters() if p.dim() > 1 and all(p is not table for table in tables))
    layers, head = 2 * inputs * inside, 2 * outputs * tables[1].numel()
    return {"sampling": layers + head, "reference": layers + head, "update": 3 * layers + 4 * head}


def matmul_rate(module: Any, now: Callable[[], float]) -> float:
    """Operations a second of a square matrix product, as linear layers compute it here, in the module's dtype on its
    device; the best of ten."""
    weight = next(module.parameters())
    side = PEAK_SIZE if weight.device.type == "cpu" else 8 * PEAK_SIZE
    left = torch.ones((side, side), dtype=weight.dtype, device=weight.device)
    best = float("inf")
    for _ in range(10):
        started = now()
        multiply(left, left)
        if weight.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, now() - started)
    return 2 * side**3 / best


def rate(timings: list[Timing], part: str) -> float:
    """Completion tokens a second, the median step."""
    return statistics.median(timing.tokens / getattr(timing, part) for timing in timings)


def report(name: str, timings: list[Timing]) -> None:
    parts = {part: statistics.median(getattr(t, part) for t in timings) for part in ("whole", "sampling", "update")}
    tokens = statistics.median(t.tokens for t in timings)
    print(
        f"{name:<10} step {parts['whole']:7.2f} s  sampling {parts['sampling']:7.2f} s  update {parts['update']:7.2f} s  "
        f"{tokens:7.0f} tokens  {rate(timings, 'whole'):7.0f} tokens/s  ({len(timings)} steps)"
    )


def report_floors(parts: Parts) -> None:
    for name, (seconds, floor) in parts.items():
        print(f"grpoflow   {name:<10} {seconds:7.2f} s  floor {floor:7.2f} s  {seconds / floor:5.1f} x its floor")


if __name__ == "__main__":
    main()
