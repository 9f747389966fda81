"""SQL over the tables: a DuckDB connection whose views show one run, its lineage resolved, or all runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.lineage import Entry, Lineage
from pipeline.runviews import RUN_COLUMNS, STAGE_COLUMNS, create_runs, create_stages
from pipeline.schema import (
    COMPONENT_PREFIX,
    RENAMED,
    SCORED,
    STAGE_COLUMN,
    TABLES,
    field_id,
    scored_columns,
    sql_type,
    stored_columns,
)
from pipeline.sqltext import name as _name
from pipeline.sqltext import quote as _quote

if TYPE_CHECKING:
    import duckdb

    from pipeline.remote import Remote

logger = logging.getLogger(__name__)

Located = Callable[[Sequence[Entry]], list[Entry]]
SHOWN_TYPES = {"components": "STRUCT", "extra": "JSON"}
GROUPS = """
SELECT group_id, any_value(run_id) AS run_id, any_value(stage) AS stage, any_value(purpose) AS purpose,
  any_value(round) AS round, any_value(step) AS step, any_value(problem_id) AS problem_id, count(*)::INT AS completions,
  count(reward)::INT AS scored, sum(correct)::INT AS correct, avg(reward) AS reward_mean,
  stddev_pop(reward) AS reward_std, min(reward) AS reward_min, max(reward) AS reward_max,
  (count(reward) > 0 AND max(reward) = min(reward))::TINYINT AS zero_variance,
  count(*) FILTER (finish_reason = 'length')::INT AS truncated, sum(completion_length)::BIGINT AS tokens
FROM scored GROUP BY group_id
"""
GROUP_COLUMNS = {
    "group_id": "the completions of one problem in one step",
    "run_id": "run that sampled it", "stage": "stage key that sampled it", "purpose": "as in rollouts",
    "round": "round, from 1", "step": "step in the round, from 1", "problem_id": "the problem that was put",
    "completions": "completions in the group", "scored": "those with a reward", "correct": "those that are correct",
    "reward_mean": "mean reward of the scored", "reward_std": "their standard deviation, ddof 0",
    "reward_min": "least reward", "reward_max": "largest reward",
    "zero_variance": "1 when all rewards are equal", "truncated": "completions that ended by length",
    "tokens": "completion tokens",
}  # fmt: skip


def connect(
    run: str | None = None, *, root: Path | str = "runs", remote: Remote | None = None
) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB connection with the views of one run (its ancestors' rows included), or of all runs.

    It shows what was recorded when it was opened, and never changes a file: it can read the folder of runs and nothing
    else, and statements that write are refused by ``pipeline.ask`` (this connection itself leaves them to you). With
    ``remote`` (``pipeline.remote.opened``) it reads an object store; ``root`` is then its copy of names.
    Among all runs, one whose header is damaged is left out with a warning. Raises FileNotFoundError for a run or folder
    that is not there.
    """
    import duckdb

    folder = Path(root)
    if run is not None and not (folder / run / "recipe.json").is_file():
        raise FileNotFoundError(f"run {run!r} is not in {folder}: `grpoflow status` lists the runs there")
    connection = duckdb.connect(config={"temp_directory": ""})
    readable = [str(folder.resolve()) + "/"]
    if remote is not None:
        connection.register_filesystem(remote.files)
        readable.append(remote.url(str(remote.folder)))
    connection.execute(f"SET allowed_directories = [{', '.join(map(_quote, readable))}]")
    for setting in ("autoinstall_known_extensions", "autoload_known_extensions", "enable_external_access"):
        connection.execute(f"SET {setting} = false")
    lineage = Lineage(folder.resolve(), run)
    for damage in lineage.left_out:
        logger.warning("left out: %s", damage)
    create_views(connection, lineage, remote.located if remote is not None else list)
    return connection


def create_views(connection: duckdb.DuckDBPyConnection, lineage: Lineage, located: Located = list) -> None:
    """Create the views of the tables, and scored, groups, runs and stages; ``located`` says where the files are read."""
    components = lineage.components()
    for table in TABLES:
        rows = _select(connection, table, located(lineage.entries(table)), components)
        if table == "problems" and lineage.run is None:
            rows = _once(rows)
        connection.execute(f"CREATE VIEW {table} AS {rows}")
    _create_scored(connection, lineage, components, located)
    connection.execute(f"CREATE VIEW groups AS {GROUPS}")
    create_runs(connection, lineage)
    create_stages(connection, lineage)


