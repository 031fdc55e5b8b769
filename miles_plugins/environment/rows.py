"""Rows of JSON Lines or Parquet files through the `datasets` library, with errors that name the
place.

It finds, opens and checks files; what a row means is the environment's business.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from miles import ConfigError, choices

_FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}


def find_files(path: str, where: str) -> list[Path]:
    """Data files of a path, a folder or a glob, sorted. Raises `ConfigError` under the name
    `where`."""
    given = Path(path)
    if given.is_file():
        found = [given]
    elif given.is_dir():
        found = sorted(f for f in given.rglob("*") if f.suffix in _FORMATS and f.is_file())
        if not found:
            raise ConfigError(f"{where}: no data file in {given}; looked for {', '.join(_FORMATS)}")
    else:
        found = sorted(f for f in map(Path, glob.glob(path, recursive=True)) if f.is_file())
        if not found:
            raise ConfigError(f"{where}: no file, folder or match of {path!r}")
    for file in found:
        if file.suffix not in _FORMATS:
            raise ConfigError(
                f"{where}: {file} is not a data file; {choices(file.suffix, _FORMATS)}"
            )
        if not file.stat().st_size:
            raise ConfigError(f"{where}: {file} is empty")
    if len({_FORMATS[file.suffix] for file in found}) > 1:
        raise ConfigError(f"{where}: {path!r} holds both JSON and Parquet files; name one kind")
    return found


def open_rows(files: Sequence[Path], columns: Sequence[str], where: str) -> Any:
    """A `datasets.Dataset` with just those columns, memory-mapped; indexing it gives rows as
    dictionaries.

    Raises `ConfigError` when the library is not installed, a file cannot be read (with its first
    bad line), a column is not there, or there are no rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{where}: needs `datasets`: pip install 'miles[data]'") from error
    datasets.disable_progress_bars()
    loud = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it would log is raised below
    try:
        rows = datasets.load_dataset(
            _FORMATS[files[0].suffix], data_files=[str(f.resolve()) for f in files], split="train"
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError, TypeError, OSError) as error:
        _blame_line(files, where)
        raise ConfigError(f"{where}: cannot read {_names(files)}: {_root(error)}") from error
    finally:
        datasets.logging.set_verbosity(loud)
    for column in columns:
        if column not in rows.column_names:
            hint = choices(column, rows.column_names)
            raise ConfigError(f"{where}: no column {column!r} in {_names(files)}; {hint}")
    if not len(rows):
        raise ConfigError(f"{where}: no rows in {_names(files)}")
    return rows.select_columns(list(dict.fromkeys(columns)))


def place(files: Sequence[Path], row: int) -> str:
    """Words for where a row (from 0, over all files) was read from."""
    if _FORMATS[files[0].suffix] == "json":
        for index, (file, line, _) in enumerate(_lines(files)):
            if index == row:
                return f"{file}, line {line}"
    return f"row {row + 1} of {_names(files)}"


def _names(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _lines(files: Sequence[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """Every line that is not blank, with its file and number from 1."""
    for file in files:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield file, number, line


def _blame_line(files: Sequence[Path], where: str) -> None:
    """Raise for the first line that is not a JSON object or whose column has another type than
    before, or when there are no lines; return when nothing is found or the files are no JSON
    Lines."""
    if _FORMATS[files[0].suffix] != "json":
        return
    if next(_lines(files), None) is None:
        raise ConfigError(f"{where}: no rows in {_names(files)}")
    seen: dict[str, tuple[str, str]] = {}
    for file, number, line in _lines(files):
        if file.suffix == ".json" and number == 1 and line.lstrip()[:1] == b"[":
            return  # one array, not lines
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: {file}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ConfigError(
                f"{where}: {file}, line {number}: a {kind}, not an object with columns"
            )
        for column, value in row.items():
            if value is None:
                continue
            kind = "number" if type(value) in (int, float) else type(value).__name__
            first, since = seen.setdefault(column, (kind, f"{file}, line {number}"))
            if kind != first:
                raise ConfigError(
                    f"{where}: {file}, line {number}: column {column!r} is a {kind}, but a {first} "
                    f"in {since}"
                )


def _root(error: BaseException) -> str:
    """The innermost cause: the library wraps it in sentences about itself."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
