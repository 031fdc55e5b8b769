"""What `miles show` and `miles plugins list, show, check` print.

Looks and prints; what is wrong with a run is `miles.check`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles import hookspecs
from miles.errors import MilesError, PluginNotFound, choices
from miles.plugins import SPECIFIED, Registry
from miles.registry import conformance, discovery, schema
from miles.registry.discovery import Entry

__all__ = ["check_plugins", "print_component", "print_hook", "print_list", "resolved_lines"]

# ---------------------------------------------------------------- the configuration


def resolved_lines(stage: Any) -> Iterator[str]:
    """A stage as YAML, each value with its origin as a comment."""
    yield f"# ---- stage {stage.name}"
    rows = list(_rows(stage.resolved, (), stage.origins))
    width = min(48, max((len(text) for text, origin in rows if origin), default=0))
    for text, origin in rows:
        yield f"{text:<{width}}  # {origin}" if origin else text


def _rows(
    values: Mapping[str, Any], path: tuple[str, ...], origins: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _rows(value, here, origins)
        else:
            origin = origins.get(".".join(here), "")
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}", origin


# ---------------------------------------------------------------- what is installed


def _state(registry: Registry, entry: Entry) -> tuple[str, str]:
    """(one word, detail) of an entry, found without importing a component."""
    if entry.blocked:
        return "blocked", "left out by MILES_PLUGINS or MILES_BLOCK"
    if entry in registry.broken:
        return "broken", registry.broken[entry].detail
    claims = [
        e
        for e in registry.entries
        if (e.kind, e.name) == (entry.kind, entry.name) and not e.blocked
    ]
    return ("conflict", discovery.conflict(claims).detail) if len(claims) > 1 else ("ok", "")


def print_list(registry: Registry, *, kind: str | None, as_json: bool) -> None:
    """Every entry point and hook module, blocked, broken and conflicting ones included."""
    present = [*registry.entries, *(e for e in registry.broken if e not in registry.entries)]
    rows = [(e, *_state(registry, e)) for e in present if kind in (None, e.kind)]
    if as_json:
        fields = ("kind", "name", "target", "distribution", "version")
        found = [
            {**{f: getattr(e, f) for f in fields}, "state": state, "detail": detail}
            for e, state, detail in rows
        ]
        print(json.dumps(found, indent=1))
        return
    lines = [("kind", "name", "distribution", "state")]
    lines += [(e.kind, e.name, e.source, state) for e, state, _ in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    for detail in dict.fromkeys(
        detail for _, state, detail in rows if state not in ("ok", "blocked")
    ):
        print(f"\n{detail}")


# ---------------------------------------------------------------- one of them


def print_component(registry: Registry, kind: str, name: str) -> None:
    """A component's docstring, keys with types, defaults and sentences, files, and origin; of a
    local file, each component of that kind that it offers.

    Raises as `Registry.component`, and for a local file what is wrong with it, or `PluginNotFound`
    when it offers none of that kind.
    """
    if not name.endswith(".py"):
        _print_one(registry, kind, name)
        return
    registry = registry.with_files([name])
    for entry, error in registry.broken.items():
        if entry.local:
            raise error
    offered = [e for e in registry.entries if e.local and e.kind != "hook"]
    chosen = [e.name for e in offered if e.kind == kind]
    if not chosen:
        there = ", ".join(f"{e.kind} {e.name}" for e in offered) or "no components"
        raise PluginNotFound(f"local plugin {name} offers no {kind}; it offers {there}")
    for index, each in enumerate(chosen):
        print("\n" * bool(index), end="")
        _print_one(registry, kind, each)


def _print_one(registry: Registry, kind: str, name: str) -> None:
    from rich.console import Console  # a tenth of what listing may cost, so not at the top
    from rich.table import Table

    from miles.composing.compose import Files

    entry = registry.entry(kind, name)
    component = registry.component(kind, name)
    width = None if sys.stdout.isatty() else 160  # keys whole, also in a pipe
    console = Console(highlight=False, width=width)
    console.print(f"{kind} {name}", style="bold")
    console.print(f"{entry.target} of {entry.source}\n", markup=False, soft_wrap=True)
    print(inspect.getdoc(component) or "(no docstring)")
    keys = list(_keys(component.Config, f"{kind}.{name}" if _many(kind) else kind, {}))
    if keys:
        table = Table("key", "type", "default", "meaning", box=None, pad_edge=False)
        for row in keys:
            table.add_row(*row)
        console.print()
        console.print(table, markup=False)
    files = Files(registry)
    for option in files.options(kind):
        node = _node(files, kind, option)
        if node is not None and node.name == name and node.label:
            console.print(f"\n{kind}={option} ({node.label})", markup=False, soft_wrap=True)
            for key, value in node.values.items():
                console.print(f"  {key}: {_text(value)}", markup=False, soft_wrap=True)
    hooks = {
        plugin: names
        for plugin, names in registry.hooks().items()
        if f"miles_make_{kind}" in names
        or (entry.distribution != "miles" and plugin.endswith(f"({entry.source})"))
    }
    for plugin, names in hooks.items():
        console.print(f"\nhooks of {plugin}: {', '.join(names)}", markup=False, soft_wrap=True)


def _keys(config: type, path: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, sentence) of every field, below nested ones as well; `given` is the
    default of the whole."""
    for field in schema.fields(config):
        key, default = f"{path}.{field.name}", given.get(field.name, field.default)
        nested = schema.frozen_dataclass(field.type)
        shown = str(default) if default is schema.REQUIRED else _text(default)
        yield key, field.type_text, "" if nested else shown, field.doc
        if nested:
            yield from _keys(field.type, key, default if isinstance(default, Mapping) else {})


