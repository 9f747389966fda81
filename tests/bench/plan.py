"""The plan's memory against the learner's real one: ``python -m tests.bench.plan [--quick]``.

Three sizes of the embedded policy, each as float32, as bfloat16, and with recomputed activations, with a reference in
memory. A child process a case: what counts is how far the resident memory rises from before the learner is opened to
its peak in a step of two micro-batches. Last, one JSON object: memory_worst, the ratio farthest from 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline.config import Recipe, load_recipe
from pipeline.plan.memory import PROCESS, Cluster, plan_memory
from pipeline.plan.shapes import find_shape

SIZES = {  # layers, width, heads, key/value heads, feed-forward width, vocabulary
    "3 M": (6, 192, 6, 2, 512, 384),
    "13 M": (6, 448, 7, 1, 1216, 384),
    "34 M": (6, 704, 11, 1, 1920, 384),
}
KINDS = {
    "float32": [],
    "bfloat16": ["model.dtype=bfloat16"],
    "recomputed": ["learner.gradient_checkpointing=true"],
}
PROMPT, COMPLETION, GROUP = 64, 192, 4
BUDGET = PROMPT + GROUP * COMPLETION
MICRO_BATCHES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="float32 only")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(measured_bytes(load_recipe("embedded", arguments.child)))
        return
    worst = 1.0
    print(f"{'size':<6} {'kind':<11} {'predicted MiB':>14} {'measured MiB':>13} {'ratio':>6}")
    for size in SIZES:
        for kind in ["float32"] if arguments.quick else KINDS:
            changes = overrides(size, kind)
            predicted, measured = predicted_bytes(load_recipe("embedded", changes)), run_child(changes)
            ratio = predicted / measured
            worst = max(worst, ratio, key=lambda r: abs(r - 1))
            print(
                f"{size:<6} {kind:<11} {predicted / 2**20:>14.0f} {measured / 2**20:>13.0f} {ratio:>6.2f}", flush=True
            )
    print(json.dumps({"memory_worst": round(worst, 3)}))


def overrides(size: str, kind: str) -> list[str]:
    """The embedded recipe in this size, with a micro-batch of one group and two groups a step."""
    names = ("layers", "width", "heads", "kv_heads", "intermediate", "vocabulary")
    shape = [f"model.embedded.{name}={value}" for name, value in zip(names, SIZES[size], strict=True)]
    return [*shape, *KINDS[kind], "runtime.device=cpu", f"learner.micro_batch_tokens={BUDGET}",
            f"sampler.max_tokens={COMPLETION}", f"grpo.group_size={GROUP}", f"grpo.problems_per_step={MICRO_BATCHES}",
            'rewards.weights={verifier = 1.0}']  # fmt: skip


def predicted_bytes(recipe: Recipe) -> float:
    """The update phase, without what the child does not hold: a sampler's cache and a CUDA context."""
    memory = plan_memory(recipe, find_shape(recipe.model), Cluster(1, 1e12), PROMPT)
    return memory.totals[2] - PROCESS


def run_child(changes: list[str]) -> float:
    # Freed memory goes back at once, as a GPU's allocator would use it again: without this glibc keeps pieces of it.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, "-m", "tests.bench.plan", "--child", *changes]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def measured_bytes(recipe: Recipe) -> float:
    """How far this process's memory rises when the learner is opened and makes two steps."""
    import torch

    from pipeline.backends.torch_learner import TorchLearner
    from pipeline.models import build_embedded

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        small = recipe.model.embedded.model_copy(update={"layers": 1, "width": 64, "heads": 2, "kv_heads": 1})
        warm = recipe.model_copy(update={"model": recipe.model.model_copy(update={"embedded": small})})
        for number, chosen in enumerate((warm, recipe)):
            folder = build_embedded(chosen.model.embedded, ["1 + 2 = 3"], 0, Path(name, str(number)))
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            learner = TorchLearner(chosen, folder)
            learner.load_reference(folder)
            learner.reference_logprobs(sequences(8))  # weights are in memory once they have been read
            learner.step(sequences(8), chosen.grpo.objective, 1e-6)  # the moments come with the first step
            learner.step(sequences(COMPLETION), chosen.grpo.objective, 1e-6)
            rise = resident("VmHWM") - before
            learner.close()
            del learner
    return rise


def sequences(length: int) -> list:
    """Groups of completions of this length; at full length each group is a micro-batch."""
    import numpy as np

    from pipeline.types import TrainSequence

    draw = np.random.default_rng(0)
    found = []
    for group in range(MICRO_BATCHES):
        prompt = tuple(draw.integers(5, 250, PROMPT).tolist())
        for g in range(GROUP):
            completion = tuple(draw.integers(5, 250, length).tolist())
            arrays = {
                "advantages": np.full(length, g - 1.5, np.float32),
                "ref_logprobs": np.full(length, -6, np.float32),
            }
            found.append(TrainSequence(f"{group}-{g}", str(group), prompt, completion, **arrays))
    return found


def resident(name: str) -> float:
    """VmRSS or VmHWM of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}: this benchmark needs Linux")


if __name__ == "__main__":
    main()
