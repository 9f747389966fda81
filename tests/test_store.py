"""Appends, reads, lineage and merging: no row twice, none lost, none changed."""

import json
import os
import shutil
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import store
from pipeline.rows import update_row
from pipeline.rundir import write_result
from pipeline.schema import TABLES, arrow_schema
from pipeline.tablefiles import live_files
from pipeline.types import Rollout, StageResult
from tests.store_rows import (
    credit_step,
    finish_round,
    ids_of,
    judge_step,
    new_run,
    problem_row,
    record_step,
    reward_row,
    rollout_row,
)

KEY = "round-01/step-0001/rollout"


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path, "a")


def test_what_was_appended_is_read_back_exactly(run):
    rows = [rollout_row(run, KEY, i) for i in range(3)]
    store.append(run, "rollouts", KEY, rows)
    assert store.read(run, "rollouts", KEY).to_pylist() == rows


def test_dataclasses_and_arrow_tables_are_rows_too(run):
    row = rollout_row(run, KEY)
    store.append(run, "rollouts", KEY, [Rollout(**row)])
    store.append(run, "rollouts", "other", pa.Table.from_pylist([row], schema=arrow_schema("rollouts")))
    assert store.read(run, "rollouts", KEY) == store.read(run, "rollouts", "other")


def test_unscored_rewards_stay_empty_and_components_come_back_as_a_map(run):
    store.append(run, "rewards", KEY, [reward_row("x", None), reward_row("y", True, components={"length": -0.5})])
    first, second = store.read(run, "rewards", KEY).to_pylist()
    assert (first["reward"], first["correct"], first["status"]) == (None, None, "timeout")
    assert dict(first["components"]) == {"accuracy": None, "format": 1.0, "length": None}
    assert dict(second["components"]) == {"accuracy": None, "format": None, "length": -0.5}


def test_parts_are_read_in_order_and_missing_ones_are_known(run):
    for part in (2, 0, 100_001):
        store.append(run, "rollouts", KEY, [rollout_row(run, KEY, part)], part=part)
    assert store.parts(run, "rollouts", KEY) == [0, 2, 100_001]
    assert [r["seed"] for r in store.read(run, "rollouts", KEY).to_pylist()] == [0, 2, 100_001]
    assert store.has(run, "rollouts", KEY) and store.has(run, "rollouts", KEY, 2)
    assert not store.has(run, "rollouts", KEY, 1) and not store.has(run, "rollouts", "round-01/step-0001/rollou")


def test_the_same_rows_again_change_nothing_and_others_are_refused(run):
    file = store.append(run, "rewards", KEY, [reward_row("x", True)])
    before = (file.read_bytes(), file.stat().st_mtime_ns)
    store.append(run, "rewards", KEY, [reward_row("x", True)])
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    with pytest.raises(FileExistsError, match="never changed"):
        store.append(run, "rewards", KEY, [reward_row("x", False)])
    assert file.read_bytes() == before[0]


def test_not_a_number_equals_itself_when_rows_are_appended_again(run):
    rows = [update_row("a", KEY, 1, 1, {"loss": float("nan")})]
    store.append(run, "updates", KEY, rows)
    store.append(run, "updates", KEY, rows)
    assert np.isnan(store.read(run, "updates", KEY).to_pylist()[0]["loss"])


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("rollouts", {"colour": 1}, "no column colour is declared"),
        ("rollouts", {"seed": None}, "column seed has 1 empty"),
        ("rollouts", {"seed": "seven"}, "column seed must be int64"),
        ("rollouts", {"text": {"a": 1}}, "column text must be string"),
        ("rollouts", {"purpose": "evaluate"}, "purpose 'evaluate' has a round"),
        ("rollouts", {"purpose": "training"}, "purpose 'training' is unknown; expected one of train"),
        ("rollouts", {"finish_reason": "eos"}, "finish_reason 'eos' is unknown; expected one of stop, length"),
        ("rollouts", {"sampling_logprobs": [-0.5]}, "row 0 has 3 completion tokens and 1 sampling_logprobs"),
        ("rollouts", {"completion_token_ids": [1, 2, 2**40]}, "column completion_token_ids must be list"),
    ],
)
def test_a_row_that_is_wrong_names_its_column(run, table, change, message):
    with pytest.raises(ValueError, match=message):
        store.append(run, table, KEY, [rollout_row(run, KEY) | change])
    assert not list(run.directory.rglob("*.parquet"))


