"""Holds the tito handler of a checkpoint against the grid, its own template and a live engine: what
`miles tito verify` does.

Finds the handler as a run would; trains and samples nothing itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.errors import ConfigError
from miles.plugins import Registry
from miles.protocols import Context, Spec
from miles.registry.families import family, hf_config
from miles.testing.tito_boundaries import cut_faults, search
from miles.testing.tito_grid import Line, verify
from miles.testing.tito_live import verify_live
from miles.testing.tito_oracle import Oracle

__all__ = ["Found", "detect", "find", "report"]

_NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A handler for a directory."""

    name: str
    """Registered name."""
    handler: Any
    """The `Tito`."""
    why: str
    """How it was chosen, for people."""
    surrogate: str
    """What stands in for the checkpoint's tokenizer; empty when it is its own."""


def detect(registry: Registry, directory: Path) -> tuple[str, str]:
    """The handler that a run with this checkpoint takes under `tito=auto`, and why. Raises
    `ConfigError` when no registration knows it."""
    try:
        hf = hf_config(directory)
    except ConfigError as error:
        raise ConfigError(f"tito verify: {error}; give the handler with --tito NAME") from error
    name = family(hf, registry)
    if name is None:
        raise ConfigError(
            f"tito verify: no model registration knows model_type {hf.get('model_type')!r} of "
            f"{directory}; give the handler with --tito NAME"
        )
    component = registry.component("model", name)
    choose = getattr(component, "choose_tito", None)
    chosen = (
        str(choose({"init": "load", "path": str(directory)})) if choose else str(component.tito)
    )
    why = f"model {name!r} and the chat template ask for it"
    known = [registry.component("model", name) for name in registry.names("model")]
    if chosen in {c.tito for c in known if getattr(c, "fallback", False)}:
        why = (
            f"warning: the checkpoint {directory} ({hf.get('model_type')}) has no handler of its "
            f"own, or its chat template is not its family's; it is given {chosen!r}"
        )
    return chosen, why


def find(
    directory: Path,
    *,
    name: str = "",
    unverified: bool = False,
    arguments: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> Found:
    """Build a checkpoint's handler. Raises `ConfigError` when it does not fit."""
    registry = registry or Registry.load()
    why = "chosen by hand"
    if not name:
        name, why = detect(registry, directory)
    fields = set(registry.component("tito", name).Config.__dataclass_fields__)
    wanted = {"path": str(directory), "arguments": dict(arguments or {}), "unverified": unverified}
    config = {key: value for key, value in wanted.items() if key in fields and value}
    with tempfile.TemporaryDirectory(prefix="miles-tito-") as folder:
        spec = Spec(kind="tito", name=name, config=config)
        handler = registry.build(spec, Context(directory=Path(folder)))
    mark = directory / "surrogate.json"
    stands_in = json.loads(mark.read_text(encoding="utf-8"))["tokenizer"] if mark.is_file() else ""
    return Found(name=name, handler=handler, why=why, surrogate=str(stands_in))


def report(
    found: Found,
    directory: Path,
    *,
    live: str = "",
    key: str = "",
    template: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> tuple[bool, list[str]]:
    """Whether everything is good, and what to print."""
    lines = [f"tito {found.name} for {directory}: {found.why}"]
    variant = getattr(getattr(found.handler, "variant", None), "renderer", "")
    if variant:
        lines.append(f"variant: {variant}")
    if found.surrogate:
        lines.append(
            f"surrogate: the tokenizer of {found.surrogate!r} stands in, so token boundaries are "
            "not the model's"
        )
    if live:
        lines.append(f"live: {live}")
        return _told(lines, list(_words(verify_live(found.handler, live, key=key))))
    try:
        oracle: Oracle | None = Oracle(directory, template=template, arguments=arguments)
        lines.append("oracle: the chat template")
    except ConfigError as error:
        oracle = None
        lines.append(f"oracle: none ({error})")
    words = [*_words(verify(found.handler, oracle))]
    cuts = list(cut_faults(found.handler))
    words.append((not cuts, f"{'cut anywhere':<20}{'; '.join(cuts[:2]) or 'ok'}"))
    if all(good for good, _ in words):
        words.append(_search(found.handler, oracle))
    return _told(lines, words)


def _search(handler: Any, oracle: Oracle | None) -> tuple[bool, str]:
    """Any text, which would only find the same again where the grid has found something."""
    try:
        fault = search(handler, oracle, examples=100)
    except ImportError:
        return (
            True,
            f"{'any text':<20}{_NOT_TRIED}: hypothesis is not installed: pip install hypothesis",
        )
    return not fault, f"{'any text':<20}{fault or 'ok'}"


def _told(head: list[str], words: Sequence[tuple[bool, str]]) -> tuple[bool, list[str]]:
    bad = sum(not good for good, _ in words)
    untried = sum(_NOT_TRIED in text for _, text in words)
    good = (
        f"good: {len(words) - untried}, {untried} not tried"
        if untried
        else f"good: all {len(words)}"
    )
    end = f"{bad} of {len(words)} are wrong" if bad else good
    return not bad, [*head, *(f"  {text}" for _, text in words), end]


def _words(lines: Sequence[Line]) -> Iterator[tuple[bool, str]]:
    for line in lines:
        if line.skipped:
            yield True, f"{line.talk:<20}skipped: {line.skipped}"
        elif line.faults:
            more = f" (and {len(line.faults) - 1} more)" if len(line.faults) > 1 else ""
            yield False, f"{line.talk:<20}WRONG: {line.faults[0]}{more}"
        else:
            asked = f", template asked for {line.oracle}" if line.oracle else ""
            kept = f", {line.kept} kept that it would take back" if line.kept else ""
            yield True, f"{line.talk:<20}ok: {line.turns} turns, {line.tokens} tokens{asked}{kept}"
