"""What a dense decoder is made of, from its config.json: parameters counted exactly, without loading anything."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import ModelConfig

DENSE = ("qwen2", "qwen3", "llama", "mistral")
"""Model types that ``shape_of`` knows: decoders whose feed-forward layers are gated and whole (no experts)."""

SIZES = {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"}
"""What a config.json must say."""
QWEN25_SIZES = {
    "0.5B": (24, 896, 4864, 14, 2, 151_936, True),
    "1.5B": (28, 1536, 8960, 12, 2, 151_936, True),
    "3B": (36, 2048, 11_008, 16, 2, 151_936, True),
    "7B": (28, 3584, 18_944, 28, 4, 152_064, False),
    "14B": (48, 5120, 13_824, 40, 8, 152_064, False),
    "32B": (64, 5120, 27_648, 40, 8, 152_064, False),
    "72B": (80, 8192, 29_568, 64, 8, 152_064, False),
}
"""Layers, width, feed-forward width, heads, key/value heads, vocabulary, tied head of Qwen2.5 (arXiv 2412.15115; the
config.json files at https://huggingface.co/Qwen/Qwen2.5-7B and its sisters)."""
QWEN25 = re.compile(r"Qwen/Qwen2\.5-(?:Math-|Coder-)?([\d.]+B)(?:-Instruct)?")
OTHERS = {
    "smollm2": {  # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
    },
    "deepseek-ai/deepseek-math-7b-instruct": {  # …/deepseek-math-7b-instruct/blob/main/config.json
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 102_400, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""config.json of other models that recipes name, so that a plan needs no network."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder. ``biases`` counts the bias elements of a layer's linear maps."""

    layers: int
    width: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    biases: int = 0
    head_norms: bool = False
    """Whether queries and keys are normalised by head (Qwen3)."""

    @property
    def matrix(self) -> int:
        """Elements of the matrices of one layer: attention's four and the feed-forward's three."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.width * self.intermediate

    @property
    def parameters(self) -> int:
        """All parameters; a head that is tied to the embedding counts once."""
        norms = 2 * self.width + (2 * self.head_dim if self.head_norms else 0)
        ends = self.vocabulary * self.width * (1 if self.tied else 2) + self.width
        return self.layers * (self.matrix + self.biases + norms) + ends

    def lora_parameters(self, rank: int) -> int:
        """Parameters of additions of this rank to every linear map of the layers: rank x (inputs + outputs) each."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = 2 * (self.width + queries) + 2 * (self.width + keys) + 3 * (self.width + self.intermediate)
        return self.layers * rank * ends

    @property
    def kv_elements(self) -> int:
        """Elements of the key/value cache a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """The shape in a Hugging Face config.json. ValueError for an architecture that is not known here, or without sizes."""
    kind = config.get("model_type")
    if kind not in DENSE:
        raise ValueError(
            f"model {name}: model_type is {kind!r}, and a plan knows dense decoders of type {', '.join(DENSE)} only"
        )
    if missing := sorted(SIZES - config.keys()):
        raise ValueError(f"model {name}: its config.json has no {missing[0]}; expected {', '.join(sorted(SIZES))}")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or width // heads
    queries, keys = heads * head_dim, kv_heads * head_dim
    biases = 0
    if kind == "qwen2":
        biases = queries + 2 * keys
    elif config.get("attention_bias"):
        biases = queries + 2 * keys + width
    if config.get("mlp_bias"):
        biases += 2 * config["intermediate_size"] + width
    return Shape(
        layers=config["num_hidden_layers"], width=width, intermediate=config["intermediate_size"], heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, vocabulary=config["vocab_size"], biases=biases,
        tied=bool(config.get("tie_word_embeddings", False)), head_norms=kind == "qwen3",
    )  # fmt: skip


def qwen25(size: str) -> Shape:
    """The published shape of a Qwen2.5 size such as "7B"."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "tie_word_embeddings")  # fmt: skip
    return shape_of({"model_type": "qwen2", **dict(zip(names, QWEN25_SIZES[size], strict=True))}, f"Qwen2.5-{size}")


def find_shape(model: ModelConfig) -> Shape:
    """The shape of a recipe's model: built in, in a local folder, known by name, or from the Hub's config.json.

    ValueError, in one line, for a model of which no config.json can be had.
    """
    if model.name == "embedded":
        own = model.embedded
        names = {
            "num_hidden_layers": own.layers, "hidden_size": own.width, "intermediate_size": own.intermediate,
            "num_attention_heads": own.heads, "num_key_value_heads": own.kv_heads, "vocab_size": own.vocabulary,
        }  # fmt: skip
        return shape_of({"model_type": "qwen2", "tie_word_embeddings": True, **names}, "embedded")
    file = Path(model.name).expanduser() / "config.json"
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not valid JSON ({error}); copy or download it again") from None
        return shape_of(config, model.name)
    if (match := QWEN25.fullmatch(model.name)) and match[1] in QWEN25_SIZES:
        return qwen25(match[1])
    if model.name in OTHERS:
        return shape_of(OTHERS[model.name], model.name)
    return shape_of(_hub_config(model), model.name)


def _hub_config(model: ModelConfig) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        file = hf_hub_download(model.name, "config.json", revision=model.revision)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model.name is {model.name!r}: no folder with a config.json here, and the Hub gave none ({reason}); name a "
            f"local folder or one of Qwen/Qwen2.5-{{{', '.join(QWEN25_SIZES)}}}"
        ) from None
    return dict(json.loads(Path(file).read_text(encoding="utf-8")))
