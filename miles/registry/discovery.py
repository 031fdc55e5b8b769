"""Where names come from: entry points of installed distributions, and local files.

Reads metadata, and imports only what it is asked to; what a name is for is `miles.plugins`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from miles.errors import (
    ContractError,
    PluginConflict,
    PluginLoadError,
    PluginNotFound,
    choices,
)
from miles.protocols import KINDS
from miles.registry import conformance

__all__ = [
    "HOOKS",
    "Entry",
    "conflict",
    "digest",
    "installed",
    "load_component",
    "load_file",
    "load_hooks",
    "local_components",
    "local_entry",
    "local_name",
    "matches",
]

HOOKS = "miles"
"""The entry-point group, and the pluggy project, of hook modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name that a distribution or a local file offers."""

    kind: str
    """A kind, or `hook`."""
    name: str
    """What a user writes."""
    target: str
    """`module:attribute`, or the module of hooks."""
    distribution: str
    """Distribution's name, or the path of a local file."""
    version: str = ""
    """Its version; a local file has the first digits of its SHA-256."""
    local: bool = False
    """Offered by a local file."""
    blocked: bool = False
    """Left out by an allow or block list."""

    @property
    def source(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.target} of {self.source})"


def conflict(claims: Sequence[Entry]) -> PluginConflict:
    """The error for a name with several claims."""
    first = claims[0]
    who = " and by ".join(f"{e.source} ({e.target})" for e in claims)
    error = PluginConflict(f"{first.kind} {first.name!r} is claimed by {who}")
    error.add_note(f"uninstall one, or leave one out: MILES_BLOCK={claims[-1].distribution}")
    return error


def matches(entry: Entry, names: Iterable[str]) -> bool:
    """Whether one of the names is the entry's own or its distribution's."""
    return any(n == entry.name or _normal(n) == _normal(entry.distribution) for n in names)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(allow: Sequence[str] | None, block: Sequence[str]) -> Iterator[Entry]:
    """Every entry point of ours, those left out marked `blocked`.

    Read from `importlib.metadata`, whose distributions are known: stevedore's entry points come
    without theirs, and its disk cache rounds file times to the nearest minutes, so that a plugin
    installed again at once may stay unseen.
    """
    seen: set[str] = set()
    for distribution in distributions():
        points = [p for p in distribution.entry_points if _kind(p.group)]
        if not points:
            continue
        about = distribution.metadata  # parsed anew by each `.name` and `.version`
        if _normal(about["Name"]) in seen:
            continue  # the first on the path is the one that imports
        seen.add(_normal(about["Name"]))
        for point in points:
            entry = Entry(
                kind=_kind(point.group),
                name=point.name,
                target=point.value,
                distribution=about["Name"],
                version=about["Version"],
            )
            allowed = allow is None or _normal(about["Name"]) == HOOKS or matches(entry, allow)
            yield replace(entry, blocked=not allowed or matches(entry, block))


def _kind(group: str) -> str:
    kind = group.removeprefix(f"{HOOKS}.")
    if group == HOOKS:
        return "hook"
    return kind if kind in KINDS and kind != group else ""


def _load_error(entry: Entry, error: BaseException) -> PluginLoadError:
    return PluginLoadError(f"{entry} cannot be imported: {type(error).__name__}: {error}")


def load_component(entry: Entry) -> Any:
    """What an entry point names, imported by stevedore, which is handed exactly the one that was
    chosen. Raises `PluginLoadError` with the original error as its cause."""
    import stevedore

    class Chosen(stevedore.DriverManager[Any]):
        def list_entry_points(self) -> list[EntryPoint]:
            return [EntryPoint(entry.name, entry.target, self.namespace)]

    def fail(manager: Any, point: EntryPoint, error: BaseException) -> None:
        raise _load_error(entry, error) from error

    try:
        return Chosen(f"{HOOKS}.{entry.kind}", entry.name, on_load_failure_callback=fail).driver
    except SystemExit as error:  # a module that leaves when imported must not take us with it
        raise _load_error(entry, error) from error


def load_hooks(entry: Entry) -> Any:
    """The module of hooks. Raises `PluginLoadError`."""
    try:
        return EntryPoint(entry.name, entry.target, HOOKS).load()
    except (Exception, SystemExit) as error:  # importing is other people's code, and so its errors
        raise _load_error(entry, error) from error


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def local_name(path: str | Path) -> str:
    """Name under which a local file is imported, the same in every process."""
    return "miles_local_" + re.sub(r"\W", "_", Path(path).stem)


def local_entry(path: str | Path) -> Entry:
    """The entry of a local file itself."""
    version = digest(Path(path))[:12] if Path(path).is_file() else ""
    return Entry(
        kind="hook",
        name=Path(path).stem,
        target=local_name(path),
        distribution=str(path),
        version=version,
        local=True,
    )


def load_file(entry: Entry) -> ModuleType:
    """The module of a local file, run once a process for the same content. Raises
    `PluginNotFound` without a file and `PluginLoadError` when running it raises."""
    path = Path(entry.distribution)
    if not path.is_file():
        raise PluginNotFound(f"local plugin {path}: there is no such file")
    mark, present = (str(path), digest(path)), sys.modules.get(entry.target)
    if present is not None and getattr(present, "__miles_source__", None) == mark:
        return present
    spec = importlib.util.spec_from_file_location(entry.target, path)
    if spec is None or spec.loader is None:
        raise PluginLoadError(f"local plugin {path}: its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    vars(module)["__miles_source__"] = mark
    sys.modules[entry.target] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # as above: the file is other people's code
        del sys.modules[entry.target]
        raise _load_error(entry, error) from error
    return module


def local_components(module: ModuleType, entry: Entry) -> dict[Entry, type]:
    """What `miles_components = {kind: {name: class}}` of a local file offers. Raises
    `ContractError` when it offers something else."""
    table = getattr(module, "miles_components", {})
    where = f"local plugin {entry.distribution}: miles_components"
    if not isinstance(table, Mapping) or not all(isinstance(v, Mapping) for v in table.values()):
        raise ContractError(f"{where} is not {{kind: {{name: class}}}}")
    offered = {}
    for kind, names in table.items():
        if kind not in KINDS:
            raise ContractError(f"{where} has no kind {kind!r}; {choices(str(kind), KINDS)}")
        for name, component in names.items():
            conformance.check_class(kind, name, component)
            target = f"{entry.target}:{component.__qualname__}"
            offered[replace(entry, kind=kind, name=name, target=target)] = component
    return offered
