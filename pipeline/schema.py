"""The one declaration of every table's columns; Arrow, Parquet and SQL schemas are rendered from it.

A Parquet file says in its footer which version of this declaration wrote it. Columns are found by a field id that
follows from their name, so a file of an older version reads as if the columns it lacks were NULL.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 1
VERSION_KEY = b"grpoflow.schema"
STAGE_COLUMN = "_stage"
"""Physical column of every table: the stage key that wrote the row. Views leave it out."""
COMPONENT_PREFIX = "reward_"
"""A reward component ``format`` is the column ``reward_format``."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    ``dictionary`` marks text with few distinct values. ``derived`` columns are computed from the others when rows are
    recorded: only files and views have them.
    """

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = False
    dictionary: bool = False
    derived: bool = False


TEXT, INT, LONG, FLAG, REAL, SINGLE = pa.string(), pa.int32(), pa.int64(), pa.bool_(), pa.float64(), pa.float32()
IDS, SINGLES, REALS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.float64())
NUMBERS = pa.map_(pa.string(), pa.float64())
MOMENT = pa.timestamp("us", tz="UTC")
SQL_TYPES = {
    TEXT: "VARCHAR", INT: "INTEGER", LONG: "BIGINT", FLAG: "TINYINT", REAL: "DOUBLE", SINGLE: "FLOAT",
    NUMBERS: "MAP(VARCHAR, DOUBLE)", MOMENT: "TIMESTAMPTZ",
}  # fmt: skip


def _text(name: str, doc: str, *, nullable: bool = False, dictionary: bool = True) -> Column:
    return Column(name, TEXT, doc, nullable=nullable, dictionary=dictionary)


def _metric(name: str, doc: str) -> Column:
    return Column(name, REAL, doc, nullable=True)


RUN_ID = _text("run_id", "run that wrote the row")
ROUND = Column("round", INT, "round, from 1", nullable=True)
STEP = Column("step", INT, "step in the round, from 1", nullable=True)

TABLES: dict[str, tuple[Column, ...]] = {
    "problems": (
        _text("problem_id", "hash of the normalised text, the same in every run", dictionary=False),
        _text("problem", "the question", dictionary=False),
        _text("answer", "gold answer", dictionary=False),
        _text("solution", "worked solution", nullable=True, dictionary=False),
        Column("level", INT, "difficulty the source states", nullable=True),
        _text("subject", "subject the source states", nullable=True),
        _text("source", "problem set"),
        _text("split", "train or heldout"),
        _text("prompt", "what the model sees, chat template applied", dictionary=False),
        Column("prompt_token_ids", IDS, "the prompt's token ids"),
        _text("meta", "JSON of what a scorer needs beyond the answer", dictionary=False),
    ),
    "rollouts": (
        _text("rollout_id", "id of the completion, unique over all runs", dictionary=False),
        RUN_ID,
        _text("stage", "stage key that sampled it"),
        _text("purpose", "train, evaluate, reward_model, reject, probe or process"),
        ROUND,
        STEP,
        _text("group_id", "the completions of one problem in one step share it"),
        _text("problem_id", "the problem that was put"),
        Column("sample_index", INT, "place in the group, from 0"),
        Column("seed", LONG, "seed of this completion"),
        _text("policy_version", "our name for the weights that sampled it"),
        _text("policy_checksum", "checksum of the weights the engine reported"),
        _text("engine", "engine that sampled it"),
        Column("temperature", REAL, "logits were divided by it; 0 is greedy"),
        Column("top_p", REAL, "nucleus share"),
        Column("top_k", INT, "likeliest tokens sampled from; 0 is off"),
        Column("min_p", REAL, "least share of the likeliest token; 0 is off"),
        Column("max_tokens", INT, "longest completion allowed, tokens"),
        Column("prompt_token_ids", IDS, "the prompt's token ids"),
        Column("completion_token_ids", IDS, "the completion's token ids, its ending included"),
        Column("sampling_logprobs", SINGLES, "one a completion token, as drawn, nats"),
        _text("finish_reason", "stop, or length when truncated"),
        _text("text", "the completion, decoded", dictionary=False),
        Column("seconds", REAL, "from the completion's start to its end; completions of a batch overlap"),
        Column("completion_length", INT, "tokens of the completion", derived=True),
        Column("completion_hash", LONG, "equal for equal completion_token_ids", derived=True),
    ),
    "rewards": (
        _text("rollout_id", "the completion judged", dictionary=False),
        Column("reward", REAL, "weighted sum of the components; NULL is unscored", nullable=True),
        Column("correct", FLAG, "the verifier's verdict; NULL is unscored", nullable=True),
        _text("status", "correct, incorrect, no_answer, timeout, error or gold_unparsable"),
        _text("answer", "the answer extracted from the completion", nullable=True, dictionary=False),
        Column("components", NUMBERS, "unweighted values by name"),
        Column("step_rewards", REALS, "one reward a reasoning step", nullable=True),
        Column("step_ends", IDS, "token index that ends each step", nullable=True),
        Column("seconds", REAL, "grading time"),
    ),
    "advantages": (
        _text("rollout_id", "the completion credited", dictionary=False),
        Column("advantage", SINGLE, "group-relative advantage; NULL where unscored", nullable=True),
        Column("group_mean", REAL, "mean reward of the group's scored completions", nullable=True),
        Column("group_std", REAL, "their standard deviation", nullable=True),
        Column("zero_variance", FLAG, "all rewards of the group are equal: advantage 0"),
        Column("token_advantages", SINGLES, "one a completion token under process supervision", nullable=True),
    ),
    "updates": (
        RUN_ID,
        _text("stage", "stage key of the optimizer step: sft, regenerate or a step's update"),
        ROUND,
        Column("step", INT, "step in the round, or of SFT, from 1", nullable=True),
        Column("epoch", INT, "pass over the step's rollouts, from 0; NULL in SFT", nullable=True),
        Column("minibatch", INT, "optimizer step within the pass, from 0; NULL in SFT", nullable=True),
        _metric("loss", "the objective that was minimised"),
        _metric("policy_loss", "its policy part"),
        _metric("kl", "KL(policy || reference), nats a token"),
        _metric("entropy", "policy entropy, nats a token"),
        _metric("clip_low", "share of tokens clipped from below"),
        _metric("clip_high", "share of tokens clipped from above"),
        _metric("ratio_mean", "mean importance ratio"),
        _metric("ratio_max", "largest importance ratio"),
        _metric("logprob_gap_mean", "mean |learner - sampler| logprob, nats"),
        _metric("logprob_gap_max", "largest |learner - sampler| logprob, nats"),
        _metric("ess", "effective sample size of the ratios, share of 1"),
        _metric("grad_norm", "gradient norm before clipping"),
        _metric("lr", "learning rate"),
        _metric("tokens", "completion tokens in the loss"),
        _metric("sequences", "completions in the loss"),
        _metric("reward_mean", "mean reward of the step's scored completions"),
        _metric("zero_variance_share", "share of groups without variance"),
        _metric("truncated_share", "share of completions that ended by length"),
        _metric("seconds_rollout", "time of the step's sampling"),
        _metric("seconds_reward", "time of its grading"),
        _metric("seconds_logprobs", "time of the old and reference logprobs"),
        _metric("seconds_forward_backward", "time of forward and backward over all micro-batches"),
        _metric("seconds_optimizer", "time of clipping and the optimizer step proper"),
        _metric("seconds_update", "time of the whole optimizer step"),
        Column("extra", NUMBERS, "other metrics by name", nullable=True),
    ),
    "evaluations": (
        RUN_ID,
        _text("stage", "stage key of the evaluation"),
        _text("checkpoint", "checkpoint evaluated"),
        _text("benchmark", "problem set"),
        _text("metric", "pass@k, maj@k, greedy …"),
        Column("k", INT, "the k of pass@k or maj@k", nullable=True),
        _text("slice", "all, or a part such as level=3", nullable=True),
        Column("value", REAL, "the metric", nullable=True),
        Column("low", REAL, "lower end of its interval", nullable=True),
        Column("high", REAL, "upper end of its interval", nullable=True),
        Column("n_problems", INT, "problems behind it"),
        Column("n_samples", INT, "completions a problem", nullable=True),
        Column("temperature", REAL, "of the completions; 0 is greedy", nullable=True),
        _text("method", "how value and interval were computed", nullable=True),
    ),
    "events": (
        RUN_ID,
        _text("stage", "stage key it happened in", nullable=True),
        ROUND,
        STEP,
        _text("kind", "what was watched, such as kl or sync"),
        _text("severity", "info, warning or error"),
        _text("message", "one line for people", dictionary=False),
        Column("value", REAL, "what was measured", nullable=True),
        Column("limit", REAL, "what was allowed", nullable=True),
        Column("at", MOMENT, "when"),
    ),
}

SCORED = "scored"
SCORED_SOURCES: dict[str, tuple[str, ...]] = {
    "rollouts": (
        "rollout_id", "run_id", "stage", "purpose", "round", "step", "group_id", "problem_id", "sample_index",
        "policy_version", "temperature", "finish_reason", "completion_length", "completion_hash", "seconds",
    ),
    "rewards": ("reward", "correct", "status", "answer", "seconds"),
    "advantages": ("advantage", "zero_variance"),
}  # fmt: skip
"""The derived table ``scored``: one row a rollout with its verdict and credit, without token ids, logprobs and texts.

