"""Rows to Arrow and back: what a caller hands over becomes exactly the declared columns, or one clear error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from itertools import chain
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.schema import (
    COMPONENT_PREFIX,
    MOMENT,
    NUMBERS,
    STAGE_COLUMN,
    Column,
    arrow_schema,
    columns,
    physical_schema,
)
from pipeline.types import UNSCORED, FinishReason, Purpose, Status

UPDATE_KEYS = {"run_id", "stage", "round", "step"}
COUNTERS = {"epoch", "minibatch"}
COMPONENT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")


def normalise(table: str, key: str, rows: Sequence[Mapping[str, Any]] | Sequence[Any] | pa.Table) -> pa.Table:
    """The rows as a file holds them. Raises ValueError that names the table, the column and what is wrong."""
    declared = columns(table)
    arrays: dict[str, Any] = {}
    if isinstance(rows, pa.Table):
        _check_names(table, rows.column_names)
        for column in declared:
            present = column.name in rows.column_names
            array = rows.column(column.name) if present else pa.nulls(len(rows), column.type)
            arrays[column.name] = _checked(table, column, lambda a=array, c=column: _combined(a).cast(c.type))
    else:
        for column, values in zip(declared, _values(table, rows), strict=True):
            arrays[column.name] = _checked(table, column, lambda v=values, c=column: _array(c, v))
    components: dict[str, pa.Array] = {}
    if table == "rollouts":
        _check_rollouts(arrays)
        arrays |= _derived(arrays["completion_token_ids"])
    elif table == "rewards":
        _check_rewards(arrays)
        components = _split(arrays.pop("components"))
    schema = physical_schema(table, tuple(components))
    stage = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(rows), np.int32)), pa.array([key])).cast(pa.string())
    named = arrays | {COMPONENT_PREFIX + name: values for name, values in components.items()} | {STAGE_COLUMN: stage}
    return pa.table([named[name] for name in schema.names], schema=schema)


def logical(table: str, data: pa.Table, names: Sequence[str] | None = None) -> pa.Table:
    """A file's rows with the declared columns (or those named): components gathered, missing columns NULL."""
    schema = arrow_schema(table)
    arrays = []
    wanted = list(names) if names is not None else schema.names
    for name in wanted:
        if name not in schema.names:
            raise ValueError(f"{table} has no column {name!r}; its columns: {', '.join(schema.names)}")
        if (table, name) == ("rewards", "components"):
            arrays.append(_gather(data))
        elif name in data.column_names:
            arrays.append(data.column(name).cast(schema.field(name).type))
        else:
            arrays.append(pa.nulls(data.num_rows, schema.field(name).type))
    return pa.table(arrays, schema=pa.schema([schema.field(name) for name in wanted]))


def update_row(
    run_id: str, stage_key: str, round_: int | None, step: int | None, metrics: Mapping[str, float | None]
) -> dict[str, Any]:
    """A row of the updates table. SFT has ``round_`` None and counts ``step`` over its own optimizer steps, from 1.

    Metrics named like a column (loss, kl, grad_norm, lr, tokens, seconds_update …; ``epoch`` and ``minibatch`` too) go
    there, all others into the map ``extra``, so each must be a number, bool or None. Not a number is kept as NaN: a
    loss that blew up is a fact. Raises ValueError for a value that is no number.
    """
    names = {column.name for column in columns("updates")} - UPDATE_KEYS - {"extra"}
    row: dict[str, Any] = {"run_id": run_id, "stage": stage_key, "round": round_, "step": step}
    extra: dict[str, float] = {}
    for name, value in metrics.items():
        if name in UPDATE_KEYS or name == "extra":
            raise ValueError(f"metrics of {stage_key}: {name!r} is given by the caller and cannot be a metric")
        if value is not None and not isinstance(value, (int, float, np.integer, np.floating)):
            raise ValueError(f"metrics of {stage_key}: {name} must be a number, got {type(value).__name__} {value!r}")
        if name in COUNTERS:
            row[name] = None if value is None else int(value)
        elif name in names:
            row[name] = None if value is None else float(value)
        elif value is not None:
            extra[name] = float(value)
    return row | {"extra": extra}


def component_names(names: Iterable[str]) -> list[str]:
    """The reward components among the columns of a rewards file."""
    declared = {column.name for column in columns("rewards")}
    return [n.removeprefix(COMPONENT_PREFIX) for n in names if n.startswith(COMPONENT_PREFIX) and n not in declared]


def _values(table: str, rows: Sequence[Any]) -> list[list[Any]]:
    names = [column.name for column in columns(table)]
    if rows and is_dataclass(rows[0]):
        _check_names(table, [f.name for f in fields(rows[0])])
        return [[getattr(row, name) for row in rows] for name in names]
    for given in {tuple(row) for row in rows}:
        _check_names(table, given)
    return [[row.get(name) for row in rows] for name in names]


def _check_names(table: str, given: Sequence[str]) -> None:
    names = {column.name for column in columns(table)}
    extra = [name for name in given if name not in names]
    missing = [c.name for c in columns(table) if not c.nullable and c.name not in given]
    if extra or missing:
        problems = [f"no column {', '.join(extra)} is declared"] * bool(extra)
        problems += [f"the column {', '.join(missing)} is missing"] * bool(missing)
        raise ValueError(f"rows of {table}: {' and '.join(problems)}; columns: {', '.join(sorted(names))}")


def _checked(table: str, column: Column, make: Any) -> Any:
    try:
        array = make()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"rows of {table}: column {column.name} must be {column.type}: {e}") from None
    if array.null_count and not column.nullable:
        raise ValueError(f"rows of {table}: column {column.name} has {array.null_count} empty values; none may be")
    return array


