"""One component under test, with the companions that its kind needs, and the words in which a fault
is said.

It holds no checks of its own; those are one module a kind beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from miles.errors import ContractError, MilesError, PluginError
from miles.protocols import Context, Spec
from miles.testing.boxes import FakeSandbox
from miles.testing.tasks import FakeEnvironment

__all__ = ["Case", "Inapplicable", "equal_json", "expect", "fault", "inapplicable", "raises"]


class Inapplicable(Exception):
    """A check has nothing to say about this component; it is neither passed nor failed."""


def inapplicable(reason: str) -> NoReturn:
    """Leave a check that does not concern this component."""
    raise Inapplicable(reason)


def fault(message: str) -> NoReturn:
    """End a check with what is wrong, as one sentence."""
    raise ContractError(message)


def expect(holds: Any, message: str) -> None:
    """End the check with `message` unless `holds`."""
    if not holds:
        fault(message)


@contextmanager
def raises(error: type[MilesError], what: str) -> Iterator[None]:
    """Expect `error` from the block; `what` says what was asked of the component."""
    try:
        yield
    except error as raised:
        expect(str(raised).strip(), f"{what} raised {type(raised).__name__} without a message")
        return
    except (MilesError, TypeError, ValueError, LookupError, RuntimeError, OSError) as raised:
        fault(f"{what} raised {type(raised).__name__}({raised}), not {error.__name__}")
    fault(f"{what} raised nothing; {error.__name__} is expected")


def equal_json(value: Any, what: str) -> Any:
    """The value after a trip through JSON. A fault unless that gives an equal value (tuples may
    become lists)."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        fault(f"{what} is not plain JSON: {error}")
    return json.loads(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A component by name, and everything needed to build it and what it works with."""

    kind: str
    """One of `miles.protocols.KINDS`."""
    name: str
    """Registered name."""
    registry: Any
    """The `miles.plugins.Registry` that knows it."""
    config: Mapping[str, Any]
    """Plain values for its `Config`."""
    context: Context
    """A directory of its own; companions that are set here are used instead of the default
    run's."""
    built: dict[str, Any] = field(default_factory=dict)
    """Companions built so far, by kind."""

    @property
    def component(self) -> type:
        """The class itself."""
        found: type = self.registry.component(self.kind, self.name)
        return found

    @property
    def title(self) -> str:
        """`kind name`, as messages begin."""
        return f"{self.kind} {self.name}"

    def folder(self, name: str) -> Path:
        """A new folder below the case's own."""
        path = self.context.directory / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def build(self, **changes: Any) -> Any:
        """A fresh instance, in the case's context with companions filled in and `changes` made to
        it."""
        around = replace(self.around(), **changes)
        spec = Spec(kind=self.kind, name=self.name, config=self.config)
        try:
            return self.registry.build(spec, around)
        except PluginError as error:
            for kind, fake in _FAKES.items():
                if kind in _BEFORE.get(self.kind, ()) and type(getattr(around, kind)) is fake:
                    error.add_note(
                        f"the suite's own {kind} stood in, miles.testing.{fake.__name__}; in a "
                        f"test of yours, a fixture miles_context with {kind}=... brings another"
                    )
            raise

    def around(self) -> Context:
        """The context this kind is built in: what stands before it in a run's order."""
        needs = [kind for kind in _BEFORE.get(self.kind, ()) if getattr(self.context, kind) is None]
        return replace(self.context, **{kind: self.companion(kind) for kind in needs})

    def companion(self, kind: str, **changes: Any) -> Any:
        """What the default run uses for another kind, built once; afresh when `changes` to its
        context are given."""
        if changes:
            return self._build_companion(kind, **changes)
        if kind not in self.built:
            given = getattr(self.context, kind, None)
            if given is None and kind in _FAKES:
                given = _FAKES[kind]()
            self.built[kind] = given if given is not None else self._build_companion(kind)
        return self.built[kind]

    def _build_companion(self, kind: str, **changes: Any) -> Any:
        spec = self.companion_spec(kind)
        before = {
            other: self.companion(other) for other in _BEFORE.get(kind, ()) if other != self.kind
        }
        return self.registry.build(spec, replace(self.context, **{**before, **changes}))

    def companion_spec(self, kind: str) -> Spec:
        """What the default run uses for another kind."""
        spec = default_specs(self.registry).get(kind)
        if not isinstance(spec, Spec):
            fault(f"the default run chooses no {kind}, which the contract of {self.kind} needs")
        return spec


_BEFORE: Mapping[str, tuple[str, ...]] = {
    "tito": ("model",),
    "environment": ("model", "tito", "sandbox"),
    "trainer": ("model", "precision"),
    "engine": ("model", "precision"),
    "transport": ("model", "precision"),
    "algorithm": ("model",),
    "selector": ("environment",),
    "evaluator": ("environment",),
}
"""Companions that a kind finds in its context."""

_FAKES: Mapping[str, Any] = {"environment": FakeEnvironment, "sandbox": FakeSandbox}
"""Companions that are fakes, as long as the context brings no others."""


@lru_cache(maxsize=8)
def default_specs(registry: Any) -> Mapping[str, Any]:
    """Specs of the default run's last stage by kind: the companions, so that no plugin is named
    here."""
    from miles.config import compose

    plan = compose([], registry=registry)
    expect(plan.stages, f"the default run cannot be composed: {'; '.join(plan.faults)}")
    specs: Mapping[str, Any] = plan.stages[-1].specs
    return specs
