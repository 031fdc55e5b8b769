"""One stage while it is being put together: values with their origins, and the chosen components.

Merging only; files are read by `miles.composing.compose`, and values are validated by
`miles.config`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from miles.composing.compose import AUTO, Files
from miles.errors import MilesError, choices
from miles.plugins import Registry
from miles.protocols import KINDS
from miles.registry import schema
from miles.settings import Settings

__all__ = ["COMMAND_LINE", "DEFAULT", "Draft", "Part", "Tree"]

COMMAND_LINE = "command line"
DEFAULT = "default"

Path = tuple[str, ...]
_SETTINGS = tuple(f.name for f in fields(Settings))


class Tree:
    """Leaves by path, each with where it came from; later ones win, mappings merge."""

    def __init__(self) -> None:
        self.leaves: dict[Path, tuple[Any, str]] = {}

    def put(self, path: Path, value: Any, origin: str) -> None:
        """Set a value; the keys of a mapping are set one by one, an empty one replaces."""
        if isinstance(value, Mapping) and (value or not path):
            for key, below in value.items():
                self.put((*path, str(key)), below, origin)
            return
        self.drop(path)
        for end in range(1, len(path)):
            self.leaves.pop(path[:end], None)
        self.leaves[path] = (value, origin)

    def drop(self, path: Path) -> None:
        """Forget a value and everything below it."""
        for known in [p for p in self.leaves if p[: len(path)] == path]:
            del self.leaves[known]

    def heads(self) -> list[str]:
        """First words of all paths, in order."""
        return list(dict.fromkeys(p[0] for p in self.leaves if p))

    def is_null(self, path: Path) -> bool:
        """Whether the value there is null."""
        return path in self.leaves and self.leaves[path][0] is None

    def below(self, head: str) -> Tree:
        """The part under a first word."""
        tree = Tree()
        tree.leaves = {p[1:]: leaf for p, leaf in self.leaves.items() if p[0] == head and p[1:]}
        return tree

    def nested(self) -> dict[str, Any]:
        """As nested mappings."""
        out: dict[str, Any] = {}
        for path, (value, _) in self.leaves.items():
            node = out
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = value
        return out

    def origin(self, path: Path) -> str:
        """Where the value at a path came from, or the first of those below it, or the one above."""
        if path in self.leaves:
            return self.leaves[path][1]
        below = (leaf[1] for p, leaf in self.leaves.items() if p[: len(path)] == path)
        return next(below, self.origin(path[:-1]) if path else "")


@dataclass(slots=True, kw_only=True)
class Part:
    """A chosen component."""

    kind: str
    """Its kind."""
    choice: str
    """The word that chose it: a registered name, or a file that presets one."""
    name: str
    """Registered name; `AUTO` until the model is known."""
    origin: str
    """Who chose it."""
    values: Tree = field(default_factory=Tree)
    """What files and overrides set; defaults are not among them."""
    fault: str = ""
    """Why it cannot be used."""


class Draft:
    """One stage: loop settings, and components by kind."""

    def __init__(self, files: Files, registry: Registry) -> None:
        self._files, self._registry = files, registry
        self.parts: dict[str, list[Part]] = {kind: [] for kind in KINDS}
        """Chosen components; at most one unless the kind takes many."""
        self.settings, self.stages = Tree(), Tree()
        self.faults: list[str] = []
        """What could not be assigned."""

    def copy(self) -> Draft:
        """An independent draft with the same content."""
        twin = Draft(self._files, self._registry)
        twin.parts = copy.deepcopy(self.parts)
        twin.settings, twin.faults = copy.deepcopy(self.settings), list(self.faults)
        return twin

    # ---------------------------------------------------------------- assigning

    @staticmethod
    def is_choice(path: Path) -> bool:
        """Whether assigning there chooses a component: `engine`, `engine.name`."""
        if path[0] not in KINDS:
            return False
        return len(path) == 1 or (path[1:] == ("name",) and not KINDS[path[0]].many)

    def merge(self, tree: Tree) -> None:
        """Assign every leaf; choices come before the fields of what they choose."""
        for path in sorted(tree.leaves, key=lambda p: not self.is_choice(p)):
            self.assign(path, *tree.leaves[path])

    def assign(self, path: Path, value: Any, origin: str, *, delete: bool = False) -> None:
        """Set one value, or with `delete` go back to what it would be without files."""
        head = path[0]
        if head in KINDS:
            self._assign_part(path, None if delete else value, origin, delete)
        elif head == "stages" and origin != COMMAND_LINE:
            if len(path) == 1:
                self.stages = Tree()
            self.stages.put(path[1:], value or {}, origin)
        elif head not in _SETTINGS or head == "experiment":
            self.faults.append(f"{self.refusal(path)} ({origin})")
        elif delete:
            self.settings.drop(path)
        else:
            self.settings.put(path, value, origin)

    def _assign_part(self, path: Path, value: Any, origin: str, delete: bool) -> None:
        kind, many = path[0], KINDS[path[0]].many
        depth = 2 if many else 1
        if self.is_choice(path):
            if isinstance(value, Mapping):
                tree = Tree()
                tree.put(path, value, origin)
                if path not in tree.leaves:
                    self.merge(tree)
                return
            self._choose_all(kind, value, origin)
            return
        part = self._part(path)
        if part is None and many:
            part = self._chosen(kind, path[1], origin)
            self.parts[kind].append(part)
        if part is None:
            self.faults.append(f"{'.'.join(path)}: {self.refusal(path)} ({origin})")
        elif delete:
            part.values.drop(path[depth:])
        elif path[depth:] or value:
            part.values.put(path[depth:], value, origin)

    def _choose_all(self, kind: str, value: Any, origin: str) -> None:
        names = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            self.faults.append(f"{kind}: expected a name, got {value!r} ({origin})")
        elif len(names) > 1 and not KINDS[kind].many:
            self.faults.append(f"{kind}: one name is wanted, got {', '.join(names)} ({origin})")
        else:
            self.parts[kind] = [self._chosen(kind, n, origin) for n in dict.fromkeys(names)]

    def _chosen(self, kind: str, choice: str, origin: str) -> Part:
        """The part for a choice: the present one, values kept, or a fresh one with its file's."""
        for part in self.parts[kind]:
            if part.choice == choice:
                part.origin = origin
                return part
        try:
            node = self._files.node(kind, choice)
        except MilesError as error:
            fault = f"{error.detail} ({origin})"
            return Part(kind=kind, choice=choice, name=choice, origin=origin, fault=fault)
        part = Part(kind=kind, choice=choice, name=node.name, origin=origin)
        if node.values:
            part.values.put((), node.values, node.label)
        return part

    def _part(self, path: Path) -> Part | None:
        parts = self.parts[path[0]]
        if KINDS[path[0]].many:
            return next((p for p in parts if p.choice == path[1]), None)
        return parts[0] if parts else None

    # ---------------------------------------------------------------- components

    def component(self, part: Part) -> type[Any] | None:
        """Its class; None, and a fault in the part, when it cannot be had. Settles `AUTO`."""
        if part.fault:
            return None
        try:
            if part.kind == "tito" and part.name == AUTO:
                models = self.parts["model"]
                model = self.component(models[0]) if models else None
                if model is None:
                    return None  # told with the model
                part.name, part.origin = _handler(model, models[0]), f"model {models[0].name!r}"
            return self._registry.component(part.kind, part.name)
        except MilesError as error:
            part.fault = f"{error.detail} ({part.origin})"
            return None

    def accepts(self, path: Path) -> bool:
        """Whether an override there means something in this stage."""
        if path[0] not in KINDS:
            return path[0] in _SETTINGS
        if self.is_choice(path):
            return True
        part = self._part(path)
        depth = 2 if KINDS[path[0]].many else 1
        if part is None:
            return False
        component = self.component(part)
        return component is None or len(path) == depth or path[depth] in _keys(component)

    def refusal(self, path: Path) -> str:
        """Why an override there means nothing."""
        head, many = path[0], path[0] in KINDS and KINDS[path[0]].many
        if head not in KINDS:
            return f"there is no key {head!r}; {choices(head, [*KINDS, *_SETTINGS])}"
        part = self._part(path)
        chosen = ", ".join(p.choice for p in self.parts[head]) or "none"
        if part is None and many:
            return f"{head} {path[1]!r} is not chosen (chosen: {chosen})"
        if part is None:
            return f"no {head} is chosen; choose one with {head}=NAME"
        key = path[2 if many else 1]
        component = self.component(part)
        known = _keys(component) if component else ()
        hint = f"; to choose it: {head}={key}" if key in self._files.options(head) else ""
        return f"{head} {part.name!r} has no key {key!r}; {choices(key, known)}{hint}"

    # ---------------------------------------------------------------- the result

    def resolved(self) -> tuple[Tree, list[str]]:
        """Every value, defaults included and interpolations replaced, and every fault so far."""
        tree, faults = Tree(), list(self.faults)
        tree.put((), schema.defaults(Settings), DEFAULT)
        for path, (value, origin) in self.settings.leaves.items():
            tree.put(path, value, origin)
        for kind, parts in self.parts.items():
            for part in parts:
                component = self.component(part)
                if part.fault:
                    faults.append(part.fault)
                if component is None:
                    continue
                at = (kind, part.choice) if KINDS[kind].many else (kind,)
                tree.put((*at, "name"), part.name, part.origin)
                if defaults := schema.defaults(component.Config):
                    tree.put(at, defaults, DEFAULT)
                for path, (value, origin) in part.values.leaves.items():
                    tree.put((*at, *path), value, origin)
        faults += _interpolate(tree)
        return tree, faults


def _handler(model: type[Any], part: Part) -> str:
    """The handler that a model wants, which may depend on how it is configured."""
    choose = getattr(model, "choose_tito", None)
    if choose is None:
        return str(model.tito)
    tree = Tree()
    tree.put((), schema.defaults(model.Config), DEFAULT)
    for path, (value, origin) in part.values.leaves.items():
        tree.put(path, value, origin)
    return str(choose(tree.nested()))


def _keys(component: type[Any]) -> list[str]:
    return [f.name for f in fields(component.Config)]


def _interpolate(tree: Tree) -> list[str]:
    """Replace every `${...}` in place; one fault for each that cannot be."""
    faults = []
    wanted = {p: leaf for p, leaf in tree.leaves.items() if "${" in str(leaf[0])}
    conf = OmegaConf.create(tree.nested()) if wanted else None
    for path, (value, origin) in wanted.items():
        node: Any = conf
        try:
            for key in path:
                node = node[key]
            plain = (
                OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            )
        except OmegaConfBaseException as error:
            what = str(error).splitlines()[0]
            faults.append(f"{'.'.join(path)}: {value!r} cannot be resolved: {what} ({origin})")
            continue
        tree.leaves[path] = (plain, origin)
    return faults
