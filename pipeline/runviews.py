"""The views of what a run's folder says outside its tables: ``runs`` from recipe.json, ``stages`` from result.json."""

from __future__ import annotations

import json
from glob import escape
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.lineage import Lineage
from pipeline.rundir import RunPaths
from pipeline.sqltext import quote

if TYPE_CHECKING:
    import duckdb

RUN_COLUMNS = {
    "run_id": ("VARCHAR", "name of the run"),
    "recipe": ("VARCHAR", "name of its recipe"),
    "digest": ("VARCHAR", "digest of its resolved recipe"),
    "created_at": ("TIMESTAMPTZ", "when it was started"),
    "parent": ("VARCHAR", "the run it branched off"),
    "resume_from": ("VARCHAR", "the stage at which it did"),
    "finished": ("TINYINT", "1 when its last stage is complete"),
    "settings": ("VARCHAR", "the resolved recipe, JSON"),
    "versions": ("VARCHAR", "versions of the libraries, JSON"),
}
STAGE_COLUMNS = {
    "run_id": ("VARCHAR", "run that did it"),
    "stage": ("VARCHAR", "stage key, such as round-01/step-0003/rollout"),
    "kind": ("VARCHAR", "its last word without numbers: rollout, reward, update, evaluate …"),
    "seconds": ("DOUBLE", "how long it took"),
    "started_at": ("VARCHAR", "when it began"),
    "finished_at": ("VARCHAR", "when it was complete"),
    "metrics": ("JSON", "what it measured: metrics->>'$.reward'"),
}
STAGES = """
SELECT regexp_extract(filename, '([^/]+)/stages/', 1) AS run_id, found->>'$.key' AS stage,
  CASE WHEN starts_with(stage, 'evaluate/') THEN 'evaluate' ELSE regexp_extract(stage, '[^/]+$') END AS kind,
  (found->>'$.seconds')::DOUBLE AS seconds, found->>'$.started_at' AS started_at, found->>'$.finished_at' AS finished_at,
  found->'$.metrics' AS metrics
FROM (
  SELECT filename, CASE WHEN json_valid(content) THEN content::JSON
    ELSE error(filename || ': is damaged; delete it, and the run does what is missing again') END AS found
  FROM read_text({files}))
"""
# read_text: DuckDB's read_json opens a reader a file, which takes seven times as long over thousands of files.


def create_runs(connection: duckdb.DuckDBPyConnection, lineage: Lineage) -> None:
    """The table ``runs``, one row a run that the connection shows."""
    types = {"TINYINT": pa.int8()}
    schema = pa.schema([(name, types.get(type_, pa.string())) for name, (type_, _) in RUN_COLUMNS.items()])
    connection.register("_runs", pa.Table.from_pylist([_run_row(run) for run in lineage.runs], schema=schema))
    columns = ", ".join(f"{name}::{type_} AS {name}" for name, (type_, _) in RUN_COLUMNS.items())
    connection.execute(f"CREATE TABLE runs AS SELECT {columns} FROM _runs")
    connection.unregister("_runs")


def create_stages(connection: duckdb.DuckDBPyConnection, lineage: Lineage) -> None:
    """The view ``stages``, one row a finished stage; result.json files are listed when it is asked, not before."""
    if lineage.run is None:
        folders = (
            [f"{escape(str(lineage.root))}/*/stages/**/result.json"] if any(map(_has_results, lineage.runs)) else []
        )
        condition = " WHERE run_id IN (SELECT run_id FROM runs)"  # those that are left out are not there
    else:
        present = [(run, keys) for run, keys in lineage.shares() if _has_results(run)]
        folders = [f"{escape(str(run.directory))}/stages/**/result.json" for run, _ in present]
        condition = " WHERE " + (" OR ".join(_share(run, keys) for run, keys in present) or "false")
    if folders:
        rows = STAGES.format(files=f"[{', '.join(map(quote, folders))}]")
        rows = f"SELECT * FROM ({rows}){condition}"
    else:
        rows = "SELECT " + ", ".join(f"NULL::{t} AS {n}" for n, (t, _) in STAGE_COLUMNS.items()) + " WHERE false"
    connection.execute(f"CREATE VIEW stages AS {rows}")


def _has_results(run: RunPaths) -> bool:
    return next(run.directory.glob("stages/**/result.json"), None) is not None


def _share(run: RunPaths, keys: set[str] | None) -> str:
    listed = "" if keys is None else f" AND stage IN ({', '.join(map(quote, sorted(keys))) or 'NULL'})"
    return f"(run_id = {quote(run.run_id)}{listed})"


def _run_row(run: RunPaths) -> dict[str, Any]:
    header = run.header
    recipe = header.get("recipe") or {}
    return {
        "run_id": run.run_id,
        "recipe": recipe.get("name"),
        "digest": header.get("digest"),
        "created_at": header.get("created_at"),
        "parent": header.get("parent"),
        "resume_from": header.get("resume_from"),
        "finished": int(run.result_file("evaluate/final").is_file()),
        "settings": json.dumps(recipe, sort_keys=True),
        "versions": json.dumps(header.get("versions") or {}, sort_keys=True),
    }