Joining ten million rows by id takes seconds; compaction does it once a round. Its components are ``reward_<name>``.
"""
RENAMED = {("rollouts", "seconds"): "sampling_seconds", ("rewards", "seconds"): "grading_seconds"}


def scored_columns() -> list[tuple[str, Column]]:
    """(source table, column as it is called in ``scored``) of the derived table, components aside."""
    return [
        (table, replace(column, name=RENAMED.get((table, column.name), column.name), nullable=True))
        for table, names in SCORED_SOURCES.items()
        for name in names
        for column in stored_columns(table)
        if column.name == name
    ]


def scored_schema(components: tuple[str, ...] = ()) -> pa.Schema:
    """What a file of the derived table holds."""
    fields = [(column.name, column.type) for _, column in scored_columns()]
    fields += [(COMPONENT_PREFIX + name, pa.float64()) for name in components]
    metadata = {VERSION_KEY: str(SCHEMA_VERSION).encode()}
    return pa.schema([_field(name, type_, True) for name, type_ in fields], metadata=metadata)


def columns(table: str) -> tuple[Column, ...]:
    """The columns that callers write and read; ValueError names the tables there are."""
    return tuple(column for column in stored_columns(table) if not column.derived)


def stored_columns(table: str) -> tuple[Column, ...]:
    """The declared columns of a table, derived ones included; ValueError names the tables there are."""
    if table not in TABLES:
        raise ValueError(f"table {table!r} is unknown; expected one of {', '.join(TABLES)}")
    return TABLES[table]


def field_id(name: str) -> int:
    """The Parquet field id of a column: 31 bits of its name's hash, so that it never depends on the order."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


