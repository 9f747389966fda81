"""Peak memory of one update with a vocabulary of 152k: ours and TRL's, each in a process of its own.

Qwen2.5-0.5B's width, two layers, 8 sequences of 512 tokens (a prompt of 64), float32, AdamW, KL on. ``--quick`` takes
128 tokens. What counts is everything the process holds at its peak, weights, moments and libraries included; with
``--device cuda`` everything that torch has allocated on the GPU. It is the first update, at whose end the moments are
made. 166 M parameters: weights, gradients and moments alone are 2.47 GiB on either side.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT = 64


def memory_ratio(quick: bool, threads: int, device: str = "cpu") -> float:
    """Ours over TRL's; prints both."""
    peaks = {}
    for side in ("ours", "trl"):
        command = [sys.executable, "-m", "tests.bench.memory", side, f"--threads={threads}", f"--device={device}"]
        command += ["--quick"] * quick
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[side] = json.loads(done.stdout.splitlines()[-1])
    for side, peak in peaks.items():
        print(
            f"peak memory of an update, vocabulary 152k: {side:<5} {peak['peak']:6.2f} GiB ({peak['before']:.2f} before)"
        )
    return peaks["ours"]["peak"] / peaks["trl"]["peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["ours", "trl"], nargs="?", help="measure one alone, in this process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    if arguments.side is None:
        ratio = memory_ratio(arguments.quick, arguments.threads, arguments.device)
        print(json.dumps({"memory_vs_trl": round(ratio, 3)}))
        return
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = wide_policy(Path(name))
        update = ours if arguments.side == "ours" else trl
        before = update(folder, 128 if arguments.quick else 512, arguments.device, Path(name))
    print(json.dumps({"before": before, "peak": peak_gib(arguments.device)}))


def wide_policy(folder: Path) -> Path:
    """Random weights in Qwen2.5-0.5B's shape, two layers of it, in a process that then ends."""
    code = (
        "import sys; from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "c = Qwen2Config(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=2,"
        " num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)\n"
        "m = Qwen2ForCausalLM(c); m.generation_config.eos_token_id = [1]; m.save_pretrained(sys.argv[1])\n"
        "from pipeline.config import EmbeddedModel; from pipeline.models import train_tokenizer\n"
        "train_tokenizer(['1 + 2 = 3'], EmbeddedModel(vocabulary=300)).save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)
    return folder


def ours(folder: Path, length: int, device: str, scratch: Path) -> float:
    from pipeline.backends.torch_learner import TorchLearner
    from pipeline.config import load_recipe
    from pipeline.types import TrainSequence

    recipe = load_recipe("embedded", [f"runtime.device={device}", "learner.micro_batch_tokens=8192"])
    learner, draw = TorchLearner(recipe, folder), np.random.default_rng(0)
    before, size = peak_gib(device), length - PROMPT
    prompt = tuple(draw.integers(5, 150_000, PROMPT).tolist())
    sequences = [
        TrainSequence(
            str(g), "g", prompt, tuple(draw.integers(5, 150_000, size).tolist()),
            advantages=np.full(size, g - 3.5, np.float32), ref_logprobs=np.full(size, -12, np.float32),
        )
        for g in range(8)
    ]  # fmt: skip
    learner.step(sequences, recipe.grpo.objective, 1e-6)
    return before


def trl(folder: Path, length: int, device: str, scratch: Path) -> float:
    """TRL's own loss on such a batch, its backward pass, and its optimizer's step (the reference logprobs are given)."""
    from pipeline.config import load_recipe
    from tests.bench.trl_side import make_trainer

    recipe = load_recipe("embedded", [f"runtime.device={device}", "grpo.objective.kl_coefficient=0.0"])
    trainer: Any = make_trainer(folder, ["1 + 1"], recipe, 1, 8, scratch)
    trainer.beta = 0.04  # set after the start, so that no reference model is in memory on this side either
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    before, size = peak_gib(device), length - PROMPT
    draw = torch.Generator().manual_seed(0)
    batch = {
        "prompt_ids": torch.randint(5, 150_000, (1, PROMPT), generator=draw).expand(8, -1),
        "prompt_mask": torch.ones((8, PROMPT), dtype=torch.long),
        "completion_ids": torch.randint(5, 150_000, (8, size), generator=draw),
        "completion_mask": torch.ones((8, size), dtype=torch.long),
        "advantages": torch.arange(8.0) - 3.5,
        "ref_per_token_logps": torch.full((8, size), -12.0),
        "num_items_in_batch": torch.tensor(8 * size),
    }
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    trainer.model.train()
    trainer.compute_loss(trainer.model, batch).backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    return before


def peak_gib(device: str) -> float:
    """The most memory this process has held so far, GiB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
