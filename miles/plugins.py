"""The registry: which components and hooks exist, where they come from, and how one is built.

Two doors meet here. Components are entry points of `miles.<kind>`: found by reading metadata,
imported when chosen. Hooks are entry points of `miles`: imported one by one at once, so they must
be light. A local file may offer both. Composes no configuration and reads no environment variable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from miles import hookspecs
from miles.errors import (
    ContractError,
    MilesError,
    PluginConflict,
    PluginError,
    PluginLoadError,
    PluginNotFound,
    choices,
)
from miles.protocols import KINDS, Context, Spec
from miles.registry import conformance, discovery, families, schema
from miles.registry.discovery import HOOKS, Entry
from miles.registry.moments import Moments, placed

__all__ = ["SPECIFIED", "Entry", "Registry", "compare_provenance"]

SPECIFIED = tuple(n for n in vars(hookspecs) if n.startswith("miles_"))
"""Every hook there is, in the order of a run's life."""


class Registry:
    """Everything installed, and what of it may be used."""

    @classmethod
    def load(
        cls,
        *,
        files: Iterable[str | Path] = (),
        allow: Iterable[str] | None = None,
        block: Iterable[str] = (),
    ) -> Registry:
        """Read the metadata of every distribution, import hook modules, and run local files.

        `allow` and `block` hold names of distributions or entry points; with `allow`, everything
        else except miles itself is left out. A hook module or file that cannot be used is kept in
        `broken`, and nothing is raised for it. Raises `PluginNotFound` for an allowed name that
        nothing has.
        """
        return cls(
            files=[str(Path(f).expanduser().resolve()) for f in files],
            allow=None if allow is None else tuple(allow),
            block=tuple(block),
        )

    def __init__(
        self, *, files: Sequence[str], allow: Sequence[str] | None, block: Sequence[str]
    ) -> None:
        self.files = tuple(files)
        """Absolute paths of local plugin files."""
        self.allow, self.block = allow, block
        self.broken: dict[Entry, MilesError] = {}
        """Hook modules and local files that could not be used, with the reason."""
        self._local: dict[Entry, type] = {}
        self._manager = pluggy.PluginManager(HOOKS)
        self._manager.add_hookspecs(hookspecs)
        self._manager.register(_default_factories(self), name="default")
        self.hook = Moments(self._manager)
        """Typed calls of every hook."""
        self.entries: tuple[Entry, ...] = tuple(discovery.installed(allow, block))
        """Every name, blocked ones included, sorted by kind and name."""
        self._refuse_unknown_names()
        self._load_hooks()
        self._load_files()
        self.entries = tuple(sorted(self.entries, key=lambda e: (e.kind, e.name, e.distribution)))

    @property
    def selection(self) -> dict[str, Any]:
        """Arguments of `Registry.load` that give the same registry in another process."""
        return {"files": self.files, "allow": self.allow, "block": self.block}

    def with_files(self, files: Iterable[str | Path]) -> Registry:
        """The same registry with these local files instead."""
        return Registry.load(files=files, allow=self.allow, block=self.block)

    # ---------------------------------------------------------------- names

    def names(self, kind: str) -> tuple[str, ...]:
        """Every usable name of a kind, sorted; a name claimed twice is among them."""
        return tuple(sorted({e.name for e in self.entries if e.kind == kind and not e.blocked}))

    def entry(self, kind: str, name: str) -> Entry:
        """Where a name comes from. Raises `PluginNotFound` with the choices, or `PluginConflict`
        with every claim."""
        if kind not in KINDS:
            raise PluginNotFound(f"there is no kind {kind!r}; {choices(kind, KINDS)}")
        claims = [e for e in self.entries if (e.kind, e.name) == (kind, name)]
        usable = [e for e in claims if not e.blocked]
        if not usable:
            error = PluginNotFound(
                f"there is no {kind} {name!r}; {choices(name, self.names(kind))}"
            )
            for claim in claims:
                error.add_note(
                    f"{claim.source} offers it, but MILES_PLUGINS or MILES_BLOCK leaves it out"
                )
            raise error
        if len(usable) > 1:
            raise discovery.conflict(usable)
        return usable[0]

    def conflicts(self) -> tuple[PluginConflict, ...]:
        """One error for each name that is claimed more than once."""
        claims: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            if not entry.blocked:
                claims.setdefault((entry.kind, entry.name), []).append(entry)
        return tuple(discovery.conflict(found) for found in claims.values() if len(found) > 1)

    def filled_in(self, overrides: Sequence[str]) -> list[str]:
        """See `miles.registry.families`: the model of a checkpoint that these overrides name."""
        return families.filled_in(overrides, self)

    # ---------------------------------------------------------------- components

    def component(self, kind: str, name: str) -> type[Any]:
        """Import a component's class. Raises as `entry` does, `PluginLoadError` when importing
        raises, and `ContractError` when it is no class with a frozen `Config`."""
        entry = self.entry(kind, name)
        found = self._local[entry] if entry.local else discovery.load_component(entry)
        conformance.check_class(kind, name, found)
        return found

    def build(self, spec: Spec, context: Context) -> Any:
        """Validate the configuration, build through `miles_make_<kind>`, check what came back.

        Raises as `component` does, `ConfigError` for the configuration, and `ContractError` when
        the object does not do what the protocol says, or when a hook gave none.
        """
        component = self.component(spec.kind, spec.name)
        config = schema.build(component.Config, spec.config, owner=f"{spec.kind} {spec.name!r}")
        built = self.hook.make(spec.kind, spec.name, config, context)
        if faults := conformance.component_faults(spec.kind, built):
            raise ContractError(
                f"{self.entry(spec.kind, spec.name)} was built as {type(built).__qualname__}, "
                f"which does not keep the contract of its kind: {'; '.join(faults)}"
            )
        return built

    def variables(self, spec: Spec) -> dict[str, str]:
        """Environment variables that a process has to have before this part is built in it, for
        what a library can be told in no other way. Raises as `build`."""
        component = self.component(spec.kind, spec.name)
        if (told := getattr(component, "variables", None)) is None:
            return {}
        owner = f"{spec.kind} {spec.name!r}"
        return dict(told(schema.build(component.Config, spec.config, owner=owner)))

    def awaits(self, engine: Spec) -> str:
        """What the first answer of an engine waits for, in words. Raises as `build`."""
        component = self.component(engine.kind, engine.name)
        if (told := getattr(component, "awaits", None)) is None:
            return "its first answer"
        owner = f"{engine.kind} {engine.name!r}"
        return str(told(schema.build(component.Config, engine.config, owner=owner)))

    def environments(self, evaluator: Spec | None) -> dict[str, Spec]:
        """By set, the environments other than the run's that an evaluator's sets name; a worker
        holds each as `environment:<set>`. Raises as `component` does, and `ConfigError`."""
        if evaluator is None:
            return {}
        component = self.component(evaluator.kind, evaluator.name)
        if (named := getattr(component, "environments", None)) is None:
            return {}
        owner = f"{evaluator.kind} {evaluator.name!r}"
        config = schema.build(component.Config, evaluator.config, owner=owner)
        found = {}
        for name, keys in named(config).items():
            rest = {k: v for k, v in keys.items() if k != "name"}
            part = f"environment:{name}"
            chosen = str(keys.get("name", ""))
            found[name] = Spec(kind="environment", name=chosen, config=rest, part=part)
        return found

    def rewards(self) -> dict[str, Callable[..., Any]]:
        """Rewards of all plugins by name. Raises `PluginConflict` for a name given twice."""
        return self._merged("miles_rewards", "reward")

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Admission filters of all plugins by name. Raises `PluginConflict` likewise."""
        return self._merged("miles_filters", "filter")

    def tools(self) -> dict[str, Callable[..., Any]]:
        """Functions that models may call, by name. Raises `PluginConflict` likewise."""
        return self._merged("miles_tools", "tool")

    def agents(self) -> dict[str, Callable[..., Any]]:
        """Black-box agents by name. Raises `PluginConflict` likewise."""
        return self._merged("miles_agents", "agent")

    def config_paths(self) -> list[tuple[str, str]]:
        """(plugin, folder or `pkg://` address) of every answer to `miles_config_paths`."""
        return [(who, str(path)) for who, path in self.hook.answers("miles_config_paths")]

    def hooks(self) -> dict[str, tuple[str, ...]]:
        """Hooks that each plugin implements, miles' default factories left out."""
        found: dict[str, tuple[str, ...]] = {}
        for plugin, module in self._manager.list_name_plugin():
            callers = self._manager.get_hookcallers(module) or []
            if plugin != "default" and callers:
                found[plugin] = tuple(sorted(c.name for c in callers))
        return found

    # ---------------------------------------------------------------- what was used

    def verify(self) -> None:
        """Raise `PluginLoadError` with every hook module and local file that could not be used."""
        if self.broken:
            raise PluginLoadError("\n".join(error.detail for error in self.broken.values()))

    def provenance(self) -> dict[str, Any]:
        """Versions of the distributions that offer something, SHA-256 of the local files."""
        used = [e for e in self.entries if not e.blocked and not e.local]
        return {
            "distributions": {e.distribution: e.version for e in used},
            "files": {f: discovery.digest(Path(f)) for f in self.files if Path(f).is_file()},
        }

    # ---------------------------------------------------------------- loading

    def _refuse_unknown_names(self) -> None:
        known = {e.name for e in self.entries} | {e.distribution for e in self.entries}
        for name in self.allow or ():
            if not any(discovery.matches(e, (name,)) for e in self.entries):
                raise PluginNotFound(
                    f"MILES_PLUGINS allows {name!r}, which nothing has; {choices(name, known)}"
                )

    def _load_hooks(self) -> None:
        found = [e for e in self.entries if e.kind == "hook" and not e.blocked]
        for entry in found:
            twins = [e for e in found if e.name == entry.name]
            try:
                if len(twins) > 1:
                    raise discovery.conflict(twins)
                self._register(entry, discovery.load_hooks(entry))
            except PluginError as error:
                self.broken[entry] = error

    def _load_files(self) -> None:
        for path in self.files:
            entry = discovery.local_entry(path)
            twins = [f for f in self.files if discovery.local_name(f) == entry.target]
            try:
                if len(twins) > 1:
                    raise PluginConflict(
                        f"local plugins {' and '.join(twins)} would both be {entry.target}"
                    )
                module = discovery.load_file(entry)
                offered = discovery.local_components(module, entry)
                self._register(entry, module)
            except PluginError as error:
                self.broken[entry] = error
                continue
            self._local.update(offered)
            self.entries = (*self.entries, entry, *offered)

    def _register(self, entry: Entry, module: Any) -> None:
        label = f"{entry.name} ({entry.source})"
        if not isinstance(module, ModuleType):
            raise ContractError(f"plugin {label}: {entry.target} is not a module")
        for name, member in list(vars(module).items()):
            if not inspect.isroutine(member):
                continue
            marked = self._manager.parse_hookimpl_opts(module, name) is not None
            if marked and name not in SPECIFIED:
                raise ContractError(
                    f"plugin {label}: there is no hook {name}; {choices(name, SPECIFIED)}"
                )
            if name in SPECIFIED and not marked:
                raise ContractError(
                    f"plugin {label}: {name} is not marked with @miles.hookimpl, so nothing "
                    "would call it"
                )
        try:
            self._manager.register(module, name=label)
        except (pluggy.PluginValidationError, ValueError) as error:
            self._manager.unregister(name=label)
            raise ContractError(f"plugin {label}: {error}") from error

    def _merged(self, hook: str, what: str) -> dict[str, Callable[..., Any]]:
        merged: dict[str, Callable[..., Any]] = {}
        owner: dict[str, str] = {}
        for plugin, answer in self.hook.answers(hook):
            if not isinstance(answer, Mapping):
                raise ContractError(
                    f"plugin {plugin}: {hook} returned {type(answer).__name__}, "
                    "not names to functions"
                )
            for name, function in answer.items():
                if name in merged:
                    raise PluginConflict(
                        f"{what} {name!r} is claimed by {owner[name]} and by {plugin}"
                    )
                if not callable(function):
                    raise ContractError(
                        f"plugin {plugin}: {what} {name!r} is {type(function).__name__}, "
                        "not a function"
                    )
                merged[name], owner[name] = function, plugin
        return merged