def test_a_missing_column_and_an_unknown_table_are_named(run):
    row = rollout_row(run, KEY)
    del row["seed"]
    with pytest.raises(ValueError, match="column seed is missing"):
        store.append(run, "rollouts", KEY, [row])
    with pytest.raises(ValueError, match=r"'rollout' is unknown; expected one of problems, rollouts"):
        store.append(run, "rollout", KEY, [row])


def test_a_rollout_is_judged_once_in_a_stage(run):
    with pytest.raises(ValueError, match="occurs twice"):
        store.append(run, "rewards", KEY, [reward_row("x", True), reward_row("x", False)])


def test_an_unscored_status_has_no_verdict(run):
    with pytest.raises(ValueError, match="unscored status"):
        store.append(run, "rewards", KEY, [reward_row("x", False) | {"status": "timeout"}])


def test_a_component_whose_column_is_taken_or_differs_by_case_is_refused(run):
    with pytest.raises(ValueError, match="'a b'"):
        store.append(run, "rewards", KEY, [reward_row("x", True, components={"a b": 1.0})])
    store.append(run, "rewards", KEY, [reward_row("x", True, components={"Short": 1.0})])
    with pytest.raises(ValueError, match=r"'short'.*'Short'"):
        store.append(run, "rewards", "other", [reward_row("y", True, components={"short": 1.0})])
    other = new_run(run.root, "b")
    store.append(other, "rewards", KEY, [reward_row("z", True, components={"short": 1.0})])
    assert store.connect("b", root=run.root).sql("SELECT reward_short FROM rewards").fetchall() == [(1.0,)]
    with pytest.raises(ValueError, match="'Short' and 'short' of different runs"):
        store.connect(root=run.root)


def test_metrics_without_a_column_go_into_extra(run):
    row = update_row("a", "sft", None, 3, {"loss": np.float32(0.5), "minibatch": 2, "colour": 7, "kl": None})
    assert (row["loss"], row["minibatch"], row["extra"], row["kl"]) == (0.5, 2, {"colour": 7.0}, None)
    store.append(run, "updates", "sft", [row])
    read = store.read(run, "updates", "sft").to_pylist()[0]
    assert (read["step"], read["round"], read["epoch"], dict(read["extra"])) == (3, None, None, {"colour": 7.0})
    with pytest.raises(ValueError, match="loss must be a number, got str 'low'"):
        update_row("a", "sft", None, 1, {"loss": "low"})
    with pytest.raises(ValueError, match="'step' is given by the caller"):
        update_row("a", "sft", None, 1, {"step": 1.0})


def test_half_written_files_are_not_seen(run, tmp_path):
    file = store.append(run, "rollouts", KEY, [rollout_row(run, KEY)])
    (file.parent / f".{file.name}.7.partial").write_bytes(file.read_bytes()[:100])
    (file.parent / ".rollout--00001.parquet").write_bytes(b"PAR1")
    assert store.parts(run, "rollouts", KEY) == [0]
    assert store.read(run, "rollouts").num_rows == 1
    assert (
        store.connect("a", root=tmp_path).sql("FROM rollouts").fetchall()
        == store.connect(root=tmp_path).sql("FROM rollouts").fetchall()
    )


