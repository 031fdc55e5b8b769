"""One contract suite per kind: what every component must do, whoever wrote it.

`check` gives faults as sentences; `checks` gives the single checks, to parametrise a test with. A
component whose `Config` has values without a default is built with what its classmethod
`example_config(directory)` returns, a mapping of plain values; it may write files below that
directory. Suites build companions (a trainer needs a model) from the default run unless the context
brings others. Nothing here imports torch before a check needs it.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from miles.errors import choices
from miles.protocols import KINDS, Context
from miles.testing.contract.case import (
    Case,
    Inapplicable,
    expect,
    fault,
    inapplicable,
    raises,
)

__all__ = [
    "Case",
    "Check",
    "Inapplicable",
    "check",
    "checks",
    "expect",
    "fault",
    "inapplicable",
    "raises",
    "run",
]

TIMEOUT_S = 120.0
"""Seconds one check may take; a component that hangs is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a component of a kind must do."""

    name: str
    """A few words with underscores."""
    promise: str
    """What must hold, as a sentence."""
    function: Callable[[Case], Any]
    """Returns, or raises: `ContractError` with the fault, `Inapplicable`, or whatever the component
    raised."""


def checks(kind: str) -> tuple[Check, ...]:
    """The suite of a kind: what holds for every component, then what holds for this kind."""
    if kind not in KINDS:
        raise ValueError(f"no kind {kind!r}: {choices(kind, KINDS)}")
    found = []
    for module in ("shape", kind):
        for name, function in vars(import_module(f"{__name__}.{module}")).items():
            if name.startswith("check_") and inspect.isfunction(function):
                promise = " ".join((inspect.getdoc(function) or "").split())
                found.append(
                    Check(name=name.removeprefix("check_"), promise=promise, function=function)
                )
    return tuple(found)


def check(
    kind: str,
    name: str,
    registry: Any,
    *,
    config: Mapping[str, Any] | None = None,
    context: Context | None = None,
) -> list[str]:
    """Faults of one component, one sentence each; none means that it keeps its contract.

    `config` holds plain values for its `Config`; `context.directory` is where it may write (a
    temporary folder without one).
    """
    faults = []
    for each in checks(kind):
        with tempfile.TemporaryDirectory(prefix="miles-contract-") as folder:
            around = context or Context(directory=Path(folder))
            try:
                with redirect_stdout(io.StringIO()):  # its own words are not ours
                    run(each, kind, name, registry, config=config, context=around)
            except Inapplicable:
                continue
            except Exception as error:  # noqa: BLE001 - whatever a component raises is its fault
                faults.append(f"{kind} {name}: {each.name}: {_words(error)}")
                if each.name == "builds":
                    break  # every later check would only say so again
    return faults


def run(
    each: Check,
    kind: str,
    name: str,
    registry: Any,
    *,
    context: Context,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Run one check in the given directory; whatever it raises is the outcome."""
    around = replace(context, rewards=registry.rewards(), filters=registry.filters())
    if config is None:
        config = _example(registry.component(kind, name), context.directory)
    case = Case(kind=kind, name=name, registry=registry, config=config, context=around)
    if inspect.iscoroutinefunction(each.function):
        asyncio.run(_within_time(each, case))
    else:
        each.function(case)


async def _within_time(each: Check, case: Case) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await each.function(case)
    except TimeoutError:
        fault(f"no end after {TIMEOUT_S:g} s")


def _example(component: type, directory: Path) -> Mapping[str, Any]:
    example = getattr(component, "example_config", None)
    if example is None:
        return {}
    values = example(directory)
    expect(isinstance(values, Mapping), f"example_config returned {values!r}, not a mapping")
    return values  # type: ignore[no-any-return]


def _words(error: Exception) -> str:
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return text if type(error).__name__ == "ContractError" else f"{type(error).__name__}: {text}"
