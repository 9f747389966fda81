"""Local files: every kind reads the same rows, every broken file is one line that names the place."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.readers import find_files, read_rows

ROWS = [{"problem": 'a "b", c\nd', "answer": "1"}, {"problem": "ünï", "answer": "2"}]


def rows_in(path):
    return [row for _, row in read_rows(str(path))]


@pytest.fixture
def files(tmp_path):
    """One file of each kind with the same rows."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "c.csv").write_text('\ufeffproblem,answer\n"a ""b"", c\nd",1\nünï,2\n', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "b.json", "c.csv", "d.parquet"])
def test_every_kind_gives_the_same_rows(files, name):
    assert rows_in(files / name) == ROWS


def test_folders_and_globs_read_files_in_the_order_of_their_names(files):
    assert rows_in(files) == ROWS * 4
    assert rows_in(files / "*.json*") == ROWS * 2
    assert [file.name for file in find_files(str(files))] == ["a.jsonl", "b.json", "c.csv", "d.parquet"]


def test_a_row_knows_its_line(files):
    # A blank line follows each row, so the rows stand on lines 1 and 3.
    assert [where.rpartition(":")[2] for where, _ in read_rows(str(files / "a.jsonl"))] == ["1", "3"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"", r"x\.jsonl: has no rows"),
        ("x.json", b" ", r"x\.json: has no rows"),
        ("x.csv", b"problem,answer\n", r"x\.csv: has no rows"),
        ("x.jsonl", b'{"a": 1}\n{"a": \n', r"x\.jsonl:2: not valid JSON \(.* at column \d+\)"),
        ("x.jsonl", b"[1]\n", r"x\.jsonl:1: expected a JSON object with one value a column, got list"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"x\.jsonl:2: not UTF-8 \(byte 0xff at 7\)"),
        ("x.jsonl", b"[" * 200_000 + b"\n", r"x\.jsonl:1: JSON nested too deeply"),
        ("x.json", b'[{"a": 1},\n{"a" 2}]', r"x\.json:2: not valid JSON .* must end in \.jsonl"),
        ("x.json", b'{"a": 1}', r"x\.json: expected a JSON array of objects, got dict"),
        ("x.json", b"[" * 200_000, r"x\.json: JSON nested too deeply"),
        ("x.csv", b"a,b\n1\n", r"x\.csv:2: expected 2 fields as in the header"),
        ("x.csv", b"a,b\n1,2,3\n", r"x\.csv:2: expected 2 fields as in the header"),
        ("x.csv", b'a,b\n"1,2\n', r"x\.csv:1: not valid CSV"),
        ("x.csv", b"a,b\n\xe9,1\n", r"x\.csv:2: not UTF-8"),
        ("x.parquet", b"PAR1 no", r"x\.parquet: not a readable Parquet file"),
        ("x.txt", b"hello", r"x\.txt: unknown kind of file '\.txt'; expected one of \.jsonl"),
    ],
)
def test_a_broken_file_is_one_line_with_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        rows_in(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\*\.csv: no such file, or no file matches"):
        rows_in(tmp_path / "nowhere*.csv")


def test_a_text_of_ten_megabytes_is_read(tmp_path):
    text = "\\frac{" * 1_700_000
    (tmp_path / "x.csv").write_text(f"problem\n{text}\n")
    assert rows_in(tmp_path / "x.csv") == [{"problem": text}]