def compare_provenance(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence for each distribution or local file in which two `provenance()` differ."""
    lines = []
    for part, word in (("distributions", "plugin"), ("files", "local plugin")):
        old, new = before.get(part, {}), now.get(part, {})
        for name in sorted({*old, *new}):
            was, has = (str(side.get(name, "absent"))[:16] for side in (old, new))
            if old.get(name) != new.get(name):
                lines.append(f"{word} {name}: {was} before, {has} now")
    return tuple(lines)


def _default_factories(registry: Registry) -> ModuleType:
    """A plugin with a `trylast` factory for each kind, which resolves the name by its entry."""
    module = ModuleType("miles_default_factories")

    def factory_of(kind: str) -> Callable[..., Any]:
        def factory(name: str, config: Any, context: Any) -> Any:
            component = registry.component(kind, name)
            try:
                return component(config, context)
            except MilesError:
                raise
            except (Exception, SystemExit) as error:  # other people's code: name whose
                named = PluginError(
                    f"{registry.entry(kind, name)} cannot be built: {type(error).__name__}: {error}"
                )
                inside = error.__traceback__.tb_next if error.__traceback__ else None
                raise placed(named, inside) from error

        return hookspecs.hookimpl(trylast=True)(factory)

    for kind in KINDS:
        setattr(module, f"miles_make_{kind}", factory_of(kind))
    return module