def test_a_write_that_fails_leaves_nothing(run, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.parquet.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.append(run, "rollouts", KEY, [rollout_row(run, KEY)])
    assert [p for p in run.table("rollouts").rglob("*") if p.is_file()] == []


def test_a_truncated_file_is_named(run):
    file = store.append(run, "rollouts", KEY, [rollout_row(run, KEY)])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rollout--00000.parquet: not a readable Parquet file.*--resume-from"):
        store.read(run, "rollouts", KEY)


# -- lineage ----------------------------------------------------------------------------------------------------------


def family(root):
    """A parent of two steps and a child that judged step 2 again."""
    parent = new_run(root, "a")
    record_step(parent, 1, 1, [True, False, False, False])
    ids = record_step(parent, 1, 2, [True, True, False, False])
    inherited = [f"round-01/step-0001/{s}" for s in ("rollout", "reward", "update")] + ["round-01/step-0002/rollout"]
    child = new_run(root, "a-r1", parent="a", resume_from="round-01/step-0002/reward", inherited=inherited)
    judge_step(child, 1, 2, ids, [True, True, True, True])
    credit_step(child, 1, 2, ids)
    return parent, child


PASS_RATES = "SELECT step, avg(correct), count(*) FROM rollouts JOIN rewards USING (rollout_id) GROUP BY 1 ORDER BY 1"


@pytest.mark.parametrize("merged", [False, True])
def test_a_child_sees_what_it_inherited_and_its_own(tmp_path, merged):
    parent, child = family(tmp_path)
    if merged:
        finish_round(parent, 1)
        store.compact(parent, 1, grace=0.0)
    assert store.read(child, "rollouts").num_rows == 8
    assert store.read(child, "rewards", "round-01/step-0002/reward").column("correct").to_pylist() == [True] * 4
    asked = {run: store.connect(run, root=tmp_path).sql(PASS_RATES).fetchall() for run in ("a", "a-r1", None)}
    assert asked["a"] == [(1, 0.25, 4), (2, 0.5, 4)]
    assert asked["a-r1"] == [(1, 0.25, 4), (2, 1.0, 4)]
    # Over all runs each rollout counts once, by its first verdict.
    assert asked[None] == asked["a"]
    scored = "SELECT step, avg(correct), count(*), count(advantage) FROM scored GROUP BY 1 ORDER BY 1"
    assert store.connect("a-r1", root=tmp_path).sql(scored).fetchall() == [(1, 0.25, 4, 4), (2, 1.0, 4, 4)]
    assert store.connect(root=tmp_path).sql(scored).fetchall() == [(1, 0.25, 4, 4), (2, 0.5, 4, 4)]
    updates = "SELECT run_id, step FROM updates ORDER BY ALL"
    assert store.connect("a-r1", root=tmp_path).sql(updates).fetchall() == [("a", 1), ("a-r1", 2)]


def test_a_child_that_merged_its_round_is_still_left_out_over_all_runs(tmp_path):
    _parent, child = family(tmp_path)
    record_step(child, 1, 3, [False, False, False, False])
    finish_round(child, 1)
    store.compact(child, 1, grace=0.0)
    assert store.connect("a-r1", root=tmp_path).sql(PASS_RATES).fetchall() == [(1, 0.25, 4), (2, 1.0, 4), (3, 0.0, 4)]
    assert store.connect(root=tmp_path).sql(PASS_RATES).fetchall() == [(1, 0.25, 4), (2, 0.5, 4), (3, 0.0, 4)]
    scored = "SELECT step, avg(correct), count(*) FROM scored GROUP BY 1 ORDER BY 1"
    assert store.connect(root=tmp_path).sql(scored).fetchall() == [(1, 0.25, 4), (2, 0.5, 4), (3, 0.0, 4)]


def test_a_verdict_that_only_the_child_gave_counts_over_all_runs(tmp_path):
    parent = new_run(tmp_path, "a")
    key = "round-01/step-0001/rollout"
    rows = [rollout_row(parent, key, i) for i in range(4)]
    store.append(parent, "rollouts", key, rows)
    for name in ("a-r1", "a-r2"):
        child = new_run(tmp_path, name, parent="a", resume_from="round-01/step-0001/reward", inherited=[key])
        judge_step(child, 1, 1, [row["rollout_id"] for row in rows], [name == "a-r1"] * 4)
    assert store.connect(root=tmp_path).sql(PASS_RATES).fetchall() == [(1, 1.0, 4)]
    assert store.connect("a-r2", root=tmp_path).sql(PASS_RATES).fetchall() == [(1, 0.0, 4)]


def test_a_child_whose_parent_is_gone_says_so_and_the_other_runs_can_still_be_asked(tmp_path):
    parent, _ = family(tmp_path)
    shutil.rmtree(parent.directory)
    with pytest.raises(FileNotFoundError, match="'a-r1' goes on from run 'a'"):
        store.connect("a-r1", root=tmp_path)
    assert store.connect(root=tmp_path).sql("SELECT count(*) FROM rewards").fetchall() == [(4,)]


def test_a_grandchild_reads_each_stage_from_where_it_was_done(tmp_path):
    parent, _child = family(tmp_path)
    keys = [f"round-01/step-{n:04d}/{s}" for n in (1, 2) for s in ("rollout", "reward", "update")]
    grandchild = new_run(tmp_path, "a-r1-r1", parent="a-r1", resume_from="round-01/step-0003/rollout", inherited=keys)
    record_step(grandchild, 1, 3, [True] * 4)
    assert store.connect("a-r1-r1", root=tmp_path).sql(PASS_RATES).fetchall() == [
        (1, 0.25, 4),
        (2, 1.0, 4),
        (3, 1.0, 4),
    ]
    assert store.read(grandchild, "rewards").num_rows == 12
    write_result(parent, StageResult("round-01/refresh"))
    stages = store.connect("a-r1-r1", root=tmp_path).sql("SELECT stage, run_id FROM stages ORDER BY 1").fetchall()
    # Of the parent step 1 and the rollouts of step 2; the child wrote no results; of its own step 3.
    assert stages == [(key, "a") for key in sorted(keys[:4])] + [
        (f"round-01/step-0003/{s}", "a-r1-r1") for s in ("reward", "rollout", "update")
    ]


def test_problems_of_several_runs_are_one_row_each_over_all_runs(tmp_path):
    for name in ("a", "b"):
        store.append(new_run(tmp_path, name), "problems", "select", [problem_row("p0"), problem_row("p1")])
    asked = "SELECT problem_id, problem FROM problems ORDER BY 1"
    assert store.connect(root=tmp_path).sql(asked).fetchall() == [("p0", "What is p0?"), ("p1", "What is p1?")]


# -- merging ----------------------------------------------------------------------------------------------------------


def everything(run, tmp_path):
    """All rows by both readers: the views of one run and of all, and ``read``."""
    one, all_runs = store.connect("a", root=tmp_path), store.connect(root=tmp_path)
    rows = {}
    for table in (*TABLES, "groups", "scored"):
        key = "ALL"
        rows[table] = one.sql(f"FROM {table} ORDER BY {key}").fetchall()
        assert rows[table] == all_runs.sql(f"FROM {table} ORDER BY {key}").fetchall()
    return rows, {table: store.read(run, table).to_pylist() for table in TABLES}


def test_merging_changes_no_answer(run, tmp_path):
    store.append(run, "problems", "select", [problem_row("p0")])
    for step in (1, 2, 3):
        record_step(run, 1, step, [True, False, None, False])
    store.append(run, "rewards", "reject", [reward_row("r", True, components={"length": 0.5})])
    record_step(run, 2, 1, [True, True, False, False])
    finish_round(run, 1)
    before = everything(run, tmp_path)
    files = len(live_files(run.table("rollouts")))
    written = store.compact(run, 1, grace=3600.0)
    assert len(written) == 5  # rollouts, rewards, advantages, updates, and scored
    assert (files, len(live_files(run.table("rollouts")))) == (4, 2)
    assert everything(run, tmp_path) == before
    assert store.compact(run, 1, grace=0.0) == []  # again: nothing to merge, the small files go
    assert sorted(p.name for p in run.table("rollouts").iterdir()) == ["round-01--merged.parquet", "round-02"]
    assert everything(run, tmp_path) == before


def test_a_merged_part_is_still_known_and_takes_no_other_rows(run):
    record_step(run, 1, 1, [True] * 4)
    record_step(run, 1, 2, [True] * 4)
    finish_round(run, 1)
    store.compact(run, 1, grace=0.0)
    key = "round-01/step-0002/rollout"
    assert store.parts(run, "rollouts", key) == [0]
    rows = [rollout_row(run, key, i, step=2) for i in range(4)]
    assert store.read(run, "rollouts", key).to_pylist() == rows
    store.append(run, "rollouts", key, rows)
    with pytest.raises(FileExistsError, match="never changed"):
        store.append(run, "rollouts", key, rows[:3])
    with pytest.raises(FileExistsError, match="merged, part 1"):
        store.append(run, "rollouts", key, rows, part=1)


def test_only_a_finished_round_is_merged(run):
    record_step(run, 1, 1, [True] * 4)
    with pytest.raises(ValueError, match="before its stage round-01/refresh is complete"):
        store.compact(run, 1)


def test_stages_outside_rounds_are_merged_when_they_are_finished(run, tmp_path):
    for key in ("evaluate/warm-start", "reject"):
        for part in range(3):
            row = rollout_row(
                run, key, part, purpose="reject" if key == "reject" else "evaluate", round=None, step=None
            )
            store.append(run, "rollouts", key, [row], part=part)
    store.append(run, "rewards", "reject", [reward_row(f"a:reject:{i}", i == 1) for i in range(3)])
    write_result(run, StageResult("reject"))
    before = everything(run, tmp_path)
    assert [path.name for path in store.compact(run, grace=0.0)] == ["reject--merged.parquet", "reject--merged.parquet"]
    assert everything(run, tmp_path) == before
    assert len(live_files(run.table("rollouts"))) == 4  # three of the evaluation, which is not finished


def test_rewards_with_different_components_merge_into_one_file(run, tmp_path):
    ids = record_step(run, 1, 1, [True, False, False, False])
    more = [rollout_row(run, "round-01/step-0002/rollout", i, step=2) for i in range(4)]
    store.append(run, "rollouts", "round-01/step-0002/rollout", more)
    judge_step(run, 1, 2, [r["rollout_id"] for r in more], [True] * 4, components={"length": 0.25})
    finish_round(run, 1)
    store.compact(run, 1, grace=0.0)
    asked = "SELECT avg(reward_format), avg(reward_length), count(*) FROM {} WHERE rollout_id IN (SELECT unnest($ids))"
    connection = store.connect("a", root=tmp_path)
    for view in ("rewards", "scored"):
        assert connection.execute(asked.format(view), {"ids": ids}).fetchall() == [(1.0, None, 4)]
    assert dict(store.read(run, "rewards", "round-01/step-0002/reward").to_pylist()[0]["components"])["length"] == 0.25


def test_a_reader_never_sees_a_row_twice_or_not_at_all_while_rounds_are_merged(run, tmp_path):
    ids = []
    for round_ in (1, 2, 3, 4):
        for step in (1, 2, 3):
            ids += record_step(run, round_, step, [True, False, True, False])
        finish_round(run, round_)
    wanted, wrong, done = sorted(ids), [], threading.Event()

    def watch():
        while not done.is_set():
            for view in ("rollouts", "scored"):
                found = ids_of(store.connect(root=tmp_path).sql(f"SELECT rollout_id FROM {view}").fetchall())
                wrong.extend([found] * (found != wanted))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for round_ in (1, 2, 3, 4):
        store.compact(run, round_, grace=60.0)
    done.set()
    watcher.join()
    assert not wrong


def test_a_snapshot_taken_before_merging_can_still_be_asked(run, tmp_path):
    for step in (1, 2):
        record_step(run, 1, step, [True] * 4)
    finish_round(run, 1)
    connection = store.connect("a", root=tmp_path)
    store.compact(run, 1)
    assert connection.sql("SELECT count(*) FROM rollouts").fetchall() == [(8,)]


def test_a_crash_while_merging_changes_nothing(run, tmp_path, monkeypatch):
    for step in (1, 2):
        record_step(run, 1, step, [True, False, False, False])
    finish_round(run, 1)
    before = everything(run, tmp_path)
    real, calls = os.replace, []

    def dying(*names):
        calls.append(names)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*names)

    monkeypatch.setattr("pipeline.parquet.os.replace", dying)
    with pytest.raises(KeyboardInterrupt):
        store.compact(run, 1, grace=0.0)
    assert everything(run, tmp_path) == before
    monkeypatch.undo()
    store.compact(run, 1, grace=0.0)
    assert everything(run, tmp_path) == before


