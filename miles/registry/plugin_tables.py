"""The tables of PLUGINS.md, made from the code they describe.

`python -m miles.registry.plugin_tables [FILE]` writes them between the markers of the file,
PLUGINS.md by default; the text around them is written by people.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from miles import hookspecs
from miles.errors import ConfigError
from miles.plugins import SPECIFIED, Registry
from miles.protocols import KINDS
from miles.registry import schema
from miles.settings import Settings

__all__ = ["TABLES", "filled"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str | None) -> str:
    """The first sentence of a docstring."""
    return " ".join((text or "").split()).split(". ")[0]


def kinds() -> str:
    """Every kind: what it decides, and what a component of it must have."""
    rows = []
    for kind in KINDS.values():
        names = [n for n, v in vars(kind.protocol).items() if not n.startswith("_")]
        members = [*inspect.get_annotations(kind.protocol), *names]
        how = "several" if kind.many else "one or none" if kind.optional else "one"
        marked = [f"`async {n}`" if n in kind.async_methods else f"`{n}`" for n in members]
        rows.append([f"`{kind.name}`", kind.decides, how, ", ".join(marked)])
    return _table(["kind", "decides", "chosen", "what it has"], rows)


def hooks() -> str:
    """Every hook: its arguments, how answers count, and when it is called."""
    rows = []
    for name in SPECIFIED:
        if name.startswith("miles_make_"):
            continue
        function = getattr(hookspecs, name)
        arguments = ", ".join(f"`{a}`" for a in inspect.signature(function).parameters)
        first = function.miles_spec["firstresult"]
        rows.append([f"`{name}`", arguments, "first" if first else "all", function.__doc__ or ""])
    make = hookspecs.__dict__["miles_make_environment"]
    arguments = ", ".join(f"`{a}`" for a in inspect.signature(make).parameters)
    words = make.__doc__.replace("environment", "component", 1).replace(
        "miles.environment", "miles.<kind>"
    )
    rows.append(["`miles_make_<kind>`", arguments, "first", words])
    return _table(["hook", "arguments", "answers", "when"], rows)


def names() -> str:
    """Every component that comes with miles."""
    registry = Registry.load(allow=["miles"])
    rows = [
        [f"`{kind}`", f"`{name}`", _sentence(registry.component(kind, name).__doc__)]
        for kind in KINDS
        for name in registry.names(kind)
        if registry.entry(kind, name).distribution == "miles"
    ]
    return _table(["kind", "name", "what it is"], rows)


def settings() -> str:
    """The loop's own keys."""
    rows = []
    for field in schema.fields(Settings):
        below = schema.fields(field.type) if schema.frozen_dataclass(field.type) else [field]
        prefix = "" if below[0] is field else f"{field.name}."
        rows += [
            [f"`{prefix}{f.name}`", f"`{f.type_text}`", f"`{f.default!r}`", f.doc] for f in below
        ]
    return _table(["key", "type", "default", "meaning"], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "kinds": kinds,
    "hooks": hooks,
    "names": names,
    "settings": settings,
}
"""What stands between `<!-- NAME -->` and `<!-- /NAME -->`."""


def filled(text: str) -> str:
    """The text with every table made anew. Raises `ConfigError` for a marker that is missing."""
    for name, table in TABLES.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ConfigError(f"there is no <!-- {name} --> ... <!-- /{name} --> to fill")
        made = table()
        text = pattern.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "PLUGINS.md")
    file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")