@cache
def arrow_schema(table: str) -> pa.Schema:
    """The Arrow schema of a table as callers read and write it."""
    return pa.schema([pa.field(c.name, c.type, nullable=c.nullable) for c in columns(table)])


def physical_schema(table: str, components: tuple[str, ...] = ()) -> pa.Schema:
    """What a file holds: the declared columns, one ``reward_<name>`` column a component, and the stage key."""
    declared = [c for c in stored_columns(table) if (table, c.name) != ("rewards", "components")]
    fields = [(c.name, c.type, c.nullable) for c in declared]
    fields += [(COMPONENT_PREFIX + name, pa.float64(), True) for name in components]
    fields.append((STAGE_COLUMN, pa.string(), False))
    return pa.schema([_field(*field) for field in fields], metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


def dictionary_columns(table: str) -> list[str]:
    """Columns that Parquet stores as a dictionary of values plus small indexes."""
    if table == SCORED:
        return [column.name for _, column in scored_columns() if column.dictionary]
    lists = [f"{c.name}.list.element" for c in columns(table) if c.type == IDS]
    return [c.name for c in columns(table) if c.dictionary] + lists + [STAGE_COLUMN]


def file_version(metadata: dict[bytes, bytes] | None, origin: str) -> int:
    """The schema version in a file's metadata; ValueError when it is not a file of the store, or of a newer grpoflow."""
    written = (metadata or {}).get(VERSION_KEY)
    if written is None or not written.isdigit():
        raise ValueError(f"{origin}: says no schema version, so the store did not write it; move it out of the run")
    if int(written) > SCHEMA_VERSION:
        raise ValueError(
            f"{origin}: written with schema version {int(written)}, this grpoflow reads up to {SCHEMA_VERSION}: upgrade it"
        )
    return int(written)


def sql_type(type_: pa.DataType) -> str:
    """The type of a column in the views. Flags are 1 and 0, so that avg(correct) is a share."""
    if pa.types.is_list(type_):
        return sql_type(type_.value_type) + "[]"
    return SQL_TYPES[type_]


def _field(name: str, type_: pa.DataType, nullable: bool) -> pa.Field:
    metadata: Any = {b"PARQUET:field_id": str(field_id(name)).encode()}
    return pa.field(name, type_, nullable=nullable, metadata=metadata)
