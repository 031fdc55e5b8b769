"""The ledger: what became of every group, one line a step, on disk before the next step is taken.

It records and reads back; deciding what a resumed run does with it is `miles.run`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles.errors import RunError

__all__ = ["Ledger", "fates"]


class Ledger:
    """Append-only `ledger.jsonl`; a line that a crash cut short is removed when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")
        whole = path.read_bytes().rfind(b"\n") + 1
        if whole < self._file.tell():
            self._file.truncate(whole)
            self._file.seek(whole)

    @property
    def offset(self) -> int:
        """Bytes written; a checkpoint remembers it."""
        return self._file.tell()

    def write(self, *, step: int, started: int, ended: Iterable[tuple[int, str]]) -> None:
        """One step: how many groups were ever started, and (group id, fate) of those that ended
        since. Synced. Raises `RunError` when it cannot be written."""
        by_fate: dict[str, list[int]] = defaultdict(list)
        for group, fate in ended:
            by_fate[fate].append(group)
        self._append({"step": step, "started": started, **by_fate})

    def roll_back(self, offset: int) -> None:
        """Mark entries after `offset` as belonging to weights that are gone."""
        if self.offset > offset:
            self._append({"rolled_back": [offset, self.offset]})

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise RunError(f"ledger {self._path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; safe to call twice. What could not be written was told before."""
        with suppress(OSError):
            self._file.close()


def fates(path: Path) -> dict[int, list[str]]:
    """Fate of every group along the lineage of the surviving weights: entries rolled back are left
    out."""
    data = path.read_bytes()
    gone: list[tuple[int, int]] = []
    for _, line in _lines(data):
        if "rolled_back" in line:
            start, stop = line["rolled_back"]
            gone.append((start, stop))
    result: dict[int, list[str]] = defaultdict(list)
    for offset, line in _lines(data):
        if "rolled_back" in line or any(start <= offset < stop for start, stop in gone):
            continue
        for fate, groups in line.items():
            if fate not in ("step", "started"):
                for group in groups:
                    result[group].append(fate)
    return dict(result)


def _lines(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    offset = 0
    for raw in data.splitlines(keepends=True):
        if raw.endswith(b"\n"):  # a line cut short by a crash was never complete
            yield offset, json.loads(raw)
        offset += len(raw)