def test_one_stage_is_read_from_a_merged_file_of_many_row_groups(run, monkeypatch):
    monkeypatch.setattr("pipeline.parquet.ROW_GROUP", 3)
    for step in (1, 2, 3):
        record_step(run, 1, step, [True, False, True, False])
    finish_round(run, 1)
    (merged, *_) = store.compact(run, 1, grace=0.0)
    assert pq.ParquetFile(merged).num_row_groups >= 4
    for step in (1, 2, 3):
        key = f"round-01/step-{step:04d}/rollout"
        rows = store.read(run, "rollouts", key, ["rollout_id", "step"]).to_pylist()
        assert rows == [{"rollout_id": f"a:{key}:{i}", "step": step} for i in range(4)]


def test_a_damaged_header_is_named_and_the_other_runs_can_still_be_asked(tmp_path, caplog):
    for run_id in ("a", "b"):
        run = new_run(tmp_path, run_id)
        record_step(run, 1, 1, [True] * 4)
        write_result(run, StageResult("round-01/step-0001/rollout", seconds=1.0))
    run.recipe_file.write_text("{")
    with pytest.raises(ValueError, match=r"b/recipe.json: is damaged"):
        store.connect("b", root=tmp_path)
    asked = store.connect(root=tmp_path)
    for view in ("runs", "rollouts", "stages"):
        assert asked.sql(f"SELECT DISTINCT run_id FROM {view}").fetchall() == [("a",)]
    assert [line for line in caplog.text.splitlines() if "left out" in line and "b/recipe.json: is damaged" in line]


def test_a_damaged_result_is_named(tmp_path):
    run = new_run(tmp_path, "a")
    write_result(run, StageResult("select", seconds=1.0))
    run.result_file("select").write_text('{"key": "sel')
    with pytest.raises(ValueError, match=r"stages/select/result.json: is damaged; delete it"):
        store.sql("SELECT * FROM stages", "a", root=tmp_path)


def test_rows_of_runs_are_told_apart(tmp_path):
    record_step(new_run(tmp_path, "a"), 1, 1, [True] * 4)
    record_step(new_run(tmp_path, "b", created_at=json.loads('"2026-01-02T00:00:00+00:00"')), 1, 1, [False] * 4)
    asked = "SELECT run_id, avg(correct) FROM scored GROUP BY 1 ORDER BY 1"
    assert store.connect(root=tmp_path).sql(asked).fetchall() == [("a", 1.0), ("b", 0.0)]
    assert store.connect("b", root=tmp_path).sql(asked).fetchall() == [("b", 0.0)]
    with pytest.raises(FileNotFoundError, match="run 'c' is not in"):
        store.connect("c", root=tmp_path)
