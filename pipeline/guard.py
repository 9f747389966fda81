"""What a question to the store may be: one statement that reads, within a memory and a time limit, of the store's files.

Files outside the store and extensions are refused by the connection itself (``pipeline.views``); here are the statements,
the limits, and the words in which DuckDB's errors reach people.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

READING_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "CTE_NODE", "RECURSIVE_CTE_NODE"}
LEADING_COMMENTS = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
EXPLAIN = re.compile(r"explain\s+(?:analyze\s+)?", re.IGNORECASE)


def check_reading(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Raise ValueError unless the text is one statement that only reads.

    SELECT, WITH, FROM, VALUES, SHOW, DESCRIBE, SUMMARIZE and EXPLAIN of these pass. DuckDB calls a SELECT with an INSERT
    inside WITH a SELECT, and runs what EXPLAIN ANALYZE is given: so the parsed statement is looked through as a whole.
    """
    import duckdb

    text = query[LEADING_COMMENTS.match(query).end() :]  # type: ignore[union-attr]  # it also matches nothing
    if explained := EXPLAIN.match(text):
        check_reading(connection, text[explained.end() :])
        return
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise ValueError(one_line(error)) from None
    if len(statements) != 1:
        raise ValueError(f"expected one statement, got {len(statements)}: ask them one at a time")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise ValueError(
            f"the store is only read: a statement of kind {statements[0].type.name} is refused; ask with SELECT, WITH, "
            "FROM, DESCRIBE, SUMMARIZE or EXPLAIN (a PIVOT needs its values: PIVOT … ON column IN (…))"
        )
    parsed = json.loads(connection.execute("SELECT json_serialize_sql($1)", [query]).fetchall()[0][0])
    if parsed["error"]:
        raise ValueError(f"the statement cannot be looked through ({parsed['error_message']}); ask with a plain SELECT")
    for node in sorted(set(_nodes(parsed)) - READING_NODES):
        word = node.removesuffix("_QUERY_NODE").removesuffix("_NODE")
        raise ValueError(f"the store is only read: {word} inside a SELECT is refused")


def _nodes(tree: Any) -> Iterator[str]:
    """The kind of every query node in a parsed statement."""
    if isinstance(tree, dict):
        kind = tree.get("type")
        if isinstance(kind, str) and kind.endswith("_NODE"):
            yield kind
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)


@contextmanager
def limited(connection: duckdb.DuckDBPyConnection, gib: float, seconds: float) -> Iterator[None]:
    """Bound memory and time of what runs inside; DuckDB's errors leave as ValueError, or TimeoutError and MemoryError.

    The connection's settings are locked from here on.
    """
    import duckdb

    if gib <= 0 or seconds <= 0:
        raise ValueError(f"limits: expected more than 0 GiB and 0 seconds, got {gib} and {seconds}")
    connection.execute(f"SET memory_limit = '{int(gib * 1024)}MiB'")
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET lock_configuration = true")
    late = threading.Event()

    def stop() -> None:
        late.set()
        connection.interrupt()

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        yield
    except (duckdb.Error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the file that the answer is written to
            raise
        # Rows are streamed: what fails after the first batch leaves Arrow as an OSError with DuckDB's message.
        if late.is_set():
            message = (
                f"the query took more than its limit of {seconds:g} s: ask one run, fewer columns, or raise the limit"
            )
            raise TimeoutError(message) from None
        if str(error).startswith("Out of Memory Error"):
            message = (
                f"the query needs more than its limit of {gib:g} GiB: choose fewer columns, aggregate, or add LIMIT"
            )
            raise MemoryError(message) from None
        raise ValueError(one_line(error)) from None
    finally:
        timer.cancel()


def one_line(error: Exception) -> str:
    """DuckDB's message without its drawing of the statement, on one line, with the way out."""
    message = re.split(r"\n\s*\nLINE \d+:|\nLINE \d+:", str(error))[0]
    if "Traceback (most recent call last)" in message:  # of a file system in Python: an object store's
        message = message.strip().splitlines()[-1]
    message = " ".join(message.split())
    if message.startswith("Permission Error"):
        return f"{message}; a query reads the views of the store and nothing outside it (grpoflow sql --schema)"
    if message.startswith(("Binder Error", "Catalog Error")):
        return f"{message}; grpoflow sql --schema lists views and columns"
    return message