def _create_scored(connection: Any, lineage: Lineage, components: list[str], located: Located) -> None:
    ready, left = lineage.split_scored()
    rows = []
    if ready or not left["rollouts"]:
        rows.append(_select(connection, SCORED, located(ready), components))
    if left["rollouts"]:
        parts = {table: _select(connection, table, located(left[table]), components, "_left") for table in left}
        columns = [f"{table}.{_renamed(table, c.name)}" for table, c in scored_columns()]
        columns += [f"rewards.{_name(COMPONENT_PREFIX + name)}" for name in components]
        rows.append(
            f"SELECT {', '.join(columns)} FROM ({parts['rollouts']}) AS rollouts "
            f"LEFT JOIN ({parts['rewards']}) AS rewards USING (rollout_id) "
            f"LEFT JOIN ({parts['advantages']}) AS advantages USING (rollout_id)"
        )
    connection.execute(f"CREATE VIEW {SCORED} AS {' UNION ALL '.join(rows)}")


def _renamed(table: str, name: str) -> str:
    originals = {(source, new): old for (source, old), new in RENAMED.items()}
    return f"{_name(originals.get((table, name), name))} AS {_name(name)}"


def view_columns(components: list[str] | None = None) -> dict[str, list[tuple[str, str, str]]]:
    """(name, SQL type, meaning) of every column, by view; the components' columns come with the names given."""
    named = [(COMPONENT_PREFIX + name, "DOUBLE", f"component {name}, unweighted") for name in components or []]
    shown = {
        table: [(c.name, SHOWN_TYPES.get(c.name, sql_type(c.type)), c.doc) for c in stored_columns(table)]
        for table in TABLES
    }
    shown[SCORED] = [(c.name, sql_type(c.type), c.doc) for _, c in scored_columns()]
    shown["rewards"] += named
    shown[SCORED] += named
    shown["groups"] = [(name, "", doc) for name, doc in GROUP_COLUMNS.items()]
    shown["runs"] = [(name, type_, doc) for name, (type_, doc) in RUN_COLUMNS.items()]
    shown["stages"] = [(name, type_, doc) for name, (type_, doc) in STAGE_COLUMNS.items()]
    return shown


def _select(connection: Any, table: str, entries: Sequence[Entry], components: list[str], label: str = "") -> str:
    """The SELECT over the files of a table: one branch for whole files, one for each filter on stages."""
    chosen: dict[tuple[tuple[str, ...] | None, bool], list[str]] = {}
    for entry in entries:
        chosen.setdefault((entry.keys, entry.keep), []).append(entry.file.path)
    branches = []
    for number, ((keys, keep), files) in enumerate(chosen.items()):
        scan = _scan(connection, table, f"files_{table}{label}_{number}", files, components)
        if keys is not None:
            listed = ", ".join(_quote(key) for key in keys)
            scan += f" WHERE {STAGE_COLUMN} {'' if keep else 'NOT '}IN ({listed})"
        branches.append(scan)
    if not branches:
        shown = [(name, "JSON" if type_.startswith("MAP") else type_) for name, type_ in _shown(table, components)]
        names = ", ".join(f"NULL::{type_} AS {_name(name)}" for name, type_ in shown)
        return f"SELECT {names} WHERE false"
    return " UNION ALL ".join(branches)


def _scan(connection: Any, table: str, variable: str, files: list[str], components: list[str]) -> str:
    # The list is a variable, not text: 100,000 file names would take the parser seconds.
    connection.execute(f"SET VARIABLE {variable} = $1", [files])
    physical = [(n, t) for n, t in _shown(table, components) if (table, n) != ("rewards", "components")]
    physical += [(STAGE_COLUMN, "VARCHAR")] if table != SCORED else []
    fields = ", ".join(
        f"{field_id(name)}: {{name: {_quote(name)}, type: {_quote(type_)}, default_value: NULL}}"
        for name, type_ in physical
    )
    columns = ", ".join(_expression(table, name, components) for name, _ in _shown(table, components))
    return f"SELECT {columns} FROM read_parquet(getvariable('{variable}'), schema = MAP {{{fields}}})"


def _shown(table: str, components: list[str]) -> list[tuple[str, str]]:
    declared = [c for _, c in scored_columns()] if table == SCORED else stored_columns(table)
    return [(c.name, sql_type(c.type)) for c in declared] + [
        (COMPONENT_PREFIX + name, "DOUBLE") for name in _of(table, components)
    ]


def _expression(table: str, column: str, components: list[str]) -> str:
    """How a view shows a column. Maps become a struct and JSON, which data frames and Hugging Face sets can hold."""
    if (table, column) == ("updates", "extra"):
        return "to_json(extra) AS extra"
    if (table, column) != ("rewards", "components"):
        return _name(column)
    if not components:
        return "NULL AS components"
    return f"{{{', '.join(f'{_quote(n)}: {_name(COMPONENT_PREFIX + n)}' for n in components)}}} AS components"


def _of(table: str, components: list[str]) -> list[str]:
    return components if table in ("rewards", SCORED) else []


def _once(rows: str) -> str:
    """Over all runs a problem is one row, whichever runs selected it."""
    names = [column.name for column in stored_columns("problems")]
    firsts = ", ".join(f"any_value({name}) AS {name}" for name in names if name != "problem_id")
    return f"SELECT problem_id, {firsts} FROM ({rows}) GROUP BY problem_id"
