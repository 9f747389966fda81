"""Questions to the store: ``sql`` from Python, ``answer`` for ``grpoflow sql``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.guard import check_reading, limited
from pipeline.lineage import Lineage
from pipeline.queries import QUERIES, named_sql
from pipeline.remote import Remote, is_url, opened
from pipeline.results import write_result_rows
from pipeline.views import connect, view_columns

if TYPE_CHECKING:
    import pyarrow as pa

GIB, SECONDS = 4.0, 300.0
"""Memory and time that a question may take unless told otherwise."""


def sql(
    query: str, run: str | None = None, *, root: Path | str = "runs", gib: float = GIB, seconds: float = SECONDS
) -> pa.Table:
    """The rows of one reading statement over the views of a run (its ancestors' rows included), or of all runs.

    ``.to_pandas()`` gives a data frame, ``datasets.Dataset(table)`` a Hugging Face set. Raises ValueError for a
    statement that is wrong or would write, TimeoutError and MemoryError over the limits. ``root`` may be the URL of an
    object store, such as s3://bucket/runs.
    """
    with asked(query, run, root=root, gib=gib, seconds=seconds) as rows:
        return rows.read_all()


@contextmanager
def asked(
    query: str, run: str | None = None, *, root: Path | str = "runs", gib: float = GIB, seconds: float = SECONDS
) -> Iterator[pa.RecordBatchReader]:
    """As ``sql``, a batch of rows at a time; the limits hold until the block ends."""
    with opened_store(root, run) as (folder, remote), _asked(query, run, folder, remote, gib, seconds) as rows:
        yield rows


@contextmanager
def opened_store(root: Path | str, run: str | None) -> Iterator[tuple[Path, Remote | None]]:
    """The folder in which the lineage is found, and where its Parquet files are when that is an object store."""
    if not is_url(root):
        yield Path(root), None
        return
    with opened(str(root), run) as remote:
        yield remote.folder, remote


@contextmanager
def _asked(
    query: str, run: str | None, folder: Path, remote: Remote | None, gib: float, seconds: float
) -> Iterator[pa.RecordBatchReader]:
    connection = connect(run, root=folder, remote=remote)
    try:
        check_reading(connection, query)
        with limited(connection, gib, seconds):
            yield connection.sql(query).to_arrow_reader(10_000)
    finally:
        connection.close()


def answer(
    query: str | None,
    run: str | None,
    root: Path | str,
    *,
    format_: str = "table",
    out: Path | None = None,
    named: str | None = None,
    list_: bool = False,
    schema: bool = False,
    gib: float = GIB,
    seconds: float = SECONDS,
) -> None:
    """Print, or write to ``out``, the answer to exactly one of: a query, a named one, the list of these, the schema."""
    if [query is not None, named is not None, list_, schema].count(True) != 1:
        raise ValueError("expected one of: a QUERY, --named NAME, --list, --schema")
    if list_:
        for name, entry in QUERIES.items():
            print(f"{name:<18} {entry.about}")
        return
    if schema and not is_url(root) and not Path(root).is_dir():
        print_schema([])
        return
    with opened_store(root, run) as (folder, remote):
        components = Lineage(folder, run).components()
        if schema:
            print_schema(components)
            return
        text = query if query is not None else named_sql(str(named), components)
        with _asked(text, run, folder, remote, gib, seconds) as rows:
            count = write_result_rows(rows, format_, out, folder)
    if out is not None:
        print(f"{out}: {count:,} row{'' if count == 1 else 's'}")


def print_schema(components: list[str]) -> None:
    """Every view with its columns, their types and what they mean."""
    for view, columns in view_columns(components).items():
        print(view)
        for name, type_, meaning in columns:
            print(f"  {name:<26} {type_:<22} {meaning}")
