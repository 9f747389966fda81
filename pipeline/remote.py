"""A folder of runs in an object store, opened to questions: s3://, gs://, memory:// … through fsspec.

Names and small files (recipes, stage results) are copied into a temporary folder, where the lineage is worked out as for
any other; the Parquet files are read where they lie, by the ranges that a query needs. Training writes to real folders
only: an object store has neither renames nor locks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.lineage import Entry
from pipeline.tablefiles import MARKERS, MERGED

SCHEME = "runs"


@dataclass(frozen=True, slots=True)
class Remote:
    """``folder`` is the copy of names and small files; ``files`` is an fsspec file system that sees the runs alone."""

    folder: Path
    files: Any

    def url(self, path: str) -> str:
        """Where DuckDB reads the Parquet file that ``path`` in the copy stands for."""
        below = Path(path).relative_to(self.folder).as_posix()
        return f"{SCHEME}://{'' if below == '.' else below}"

    def located(self, entries: Sequence[Entry]) -> list[Entry]:
        """The same entries, with their files where they are read."""
        return [replace(e, file=replace(e.file, path=self.url(e.file.path))) for e in entries]


def is_url(root: Path | str) -> bool:
    """Whether a root names an object store and not a folder."""
    return "://" in str(root)


@contextmanager
def opened(url: str, run: str | None) -> Iterator[Remote]:
    """The runs below a URL (or one run with its ancestors), as they are now; credentials are the environment's.

    ValueError for a URL that cannot be opened, FileNotFoundError where there is no run.
    """
    files = _file_system(url)
    with tempfile.TemporaryDirectory(prefix="grpoflow-") as name:
        folder = Path(name).resolve()
        try:
            _copy(files, run, folder)
        except PermissionError as error:
            raise ValueError(f"{url}: may not be read ({error}); set the credentials of its store") from None
        if not any(folder.glob("*/recipe.json")):
            raise FileNotFoundError(f"{url}: there is no {f'run {run!r}' if run else 'folder of runs'} there")
        yield Remote(folder, files)


def _file_system(url: str) -> Any:
    from fsspec.core import url_to_fs
    from fsspec.implementations.dirfs import DirFileSystem

    class Runs(DirFileSystem):
        """Everything below the URL, and nothing else, under a scheme of its own."""

        protocol = SCHEME

        def _join(self, path: Any) -> Any:
            # Of the stores some are folders after all (sftp://, file://), where ".." would lead out.
            if isinstance(path, str) and ".." in PurePosixPath(self._strip_protocol(path)).parts:
                raise PermissionError(f"{path}: leads out of {url}")
            return super()._join(path)

    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"--root {url}: cannot be opened ({error})") from None
    return Runs(path=path, fs=files)


def _copy(files: Any, run: str | None, folder: Path) -> None:
    """Copy what the lineage reads, and put an empty file in place of each Parquet file."""
    wanted: list[str | None] = [run]
    while wanted:
        one = wanted.pop()
        names = [name for name in _names(files, one or "") if not {"..", "."} & set(PurePosixPath(name).parts)]
        small = [name for name in names if name.endswith(("/recipe.json", "/result.json"))]
        for name, content in files.cat(small).items() if small else ():
            _write(folder / name.lstrip("/"), content)
        for name in names:
            if name.endswith(".parquet") or f"/{MARKERS}/" in name:
                _write(folder / name, b"")
        if one is not None and (folder / one / "recipe.json").is_file():
            wanted += [parent] if (parent := _parent(folder / one)) else []
    if any(_parent(file.parent) for file in folder.glob("*/recipe.json")):
        _copy_footers(files, folder)


def _names(files: Any, below: str) -> list[str]:
    """Paths, without a leading slash, of the files of runs."""
    try:
        found = files.find(below)
    except FileNotFoundError:
        return []
    names = [name.lstrip("/") for name in found]
    return [name for name in names if _is_of_run(PurePosixPath(name).parts)]


def _is_of_run(parts: tuple[str, ...]) -> bool:
    if len(parts) == 2:
        return parts[1] == "recipe.json"
    return len(parts) > 2 and (parts[1] == "tables" or (parts[1] == "stages" and parts[-1] == "result.json"))


def _copy_footers(files: Any, folder: Path) -> None:
    """Merged files list their parts in their footers, which a child run's lineage reads: copy these, without rows."""
    import pyarrow.parquet as pq

    for path in folder.glob(f"*/tables/**/*{MERGED}"):
        with files.open(path.relative_to(folder).as_posix()) as file:
            schema = pq.ParquetFile(file).schema_arrow
        pq.write_table(schema.empty_table(), path)


def _parent(run: Path) -> str | None:
    try:
        parent = json.loads((run / "recipe.json").read_text(encoding="utf-8")).get("parent")
    except (ValueError, AttributeError):
        return None  # a damaged recipe is named when it is read
    return str(parent) if parent else None


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
