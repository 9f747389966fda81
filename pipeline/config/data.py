"""Where problems come from, how they are selected, and how they are put to the model."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.section import Section


class SourceConfig(Section):
    """One problem set."""

    name: str = "embedded"
    """"embedded" (the generator), "gsm8k", "math", "math500", "svamp", "mgsm", "reasoning_gym", a Hub data set, or "file"."""
    path: str | None = None
    """For a local copy: a file, folder or glob of JSONL, JSON, CSV or Parquet; with gsm8k, math, … the Hub's columns."""
    split: str = "train"
    """Split of a Hub set."""
    config: str | None = None
    """Configuration of a Hub set (a language of mgsm, a subject of math); None takes the set's usual one."""
    revision: str | None = None
    """Hub revision (a commit, a tag or a branch)."""
    streaming: bool = False
    """Read a Hub set row by row instead of downloading it first; for sets larger than the disk."""
    alias: str | None = None
    """Name that this source's problems carry; None takes the set's name, or the stem of a local file."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column mapping, ours to theirs: problem, answer, solution, level, subject, id, and for code problems tests
    (a list of {"stdin", "stdout"} or {"code": "assert …"}, or its JSON; see rewards.code)."""
    tasks: tuple[str, ...] = ()
    """Tasks of reasoning_gym, each giving ``limit`` problems shared evenly."""
    limit: int | None = Field(default=None, ge=1)
    """Take at most this many problems (the first ones, in the set's order)."""
    cap: int | None = Field(default=None, ge=1)
    """Keep at most this many problems after selection, chosen by seed; the rest is set aside and counted."""
    weight: float = Field(default=1.0, gt=0.0)
    """How often a problem of this source is drawn, relative to a problem of a source of weight 1."""

    @property
    def label(self) -> str:
        """The name that problems of this source carry."""
        if self.alias:
            return self.alias
        if self.name == "file" and self.path:
            return PurePath(self.path).stem
        return f"{self.name}/{self.config}" if self.config else self.name


class EmbeddedData(Section):
    """The generator of multi-step word problems."""

    train: int = Field(default=4000, ge=8)
    """Problems generated for training."""
    heldout: int = Field(default=200, ge=4)
    """Problems generated for evaluation; they share no problem and no operands with training."""
    careful_share: float = Field(default=0.3, ge=0.0, le=1.0)
    """Share of warm-start solutions worked out column by column; the rest state each sum at once."""
    levels: int = Field(default=5, ge=1, le=5)
    """Highest level generated: 1 has numbers below 50, 2 below 70, 3 below 100, 4 below 150, 5 below 200."""


class CurriculumConfig(Section):
    """Which problems the steps draw, given the pass rates of earlier rollouts."""

    window: tuple[float, float] = (0.0, 1.0)
    """Pass rates from the first to the second are drawn fully; others only as ``revisit`` says."""
    history: tuple[str, ...] = ()
    """Ids of other runs (in the same folder) whose rollouts tell the pass rates until this run has its own."""
    probe_samples: int = Field(default=0, ge=0)
    """Completions that the warm start gives a training problem before the first round, so that its pass rates are known
    there too; 0 does not ask. Of use without ``history``."""
    probe_problems: int | None = Field(default=None, ge=1)
    """How many problems are probed, drawn by the seed; None is all. Of the others no pass rate is known in round 1."""
    revisit: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of the epochs in which a problem outside the window comes back; 0 drops it."""
    prefer: Literal["any", "mixed"] = "any"
    """"mixed" draws problems of pass rate p in proportion to 4 p (1 - p), "any" all alike."""
    refill_budget: float = Field(default=1.0, ge=1.0)
    """Dynamic sampling (DAPO): draw further problems until a step has enough groups with mixed rewards, at most this
    many times ``grpo.problems_per_step``; 1 is off."""

    @property
    def reads_pass_rates(self) -> bool:
        """Whether what a step draws depends on pass rates."""
        return self.prefer == "mixed" or self.window != (0.0, 1.0)

    @model_validator(mode="after")
    def _check(self) -> CurriculumConfig:
        if not 0.0 <= self.window[0] <= self.window[1] <= 1.0:
            raise ValueError(
                f"data.curriculum.window is {list(self.window)}: expected two pass rates, 0 <= low <= high <= 1"
            )
        if self.probe_samples and not self.reads_pass_rates:
            raise ValueError(
                "data.curriculum.probe_samples asks for pass rates that nothing reads: set data.curriculum.prefer='mixed' "
                "or a narrower data.curriculum.window, or set it to 0"
            )
        return self


class DecontaminateConfig(Section):
    """Which training texts count as repeating a benchmark. Words are runs of letters and digits in lower case."""

    rule: Literal["off", "paper", "containment"] = "containment"
    """"paper": one shared n-gram is enough, and shorter benchmark texts are looked for whole (arXiv 2402.03300 §2.1);
    "containment": a share of the benchmark text's n-grams, its words and its numbers, so that a look-alike with other
    numbers stays; "off" looks for nothing."""
    ngram: int | None = Field(default=None, ge=3, le=50)
    """Words of an n-gram; None takes 10 for "paper", as published, and 4 for "containment". Smaller finds more."""
    threshold: float = Field(default=0.4, gt=0.0, le=1.0)
    """Containment: least share of a benchmark text's n-grams that is looked at. Smaller finds more changed copies."""
    same_words: float = Field(default=0.82, ge=0.0, le=1.0)
    """Containment: least share of the benchmark text's words that the passage has in the same order."""
    same_numbers: float = Field(default=0.9, ge=0.0, le=1.0)
    """Containment: least share of its numbers that the passage has in the same order; 0 also removes look-alikes that
    only have other numbers."""
    threshold_without_numbers: float = Field(default=0.8, ge=0.0, le=1.0)
    """Containment: least share of n-grams when the benchmark text has no number to tell a copy from a look-alike."""
    exact_below: int = Field(default=10, ge=3, le=50)
    """Containment: benchmark texts of fewer words than this (and at least 3) are looked for whole, word for word. Problems
    as short that were held out of the sources themselves are not looked for: only their exact copies leave."""

    @property
    def words(self) -> int:
        """The n of the n-grams."""
        return self.ngram or (10 if self.rule == "paper" else 4)

    @property
    def whole_below(self) -> int:
        """Benchmark texts of fewer words than this are looked for whole."""
        return self.words if self.rule == "paper" else max(self.words, self.exact_below)


