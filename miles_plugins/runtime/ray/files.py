"""What every host must see of the run's files, and whether one does.

A cluster needs one file system, mounted at the same place everywhere, for the run's directory,
models and local plugins: that is checked here, never assumed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles import Context, Spec

__all__ = ["seen", "shared", "unseen"]


@contextlib.contextmanager
def seen(context: Context, parts: Sequence[Spec], mark: str) -> Iterator[list[list[Any]]]:
    """(key, path, size) of what hosts must have, as `unseen` takes it: a mark in the run's
    directory, which is there inside, and every path of the configuration that exists here."""
    logs = context.directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    marked = logs / f".seen-{mark}"
    marked.write_text(mark)
    try:
        yield [["run.dir", str(marked), len(mark)], *shared(context, parts)]
    finally:
        marked.unlink(missing_ok=True)


def shared(context: Context, parts: Sequence[Spec]) -> list[list[Any]]:
    """Paths that exist here, of the parts' configuration and of local plugins."""
    found: dict[str, str] = {}
    for part in parts:
        found.update(_paths(part.kind, part.config))
    found.update(_paths("plugins", context.plugins.get("selection", {})))
    return [[key, path, _size(path)] for key, path in found.items()]


def _paths(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _paths(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _paths(f"{key}.{index}", inner)
    elif isinstance(value, str | Path) and os.sep in str(value):
        path = os.path.abspath(os.path.expanduser(value))
        if len(path) < 4096 and os.path.exists(path):
            yield key, path


def _size(path: str) -> int:
    return -1 if os.path.isdir(path) else os.path.getsize(path)


def unseen(wanted: Sequence[Sequence[Any]]) -> list[str]:
    """Those that are not on this host as they are on the driver's, each as words."""
    lacking = []
    for key, path, size in wanted:
        if not os.path.exists(path):
            lacking.append(f"{key}: {path} is not there")
        elif _size(path) != size:
            lacking.append(f"{key}: {path} is another file there")
    return lacking
