"""The declared schema: what files hold, and how versions read each other."""

import dataclasses

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import schema, store
from pipeline.types import Problem, Reward, Rollout
from tests.store_rows import finish_round, new_run, record_step, rollout_row

KEY = "round-01/step-0001/rollout"


@pytest.mark.parametrize(("table", "kind"), [("problems", Problem), ("rollouts", Rollout), ("rewards", Reward)])
def test_a_table_has_exactly_the_fields_of_its_noun(table, kind):
    assert [column.name for column in schema.columns(table)] == [field.name for field in dataclasses.fields(kind)]


def test_every_column_is_documented_and_has_its_own_field_id():
    for table in schema.TABLES:
        names = [column.name for column in schema.stored_columns(table)]
        assert len({schema.field_id(name) for name in [*names, schema.STAGE_COLUMN]}) == len(names) + 1
        assert all(column.doc for column in schema.stored_columns(table))


def test_a_file_says_its_version_and_compresses_what_repeats(tmp_path):
    file = store.append(new_run(tmp_path, "a"), "rollouts", KEY, [rollout_row(new_run(tmp_path, "b"), KEY)])
    parquet = pq.ParquetFile(file)
    assert schema.file_version(parquet.schema_arrow.metadata, "file") == schema.SCHEMA_VERSION
    columns = [parquet.metadata.row_group(0).column(i) for i in range(parquet.metadata.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    encoded = {column.path_in_schema: "RLE_DICTIONARY" in column.encodings for column in columns}
    assert encoded["policy_version"] and encoded["completion_token_ids.list.element"]
    assert not encoded["rollout_id"] and not encoded["sampling_logprobs.list.element"]


def test_the_hash_tells_completions_apart_by_ids_and_order(tmp_path):
    run = new_run(tmp_path, "a")
    ids = [[1, 2, 3], [1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], []]
    rows = [
        rollout_row(run, KEY, i, completion_token_ids=t, sampling_logprobs=[-0.5] * len(t)) for i, t in enumerate(ids)
    ]
    store.append(run, "rollouts", KEY, rows)
    found = store.sql(
        "SELECT completion_hash, completion_length FROM rollouts ORDER BY seed", root=tmp_path
    ).to_pylist()
    hashes = [row["completion_hash"] for row in found]
    assert [row["completion_length"] for row in found] == [3, 3, 3, 2, 4, 0]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 5


@pytest.fixture
def newer(monkeypatch):
    """Call it to make the declaration one version newer, with a column ``colour`` more in rollouts and rewards."""

    def upgrade():
        added = schema.Column("colour", pa.string(), "new", nullable=True)
        for table in ("rollouts", "rewards"):
            monkeypatch.setitem(schema.TABLES, table, (*schema.TABLES[table], added))
        monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
        schema.arrow_schema.cache_clear()

    yield upgrade
    monkeypatch.undo()
    schema.arrow_schema.cache_clear()


def test_rows_of_an_older_version_are_read_merged_and_asked(tmp_path, newer):
    run = new_run(tmp_path, "a")
    record_step(run, 1, 1, [True, False, False, False])
    newer()
    record_step(run, 1, 2, [True, True, True, True], colour="red")
    asked = "SELECT step, colour, avg(correct) FROM rollouts JOIN rewards USING (rollout_id) GROUP BY ALL ORDER BY 1".replace(
        "colour", "rollouts.colour"
    )
    expected = [(1, None, 0.25), (2, "red", 1.0)]
    assert store.connect("a", root=tmp_path).sql(asked).fetchall() == expected
    assert store.read(run, "rollouts").column("colour").to_pylist() == [None] * 4 + ["red"] * 4
    finish_round(run, 1)
    store.compact(run, 1, grace=0.0)
    assert store.connect("a", root=tmp_path).sql(asked).fetchall() == expected
    assert store.read(run, "rollouts").column("colour").to_pylist() == [None] * 4 + ["red"] * 4


def test_a_file_of_a_newer_version_is_refused_with_the_way_out(tmp_path, newer):
    run = new_run(tmp_path, "a")
    record = schema.TABLES["rollouts"]
    newer()
    store.append(run, "rollouts", KEY, [rollout_row(run, KEY, colour="red")])
    schema.TABLES["rollouts"] = record
    schema.SCHEMA_VERSION = 1
    schema.arrow_schema.cache_clear()
    with pytest.raises(ValueError, match=r"schema version 2, this grpoflow reads up to 1: upgrade"):
        store.read(run, "rollouts", KEY)


def test_a_file_that_is_not_of_the_store_is_refused(tmp_path):
    run = new_run(tmp_path, "a")
    target = run.table_part("rollouts", KEY)
    target.parent.mkdir(parents=True)
    pq.write_table(pa.table({"rollout_id": ["x"]}), target)
    with pytest.raises(ValueError, match="says no schema version"):
        store.read(run, "rollouts", KEY)