class WebConfig(Section):
    """Selection of mathematical web pages from a pool, starting from seed pages (arXiv 2402.03300 §2.1)."""

    dim: int = Field(default=256, ge=1)
    """Width of the classifier's vectors."""
    lr: float = Field(default=0.1, gt=0.0)
    """Its learning rate."""
    word_ngrams: int = Field(default=3, ge=1, le=5)
    """Longest word n-gram it sees."""
    min_count: int = Field(default=3, ge=1)
    """Rarer words are not in its vocabulary."""
    epochs: int = Field(default=3, ge=1)
    """Passes over the training pages."""
    min_pages_read: int = Field(default=30_000, ge=1)
    """Small seeds are learnt at up to five times ``lr`` and then passed over more often, until that is worth this many
    pages read; the published three passes need many pages."""
    bucket: int = Field(default=30_000, ge=1000)
    """Rows that word n-grams are hashed into: memory is 4 * dim bytes a row. More for seeds of many thousand pages."""
    min_score: float = Field(default=0.5, ge=0.0, le=1.0)
    """Least score of a kept page."""
    keep_words: int | None = Field(default=None, ge=1)
    """Keep the best pages up to this many words, as the paper does by tokens; None keeps all over ``min_score``."""
    domain_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """A domain of which more than this share of pages is kept becomes a candidate for the seed."""
    approved: tuple[str, ...] = ()
    """URL patterns (with *) whose pages in candidate domains join the seed: the annotators' list. None: one iteration."""
    min_growth: float = Field(default=0.02, ge=0.0)
    """Stop when an iteration adds less than this share of pages."""
    max_iterations: int = Field(default=4, ge=1)
    """Stop after this many iterations; the paper took four."""
    near_duplicates: float | None = Field(default=0.7, gt=0.0, le=1.0)
    """Remove a page whose word 5-grams are this alike (Jaccard index) to an earlier one's; None keeps copies."""
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    """How pages that repeat a benchmark are found."""


class DataConfig(Section):
    """Data selection."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """Training problem sets, mixed in this order."""
    benchmarks: tuple[SourceConfig, ...] = ()
    """Held-out problem sets for evaluation; empty: the held-out split of the sources."""
    embedded: EmbeddedData = EmbeddedData()
    """The generator's sizes; read only when a source is "embedded"."""
    heldout_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Without benchmarks: share of each set held out by a hash of the text (a set with its own held-out split keeps it)."""
    template: str = "boxed"
    """How a problem is put to the model: "boxed", "gsm8k_fewshot", "r1_think", "plain", or a Jinja file."""
    chat: Literal["auto", "model", "none"] = "auto"
    """"model" sends the text through the model's chat template, "none" as it is; "auto" is "none" for gsm8k_fewshot and
    r1_think, which are written for base models, and "model" for the others."""
    answer_format: Literal["boxed", "tags"] = "boxed"
    """Where the final answer stands: in ``\\boxed{}`` or in <answer> tags."""
    system_prompt: str | None = None
    """System message of the model's chat template."""
    thinking: bool | None = None
    """Thinking switch of chat templates that have one (enable_thinking); None leaves the template's default."""
    max_prompt_tokens: int = Field(default=128, ge=1)
    """Longer prompts are set aside and counted, never cut."""
    max_gold_rejects: float = Field(default=0.1, ge=0.0, le=1.0)
    """Stop when more than this share of a source has a gold that is empty or that the verifier cannot read."""

    decontaminate: DecontaminateConfig = DecontaminateConfig()
    """How training problems that repeat a held-out problem are found."""
    near_duplicates: float | None = Field(default=0.8, gt=0.0, le=1.0)
    """Remove a training problem that shares this much of its word 3-grams (Jaccard index, by MinHash) with an earlier
    one and has the same numbers; lower removes more, None nothing. Exact duplicates always leave."""
    web: WebConfig = WebConfig()
    """Selection of web pages, read by `grpoflow select --web` alone."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which of the selected problems the steps draw."""

    def named_sources(self) -> list[tuple[str, SourceConfig]]:
        """(name that its problems carry, source) of the training sources."""
        return [(source.label, source) for source in self.sources]

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        for group, sets in (("data.sources", self.sources), ("data.benchmarks", self.benchmarks)):
            labels = [source.label for source in sets]
            if twice := [label for label in labels if labels.count(label) > 1]:
                raise ValueError(
                    f"{group} has two sets named {twice[0]!r}, which the tables could not tell apart: give one of them "
                    f"alias = a name of its own"
                )
        wanted = {"boxed": "boxed", "r1_think": "tags"}.get(self.template)
        if wanted and self.answer_format != wanted:
            raise ValueError(
                f"data.template {self.template!r} asks for the answer as {wanted!r} but data.answer_format is "
                f"{self.answer_format!r}: set data.answer_format={wanted!r}, or another template"
            )
        if self.chat == "none" and (self.system_prompt is not None or self.thinking is not None):
            raise ValueError(
                "data.system_prompt and data.thinking need the chat template: data.chat must not be 'none'"
            )
        return self