def _array(column: Column, values: list[Any]) -> Any:
    if pa.types.is_list(column.type):
        return _lists(column.type, values)
    if column.type == NUMBERS:
        return pa.array([None if v is None else list(v.items()) for v in values], NUMBERS)
    if column.type == MOMENT:
        return pa.array([datetime.fromisoformat(v) if isinstance(v, str) else v for v in values], MOMENT)
    return pa.array(values, column.type)


def _lists(type_: pa.ListType, values: list[Any]) -> pa.ListArray:
    # numpy flattens Python lists ten times as fast as Arrow converts nested ones.
    present = [value for value in values if value is not None]
    dtype = type_.value_type.to_pandas_dtype()
    if all(isinstance(value, np.ndarray) for value in present):
        flat = np.concatenate(present).astype(dtype, casting="same_kind") if present else np.empty(0, dtype)
    else:
        flat = np.fromiter(chain.from_iterable(present), dtype)
    lengths = np.fromiter((0 if value is None else len(value) for value in values), np.int64, len(values))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask = None
    if len(present) < len(values):
        mask = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=type_, mask=mask)


def _combined(array: Any) -> Any:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _check_rollouts(arrays: Mapping[str, Any]) -> None:
    evaluated = pc.equal(arrays["purpose"], "evaluate")
    if pc.any(pc.and_(evaluated, pc.is_valid(arrays["round"]))).as_py():
        raise ValueError(
            "rows of rollouts: purpose 'evaluate' has a round; it must be None, or evaluation would be mixed into the "
            "averages of training rounds (the stage key says which checkpoint was evaluated)"
        )
    tokens, logprobs = (pc.list_value_length(arrays[n]) for n in ("completion_token_ids", "sampling_logprobs"))
    if not pc.all(pc.equal(tokens, logprobs), min_count=0).as_py():
        row = pc.index(pc.equal(tokens, logprobs), False).as_py()
        raise ValueError(
            f"rows of rollouts: row {row} has {tokens[row].as_py()} completion tokens and {logprobs[row].as_py()} "
            "sampling_logprobs; expected one logprob a token"
        )
    _check_one_of("rollouts", "purpose", arrays["purpose"], get_args(Purpose))
    _check_one_of("rollouts", "finish_reason", arrays["finish_reason"], get_args(FinishReason))
    _check_distinct("rollouts", arrays["rollout_id"])


def _check_rewards(arrays: Mapping[str, Any]) -> None:
    _check_one_of("rewards", "status", arrays["status"], get_args(Status))
    _check_distinct("rewards", arrays["rollout_id"])
    unscored = pc.is_in(arrays["status"], pa.array(sorted(UNSCORED)))
    if pc.any(pc.and_(unscored, pc.is_valid(arrays["correct"]))).as_py():
        raise ValueError(
            "rows of rewards: an unscored status (timeout, error, gold_unparsable) has a verdict; expected None"
        )


def _check_one_of(table: str, column: str, values: pa.Array, allowed: Sequence[str]) -> None:
    for value in pc.unique(values).to_pylist():
        if value not in allowed:
            raise ValueError(f"rows of {table}: {column} {value!r} is unknown; expected one of {', '.join(allowed)}")


def _check_distinct(table: str, ids: pa.Array) -> None:
    if len(set(ids.to_pylist())) < len(ids):
        raise ValueError(f"rows of {table}: a rollout_id occurs twice; each completion has one row")


def _derived(token_ids: pa.ListArray) -> dict[str, pa.Array]:
    """``completion_length`` and ``completion_hash``: a sum over tokens of 64 mixed bits of (token id, position)."""
    offsets = token_ids.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    flat = token_ids.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]].astype(np.uint64)
    position = np.arange(len(flat), dtype=np.uint64) - np.repeat(offsets[:-1] - offsets[0], lengths).astype(np.uint64)
    mixed = (flat << np.uint64(32)) + position
    # splitmix64's finaliser (Steele, Lea and Flood 2014)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    hashes = totals[offsets[1:] - offsets[0]] - totals[offsets[:-1] - offsets[0]]
    return {
        "completion_length": pa.array(lengths.astype(np.int32)),
        "completion_hash": pa.array(hashes.view(np.int64)),
    }


def _split(maps: pa.MapArray) -> dict[str, pa.Array]:
    """Components by name, one float64 array a name, in the order of the names."""
    rows: list[dict[str, Any]] = [dict(items) for items in maps.to_pylist()]
    names = sorted({name for row in rows for name in row})
    for name in names:
        if not COMPONENT_NAME.fullmatch(name):
            raise ValueError(f"reward component {name!r}: expected letters, digits, '_', '-' and '.', at most 63")
        if COMPONENT_PREFIX + name in arrow_schema("rewards").names:
            raise ValueError(f"reward component {name!r}: {COMPONENT_PREFIX}{name} is a column of rewards; rename it")
    return {name: pa.array([row.get(name) for row in rows], pa.float64()) for name in names}


def _gather(data: pa.Table) -> pa.Array:
    """The inverse of ``_split``: a map of name to value for each row."""
    names = component_names(data.column_names)
    rows, width = data.num_rows, len(names)
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * width)
    keys = pa.array(names * rows, pa.string())
    place = np.arange(rows * width).reshape(width, rows).T.reshape(-1)
    stacked = [data.column(COMPONENT_PREFIX + name).combine_chunks() for name in names]
    values = pa.concat_arrays(stacked).take(pa.array(place)) if stacked and rows else pa.array([], pa.float64())
    return pa.MapArray.from_arrays(offsets, keys, values).cast(NUMBERS)
