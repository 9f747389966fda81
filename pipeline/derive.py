"""The derived table ``scored``: rollouts joined with their rewards and advantages, once, when a round is merged."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.lineage import rejudged
from pipeline.parquet import write_stream
from pipeline.rows import component_names
from pipeline.rundir import RunPaths
from pipeline.schema import COMPONENT_PREFIX, RENAMED, SCORED, SCORED_SOURCES, scored_columns, scored_schema
from pipeline.tablefiles import PARTS_KEY, TableFile, live_files, merged_path


def write_scored(paths: RunPaths, key: str) -> list[Path]:
    """Write the scored rows of a finished stage or round and return the file (none where it is there, or has no use).

    A round in which a child run judges its parent's rollouts again is left to be joined when asked.
    """
    target, covering = merged_path(paths, SCORED, key), TableFile(key, None, "")
    if target.is_file() or any(covering.covers(again) for again in rejudged(paths).values()):
        return []
    files = {t: [f.path for f in live_files(paths.table(t)) if covering.covers(f.key)] for t in SCORED_SOURCES}
    if not files["rollouts"] or not files["rewards"]:
        return []
    rewards, advantages = _light("rewards", files["rewards"]), _light("advantages", files["advantages"])
    components = tuple(sorted(component_names(rewards.column_names)))
    schema = scored_schema(components)
    rows = (_joined(_light("rollouts", [path]), rewards, advantages, schema) for path in sorted(files["rollouts"]))
    write_stream(rows, schema, target, SCORED, {PARTS_KEY: b"[]"})
    return [target]


def _light(table: str, files: list[str]) -> pa.Table:
    """The columns of a source that the derived table takes, under the names that it gives them."""
    names = ["rollout_id", *(name for name in SCORED_SOURCES[table] if name != "rollout_id")]
    tables = []
    for path in sorted(files):
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            extra = [COMPONENT_PREFIX + name for name in component_names(present)] if table == "rewards" else []
            data = file.read(columns=[name for name in [*names, *extra] if name in present])
        tables.append(data.rename_columns([RENAMED.get((table, name), name) for name in data.column_names]))
    if not tables:
        return pa.table({"rollout_id": pa.array([], pa.string())})
    return pa.concat_tables(tables, promote_options="default")


def _joined(rollouts: pa.Table, rewards: pa.Table, advantages: pa.Table, schema: pa.Schema) -> pa.Table:
    sources = {"rollouts": rollouts}
    for name, table in (("rewards", rewards), ("advantages", advantages)):
        places = pc.index_in(rollouts.column("rollout_id"), table.column("rollout_id").combine_chunks())
        sources[name] = table.take(places)
    origin = {column.name: table for table, column in scored_columns()}
    arrays = []
    for field in schema:
        source = sources[origin.get(field.name, "rewards")]
        present = field.name in source.column_names
        arrays.append(source.column(field.name).cast(field.type) if present else pa.nulls(len(rollouts), field.type))
    return pa.table(arrays, schema=schema)