def _many(kind: str) -> bool:
    from miles.protocols import KINDS

    return KINDS[kind].many


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _node(files: Any, kind: str, option: str) -> Any:
    try:
        return files.node(kind, option)
    except MilesError:
        return None  # a broken neighbour does not hide this component


def print_hook(registry: Registry, kind: str, name: str) -> None:
    """A hook's signature and meaning, and who implements it."""
    if name not in SPECIFIED:
        raise PluginNotFound(f"there is no hook {name!r}; {choices(name, SPECIFIED)}")
    function = getattr(hookspecs, name)
    print(f"{name}{inspect.signature(function)}")
    print(inspect.getdoc(function) or "")
    for plugin, names in registry.hooks().items():
        if name in names:
            print(f"implemented by {plugin}")


# ---------------------------------------------------------------- checking


def check_plugins(registry: Registry, name: str | None, *, contract: bool) -> int:
    """Import what matches `name` (everything without one), print what is wrong; 1 if anything is.

    `name` is a distribution, an entry point's name, `KIND/NAME`, or a local file. Raises
    `PluginNotFound` when it matches nothing.
    """
    if name is not None and name.endswith(".py"):
        registry = registry.with_files([name])
        name = str(Path(name).expanduser().resolve())
    present = [*registry.entries, *(e for e in registry.broken if e not in registry.entries)]
    chosen = [e for e in present if not e.blocked and (name is None or _named(e, name))]
    if name is not None and not chosen:
        known = {e.name for e in present} | {e.distribution for e in present}
        raise PluginNotFound(f"no plugin is called {name!r}; {choices(name, known)}")
    faulty = 0
    for entry in chosen:
        faults = list(_faults(registry, entry, contract=contract))
        faulty += bool(faults)
        print(f"{'fault' if faults else 'good ':<5} {entry.kind} {entry.name} ({entry.source})")
        for fault in faults:
            print("      " + "\n        ".join(fault.splitlines()))
    print(f"{len(chosen) - faulty} good, {faulty} faulty")
    return 1 if faulty else 0


def _named(entry: Entry, name: str) -> bool:
    return discovery.matches(entry, (name,)) or f"{entry.kind}/{entry.name}" == name


def _faults(registry: Registry, entry: Entry, *, contract: bool) -> Iterator[str]:
    state, detail = _state(registry, entry)
    if state != "ok":
        yield detail
        return
    if entry.kind == "hook":
        return
    try:
        component = registry.component(entry.kind, entry.name)
    except MilesError as error:
        yield error.detail
        return
    yield from conformance.component_faults(entry.kind, component)
    yield from _undocumented(component)
    yield from _file_faults(registry, entry, component)
    if contract:
        from miles.testing import contract as suites

        yield from suites.check(entry.kind, entry.name, registry)


def _undocumented(component: Any) -> Iterator[str]:
    if not component.__doc__:
        yield f"class {component.__qualname__} has no docstring"
    for field in schema.fields(component.Config):
        if not field.doc:
            yield f"Config.{field.name} has no sentence under it"


def _file_faults(registry: Registry, entry: Entry, component: Any) -> Iterator[str]:
    """Keys of its own YAML that its `Config` does not have, or of a wrong type."""
    from miles.composing.compose import Files

    try:
        node = Files(registry).node(entry.kind, entry.name)
    except MilesError as error:
        yield error.detail
        return
    owner = f"{entry.kind} {entry.name!r}"
    _, found = schema.convert(
        component.Config, node.values, owner=owner, origin=lambda key: node.label
    )
    yield from (fault for fault in found if "a value is required" not in fault)
