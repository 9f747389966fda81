"""SQL over the tables: a DuckDB connection whose views show one run, its lineage resolved, or all runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.rundir import RunPaths
from pipeline.schema import COMPONENT_PREFIX, STAGE_COLUMN, TABLES, columns, field_id
from pipeline.tablefiles import TableFiles, scan

if TYPE_CHECKING:
    import duckdb
