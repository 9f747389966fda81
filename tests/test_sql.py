"""grpoflow sql: what may be asked, in which forms the answer comes, and every named query."""

import csv
import io
import json

import pyarrow.parquet as pq
import pytest

from pipeline import store
from pipeline.ask import answer, asked
from pipeline.lineage import Lineage
from pipeline.queries import QUERIES, named_sql
from pipeline.rundir import write_result
from pipeline.types import StageResult
from tests.store_rows import finish_round, new_run, problem_row, reward_row, rollout_row


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Run a: two rounds on p0 and p1. p0 goes from 1/4 to 3/4 correct, p1 from 2/4 to 1/4 while its reward rises."""
    root = tmp_path_factory.mktemp("store") / "runs"
    run = new_run(root, "a", created_at="2026-01-01T00:00:00+00:00")
    store.append(run, "problems", "select", [problem_row("p0", level=1), problem_row("p1", level=2)])
    record(run, 1, [True, False, False, False, True, True, False, False], [1, 0, 0, 0, 1, 1, 0, 0])
    finish_round(run, 1)
    store.compact(run, 1)
    record(run, 2, [True, True, True, False, True, False, False, None], [1, 1, 1, 0, 1, 1, 1, None])
    row = {
        "run_id": "a", "stage": "evaluate/final", "checkpoint": "final", "benchmark": "hand", "metric": "pass@k", "k": 1,
        "slice": "all", "value": 0.5, "low": 0.25, "high": 0.75, "n_problems": 2, "n_samples": 4, "temperature": 1.0,
        "method": "unbiased",
    }  # fmt: skip
    store.append(run, "evaluations", "evaluate/final", [row])
    return root


def record(run, round_, verdicts, rewards):
    key = f"round-{round_:02d}/step-0001"
    rows = [rollout_row(run, f"{key}/rollout", i, round=round_, sample_index=i % 4) for i in range(8)]
    rows[1]["completion_token_ids"] = rows[0]["completion_token_ids"]  # twins
    rows[7]["finish_reason"] = "length"
    store.append(run, "rollouts", f"{key}/rollout", rows)
    judged = [
        reward_row(row["rollout_id"], verdict, reward=reward, components={"accuracy": verdict, "reward_model": 0.75})
        for row, verdict, reward in zip(rows, verdicts, rewards, strict=True)
    ]
    store.append(run, "rewards", f"{key}/reward", judged)
    from tests.store_rows import credit_step

    credit_step(run, round_, 1, [row["rollout_id"] for row in rows])
    for stage in ("rollout", "reward", "update"):
        write_result(run, StageResult(f"{key}/{stage}", seconds=2.0))


def named(root, name):
    return store.sql(named_sql(name, Lineage(root, None).components()), root=root).to_pylist()


def test_a_share_is_an_average_on_one_run_and_on_all(root):
    text = "SELECT round, avg(correct) FROM rollouts JOIN rewards USING (rollout_id) GROUP BY 1 ORDER BY 1"
    # Round 1: 3 of 8. Round 2: 4 of the 7 that are scored.
    for run in ("a", None):
        assert [tuple(row.values()) for row in store.sql(text, run, root=root).to_pylist()] == [(1, 3 / 8), (2, 4 / 7)]


@pytest.mark.parametrize("name", QUERIES)
def test_every_named_query_has_rows(root, name):
    expected_empty = {"never_solved", "events"}  # both problems were solved, and no guard saw anything
    assert (named(root, name) == []) == (name in expected_empty)


def test_rounds_counts_by_hand(root):
    first, second = named(root, "rounds")
    assert (first["rollouts"], first["pass_rate"], first["unscored"]) == (8, 3 / 8, 0)
    assert (second["pass_rate"], second["reward"], second["unscored"]) == (4 / 7, 6 / 7, 1)
    assert (second["truncated_share"], second["mean_tokens"]) == (1 / 8, 3.0)


def test_learnt_and_forgotten_problems(root):
    found = [(row["problem_id"], row["before"], row["after"], row["what"]) for row in named(root, "learnt_forgotten")]
    # p1 in round 2: one of the three that are scored.
    assert found == [("p0", 0.25, 0.75, "learnt"), ("p1", 0.5, 1 / 3, "forgotten")]


def test_reward_hacking_suspects_are_where_reward_rose_and_correctness_fell(root):
    (row,) = named(root, "hacking_suspects")
    # Reward of p1: 2/4 in round 1, 3/3 in round 2.
    assert (row["problem_id"], row["round"], row["reward_change"], row["pass_rate_change"]) == (
        "p1",
        2,
        0.5,
        1 / 3 - 0.5,
    )


def test_duplicates_are_counted_in_their_group(root):
    row = named(root, "duplicates")[0]
    # Two groups of four; completions 0 and 1 are twins: 7 distinct of 8, 3.5 a group.
    assert (row["groups"], row["completions"], row["duplicate_share"], row["distinct_in_group"]) == (2, 8, 1 / 8, 3.5)


def test_components_against_correctness(root):
    rows = {row["component"]: row for row in named(root, "components")}
    assert rows["accuracy"]["mean_correct"] == 1.0 and rows["accuracy"]["mean_wrong"] == 0.0
    assert rows["accuracy"]["correlation"] == pytest.approx(1.0)
    assert rows["reward_model"]["scored"] == 16


def test_cost_per_solved_problem(root):
    row = named(root, "cost")[0]
    # Round 1: 8 x 3 tokens, 2 problems solved, 3 correct.
    assert (row["tokens"], row["solved"], row["tokens_per_solved"], row["tokens_per_correct"]) == (24, 2, 12.0, 8.0)


def test_seconds_and_tokens_by_kind_of_stage(root):
    rows = {row["kind"]: row for row in named(root, "stages")}
    assert (rows["rollout"]["stages"], rows["rollout"]["seconds"], rows["rollout"]["tokens"]) == (2, 4.0, 48)
    assert rows["update"]["tokens"] is None


def test_truncation_by_level(root):
    found = [(row["level"], row["round"], row["truncated_share"]) for row in named(root, "truncated")]
    assert found == [(1, 1, 0.0), (1, 2, 0.0), (2, 1, 0.25), (2, 2, 0.25)]


def test_groups_say_what_their_completions_got(root):
    columns = "problem_id, completions, scored, correct, reward_mean, zero_variance, truncated"
    text = f"SELECT {columns} FROM groups ORDER BY round, 1"
    rows = [tuple(row.values()) for row in store.sql(text, "a", root=root).to_pylist()]
    assert rows == [
        ("p0", 4, 4, 1, 0.25, 0, 0),
        ("p1", 4, 4, 2, 0.5, 0, 1),
        ("p0", 4, 4, 3, 0.75, 0, 0),
        ("p1", 4, 3, 1, 1.0, 1, 1),
    ]


def test_a_query_that_needs_a_reward_model_says_so(tmp_path):
    new_run(tmp_path, "a")
    with pytest.raises(ValueError, match="no rollout was scored by a reward model"):
        answer(None, "a", tmp_path, named="reward_model")
    with pytest.raises(ValueError, match="'round' is unknown; expected one of rounds"):
        answer(None, "a", tmp_path, named="round")


# -- only reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "DROP VIEW rollouts", "DELETE FROM runs", "INSERT INTO runs SELECT * FROM runs", "UPDATE runs SET run_id = 'b'",
        "CREATE TABLE t AS SELECT 1", "ALTER TABLE runs ADD COLUMN x INT", "SET memory_limit = '99GB'", "RESET threads",
        "INSTALL httpfs", "LOAD httpfs", "ATTACH 'other.db'", "PRAGMA version", "CALL pragma_version()", "CHECKPOINT",
        "COPY (SELECT 1) TO 'out.csv'", "EXPLAIN ANALYZE COPY (SELECT 1) TO 'out.csv'",
        "/* x */ EXPLAIN ANALYZE DROP TABLE runs",
        "WITH x AS (INSERT INTO runs SELECT * FROM runs RETURNING *) SELECT * FROM x",
        "EXPLAIN ANALYZE WITH x AS (DELETE FROM runs RETURNING *) SELECT * FROM x",
        "SELECT * FROM (WITH x AS (UPDATE runs SET run_id = 'b' RETURNING *) SELECT * FROM x)",
        "SET VARIABLE files_rollouts_0 = ['/etc/passwd']", "EXPORT DATABASE 'x'", "PREPARE p AS SELECT 1", "EXECUTE p",
        "SELECT 1; SELECT 2", "", "-- nothing", "BEGIN", "USE memory",
    ],
)  # fmt: skip
def test_what_is_not_one_reading_statement_is_refused(root, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(ValueError):  # noqa: PT011 - the words differ, the next test reads some
        store.sql(text, root=root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM read_text('{}')", "SELECT * FROM read_csv('{}')", "SELECT * FROM read_blob('{}')", "FROM '{}'",
        "SELECT * FROM read_parquet('{}')", "SELECT * FROM glob('/etc/*')", "SELECT * FROM sniff_csv('{}')",
        "SELECT * FROM parquet_metadata('{}')", "SELECT * FROM read_json('{}')", "SELECT * FROM read_text('../secret.txt')",
        "SELECT * FROM read_text('{root}/../secret.txt')", "SELECT * FROM read_text('http://127.0.0.1/x')",
        "SELECT * FROM duckdb_secrets()", "SELECT getenv('HOME')",
    ],
)  # fmt: skip
def test_nothing_outside_the_store_is_read(root, monkeypatch, text):
    secret = root.parent / "secret.txt"
    secret.write_text("a\n1\n")
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match=r"Permission Error|Catalog Error|IO Error"):
        store.sql(text.format(secret, root=root), root=root)


@pytest.mark.parametrize(
    "text",
    ["FROM runs", "VALUES (1)", "DESCRIBE rollouts", "SUMMARIZE SELECT reward FROM scored", "SHOW TABLES", "TABLE runs",
     "EXPLAIN SELECT 1", "explain analyze select count(*) from rewards", "WITH x AS (SELECT 1) SELECT * FROM x UNION SELECT 2",
     "PIVOT (SELECT round, status FROM scored) ON status IN ('correct') USING count(*)",
     "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 3) SELECT * FROM t", "SELECT 1;  -- done"],
)  # fmt: skip
def test_reading_statements_pass(root, text):
    assert store.sql(text, root=root).num_rows > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("DROP TABLE runs", "a statement of kind DROP is refused"),
        ("SELECT 1; SELECT 2", "expected one statement, got 2"),
        ("SELECT colour FROM rollouts", 'column "colour" not found.*--schema lists'),
        ("SELECT * FROM rollout", "rollout does not exist! Did you mean.*--schema lists"),
        ("SELEC 1", "Parser Error: syntax error"),
        ("SELECT error('late') FROM range(100000)", "late"),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(root, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        store.sql(text, root=root)
    assert "\n" not in str(caught.value)


def test_time_and_memory_are_bounded(root):
    with pytest.raises(TimeoutError, match=r"more than its limit of 0.3 s"):
        store.sql("SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b", root=root, seconds=0.3)
    with (
        pytest.raises(TimeoutError, match=r"more than its limit of 0.3 s"),
        asked("SELECT * FROM range(100000000000)", root=root, seconds=0.3) as rows,
    ):
        for _ in rows:
            pass
    with pytest.raises(MemoryError, match=r"more than its limit of 0.05 GiB"):
        store.sql("SELECT list(range) FROM range(100000000)", root=root, gib=0.05)
    with pytest.raises(ValueError, match="expected more than 0 GiB"):
        store.sql("SELECT 1", root=root, seconds=0)


# -- forms of an answer -----------------------------------------------------------------------------------------------

NESTED = (
    "SELECT rollout_id, prompt_token_ids, NULL AS nothing, 'nan'::DOUBLE AS number FROM rollouts ORDER BY 1 LIMIT 2"
)


def test_csv_json_and_json_lines_on_standard_output(root, capsys):
    first = "a:round-01/step-0001/rollout:0"
    answer(NESTED, None, root, format_="csv")
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[:2] == [["rollout_id", "prompt_token_ids", "nothing", "number"], [first, "[1, 2]", "", ""]]
    answer(NESTED, None, root, format_="json")
    expected = {"rollout_id": first, "prompt_token_ids": [1, 2], "nothing": None, "number": None}
    assert json.loads(capsys.readouterr().out)[0] == expected
    answer(NESTED, None, root, format_="jsonl")
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == expected
    answer("SELECT 1 AS x WHERE false", None, root, format_="json")
    assert json.loads(capsys.readouterr().out) == []


def test_a_table_for_people_says_when_it_is_not_all(root, capsys):
    answer("SELECT range AS n FROM range(1000)", None, root)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["n", "--", "0"] and len(lines) == 103
    assert lines[-1] == "(1000 rows, the first 100 shown: --format csv or --out FILE gives all)"


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "a.parquet"])
def test_a_file_takes_its_format_from_its_name_and_is_named_with_its_rows(root, tmp_path, capsys, name):
    file = tmp_path / name
    answer("SELECT run_id FROM runs", None, root, out=file)
    assert capsys.readouterr().out == f"{file}: 1 row\n"
    if name == "a.parquet":
        assert pq.read_table(file).to_pylist() == [{"run_id": "a"}]
    else:
        expected = {"a.csv": "run_id\na\n", "a.json": '[\n{"run_id": "a"}\n]\n', "a.jsonl": '{"run_id": "a"}\n'}
        assert file.read_text() == expected[name]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format_": "parquet"}, "name a file with --out"),
        ({"format_": "excel"}, "--format excel: expected one of table, csv"),
        ({"format_": "csv", "out": "x.parquet"}, "contradict"),
        ({"out": "nowhere/x.csv"}, "folder .* does not exist"),
        ({"out": "RUNS/a/x.csv"}, "inside the folder of runs"),
        ({"list_": True}, "expected one of: a QUERY, --named NAME, --list, --schema"),
    ],
)
def test_wrong_options_are_named(root, tmp_path, options, message):
    if "out" in options:
        options["out"] = root / "a" / "x.csv" if "RUNS" in options["out"] else tmp_path / options["out"]
    with pytest.raises(ValueError, match=message):
        answer("SELECT 1", None, root, **options)


def test_the_schema_documents_every_column_and_component(root, capsys):
    answer(None, None, root, schema=True)
    printed = capsys.readouterr().out
    connection = store.connect(root=root)
    views = [
        row[0]
        for row in connection.sql("SELECT DISTINCT table_name FROM duckdb_columns() WHERE NOT internal").fetchall()
    ]
    assert len(views) == 11
    for view in views:
        described = printed.split(f"\n{view}\n" if view != "problems" else "problems\n")[1].split("\n")
        for column in connection.sql(f"DESCRIBE {view}").fetchall():
            assert any(line.split()[:1] == [column[0]] and len(line.split()) > 2 for line in described), (
                view,
                column[0],
            )


def test_answers_go_to_pandas_arrow_and_hugging_face(root):
    datasets = pytest.importorskip("datasets")
    for view in ("rollouts", "rewards", "updates", "scored", "stages", "runs"):
        table = store.sql(f"FROM {view}", root=root)
        assert len(table.to_pandas()) == len(datasets.Dataset(table)) == table.num_rows > 0


def test_a_store_without_rows_answers_with_none(tmp_path):
    new_run(tmp_path, "a")
    for view in (
        "rollouts",
        "rewards",
        "advantages",
        "updates",
        "evaluations",
        "problems",
        "groups",
        "scored",
        "stages",
    ):
        assert store.sql(f"FROM {view}", root=tmp_path).num_rows == 0
    with pytest.raises(FileNotFoundError, match="no folder of runs"):
        store.sql("FROM runs", root=tmp_path / "nowhere")
