"""Where problems come from, how they are selected, and how they are put to the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.section import Section


class SourceConfig(Section):
    """One problem set."""

    name: str = "embedded"
    """"embedded" (the generator), "gsm8k", "math", "math500", "svamp", "mgsm", a Hub data set, or "file"."""
    path: str | None = None
    """For a local set: a file, folder or glob of JSONL, JSON, CSV or Parquet."""
    split: str = "train"
    """Split of a Hub set."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column mapping, ours to theirs: problem, answer, solution, level, subject."""
    limit: int | None = Field(default=None, ge=1)
    """Take at most this many problems (the first ones, in the set's order)."""


class EmbeddedData(Section):
    """The generator of multi-step word problems."""

    train: int = Field(default=4000, ge=8)
    """Problems generated for training."""
    heldout: int = Field(default=200, ge=4)
    """Problems generated for evaluation; they share no problem and no operands with training."""
    careful_share: float = Field(default=0.3, ge=0.0, le=1.0)
    """Share of warm-start solutions worked out column by column; the rest state each sum at once."""
    levels: int = Field(default=5, ge=1, le=5)
    """Highest level generated: 1 has numbers below 50, 2 below 100, 3 below 200, 4 below 500, 5 below 1000."""


class DataConfig(Section):
    """Data selection."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """Training problem sets, mixed in this order."""
    benchmarks: tuple[SourceConfig, ...] = ()
    """Held-out problem sets for evaluation; empty: the held-out split of the sources."""
    embedded: EmbeddedData = EmbeddedData()
    """The generator's sizes; read only when a source is "embedded"."""
    template: str = "boxed"
    """How a problem is put to the model: "boxed", "gsm8k_fewshot", "r1_think", "plain", or a Jinja file."""
    answer_format: Literal["boxed", "tags"] = "boxed"
    """Where the final answer stands: in ``\\boxed{}`` or in <answer> tags."""
    system_prompt: str | None = None
    """System message of the model's chat template."""
    max_prompt_tokens: int = Field(default=128, ge=1)
    """Longer prompts are set aside and counted, never cut."""
