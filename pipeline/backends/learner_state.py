"""The learner's state beside a checkpoint's weights: float32 masters where they differ, and AdamW's moments.

safetensors and JSON only, so that loading runs no code; the same state gives the same bytes. Names are the model's
parameter names and tensors are whole (never a shard), so any backend with any number of ranks can continue from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FOLDER = "learner"
TENSORS, STATE = "state.safetensors", "state.json"


def write_state(directory: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> None:
    """Write ``<directory>/learner/``; tensor names are ``<kind>/<parameter name>``."""
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    (folder / STATE).write_text(json.dumps(facts, indent=1, sort_keys=True), encoding="utf-8")


def read_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """What ``write_state`` wrote; FileNotFoundError when the checkpoint holds weights only."""
    folder = directory / FOLDER
    if not (folder / STATE).is_file() or not (folder / TENSORS).is_file():
        raise FileNotFoundError(
            f"checkpoint {directory}: no optimizer state in {FOLDER}/; it was saved without one: load it with "
            f"optimizer=False, which starts a fresh optimizer"
        )
    with safe_open(folder / TENSORS, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return tensors, json.loads((folder / STATE).read_text(encoding="utf-8"))


def pick(tensors: Mapping[str, Tensor], kind: str, name: str, directory: Path) -> Tensor:
    """One tensor of the state; ValueError names what is missing."""
    if f"{kind}/{name}" not in tensors:
        raise ValueError(
            f"checkpoint {directory}: its optimizer state has no {kind} of parameter {name}: it is of another model or "
            f"of a recipe with other learner settings; load it with optimizer=False"
        )
    return tensors[f"{kind}/{name}"]
