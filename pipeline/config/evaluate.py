"""Evaluation."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.section import Section


class EvaluateConfig(Section):
    """Sampling for pass@k and maj@k, and greedy decoding, on held-out problems."""

    problems: int | None = Field(default=None, ge=2)
    """Held-out problems used, drawn by seed; None is all."""
    samples: int = Field(default=8, ge=1)
    """n: completions a problem; every k asked for must be at most n."""
    ks: tuple[int, ...] = (1, 8)
    """The k of pass@k and maj@k in the tables, by level, subject and source too."""
    curves: bool = True
    """Also pass@k and maj@k of all problems at every k from 1 to n (at most 64 of them, evenly spread in log k): the
    curves of the report."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Of the samples (the paper's Figure 7: 0.7)."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus share of the samples."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion; None takes ``sampler.max_tokens``."""
    greedy: bool = True
    """Decode each problem greedily too."""
    resamples: int = Field(default=1000, ge=100)
    """Bootstrap resamples of problems behind an interval."""
    allow_overlap: bool = False
    """Go on when evaluation problems also stand in the training set: they are counted and reported. Off: refuse."""
