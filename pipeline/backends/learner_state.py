"""The learner's state beside a checkpoint's weights: float32 masters where they differ, and AdamW's moments.

safetensors, so that loading runs no code, and the same state gives the same bytes. Names are the model's
parameter names and tensors are whole (never a shard), so any backend with any number of ranks can continue from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE = Path("learner/state.safetensors")
"""In a folder of its own: a loader that takes every *.safetensors beside the configuration must not find it."""


def write_state(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``<directory>/learner/state.safetensors``; tensor names are ``<kind>/<parameter name>``."""
    file = directory / FILE
    file.parent.mkdir(exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


class StoredState(Mapping[str, Tensor]):
    """What ``write_state`` wrote, each tensor read when it is asked for: a large model's masters and moments, three
    times its weights, would not fit into every rank."""

    def __init__(self, file: Path) -> None:
        self._file = safe_open(file, framework="pt")
        self._names = dict.fromkeys(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_state(directory: Path) -> StoredState:
    """The checkpoint's state; FileNotFoundError when it holds weights only."""
    if not (directory / FILE).is_file():
        raise FileNotFoundError(
            f"checkpoint {directory}: no optimizer state in {FILE}; it was saved without one: load it with "
            f"optimizer=False, which starts a fresh optimizer"
        )
    return StoredState(directory / FILE)


def pick(tensors: Mapping[str, Tensor], kind: str, name: str, directory: Path) -> Tensor:
    """One tensor of the state; ValueError names what is missing."""
    if f"{kind}/{name}" not in tensors:
        raise ValueError(
            f"checkpoint {directory}: its optimizer state has no {kind} of parameter {name}: it is of another model or "
            f"of a recipe with other learner settings; load it with optimizer=False"
        )
    return tensors[f"{kind}/{name}"]
