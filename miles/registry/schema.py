"""A component's nested `Config` as a schema: fields, defaults, plain values made an object.

Knows nothing of Hydra, files or plugins; where a value came from is handed in as words.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NoReturn, Union

import msgspec

from miles.errors import ConfigError, ContractError, MilesError, choices

__all__ = [
    "REQUIRED",
    "Field",
    "Frozen",
    "convert",
    "defaults",
    "fields",
    "freeze",
    "frozen_dataclass",
    "hints",
    "plain",
]


class _Required:
    """The default of a field that has none."""

    def __repr__(self) -> str:
        return "(required)"


REQUIRED = _Required()
"""Stands where a field has no default."""


class Frozen(dict[str, Any]):
    """A mapping that cannot be changed; it encodes, pickles and compares as the dict it is."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("the configuration is immutable once composed")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return (Frozen, (dict(self),))


def freeze(value: Any) -> Any:
    """Mappings become `Frozen` and lists tuples, all the way down."""
    if isinstance(value, Mapping):
        return Frozen({k: freeze(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of a `Config`."""

    name: str
    """The key."""
    type: Any
    """Its resolved annotation."""
    default: Any
    """A plain value, or `REQUIRED`."""
    doc: str
    """The sentence under it."""

    @property
    def type_text(self) -> str:
        """The annotation as a person writes it."""
        return _type_text(self.type)


def _type_text(hint: Any) -> str:
    if hint is type(None):
        return "None"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint.__name__
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " | ".join(_type_text(a) for a in typing.get_args(hint))
    if args := typing.get_args(hint):
        inside = ", ".join("..." if a is Ellipsis else _type_text(a) for a in args)
        return f"{typing.get_origin(hint).__name__}[{inside}]"
    return getattr(hint, "__name__", str(hint))


def frozen_dataclass(config: Any) -> bool:
    """Whether `config` is a frozen dataclass, as every `Config` must be."""
    return (
        isinstance(config, type)
        and dataclasses.is_dataclass(config)
        and config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    )


@functools.cache
def hints(config: type) -> Mapping[str, Any]:
    """Resolved annotations of a dataclass, by field name. Raises `ContractError` for a name that
    does not exist at run time (an import under `TYPE_CHECKING`)."""
    scope: dict[str, Any] = {}
    owner: Any = sys.modules.get(config.__module__)
    for part in config.__qualname__.split(".")[:-1]:
        owner = getattr(owner, part, None)
        scope.update(vars(owner) if isinstance(owner, type) else {})
    try:
        return typing.get_type_hints(config, localns=scope)
    except NameError as error:
        raise ContractError(
            f"{config.__qualname__}: an annotation cannot be resolved: {error}"
        ) from error


@functools.cache
def _docs(config: type) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for part in reversed(config.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(part))
        except (OSError, TypeError):
            continue  # a class without source (made in an interpreter) has no sentences to show
        body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
        for here, below in pairwise(body):
            if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[here.target.id] = " ".join(str(below.value.value).split())
    return found


@functools.cache
def fields(config: type) -> tuple[Field, ...]:
    """Every key of a dataclass with its type, default and sentence."""
    known, docs = hints(config), _docs(config)
    return tuple(
        Field(name=f.name, type=known[f.name], default=_default(f), doc=docs.get(f.name, ""))
        for f in dataclasses.fields(config)
        if f.init
    )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return plain(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return plain(field.default_factory())
    return REQUIRED


def plain(value: Any) -> Any:
    """Dataclasses become mappings and tuples lists, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def defaults(config: type) -> dict[str, Any]:
    """Plain defaults by key; keys without one are absent."""
    return {f.name: f.default for f in fields(config) if f.default is not REQUIRED}


Origin = Callable[[str], str]
"""From a dotted key to words like `conf/config.yaml` or `command line`; empty when not known."""


def convert(
    config: type, values: Mapping[str, Any], *, owner: str, origin: Origin = lambda key: ""
) -> tuple[Any, list[str]]:
    """`(object, [])`, or `(None, faults)` with every unknown key, missing value and wrong type.

    `owner` begins each fault: `environment 'arithmetic'`.
    """
    faults: list[str] = []
    made = _build(config, values, _Place(owner, (), origin, faults))
    return (None, faults) if faults else (made, [])


def build(config: type, values: Mapping[str, Any], *, owner: str) -> Any:
    """The object, or a `ConfigError` with all faults."""
    made, faults = convert(config, values, owner=owner)
    if faults:
        raise ConfigError("\n".join(faults))
    return made


@dataclass(frozen=True, slots=True)
class _Place:
    owner: str
    path: tuple[str, ...]
    origin: Origin
    faults: list[str]

    def under(self, key: Any) -> _Place:
        return _Place(self.owner, (*self.path, str(key)), self.origin, self.faults)

    def fail(self, what: str) -> None:
        key = ".".join(self.path)
        where = self.origin(key) if key else ""
        head = f"{self.owner}: {key}" if key and self.owner else self.owner or key
        self.faults.append(f"{head}: {what}" + (f" ({where})" if where else ""))


def _build(config: type, values: Any, place: _Place) -> Any:
    if not isinstance(values, Mapping):
        place.fail(f"expected a mapping of {config.__name__}'s keys, got {_shown(values)}")
        return None
    known = {f.name: f for f in fields(config)}
    before = len(place.faults)
    made: dict[str, Any] = {}
    for key in values:
        if key not in known:
            place.under(key).fail(f"there is no such key; {choices(str(key), known)}")
    for name, field in known.items():
        value = values.get(name, REQUIRED)
        if value is REQUIRED or (isinstance(value, str) and value == "???"):
            if field.default is REQUIRED:
                place.under(name).fail(
                    f"a value is required ({field.type_text}): {field.doc}".rstrip(": ")
                )
            continue
        made[name] = _value(field.type, value, place.under(name))
    if len(place.faults) > before:
        return None
    try:
        return config(**made)
    except (ValueError, TypeError, MilesError) as error:
        place.fail(str(error))
        return None


def _value(hint: Any, value: Any, place: _Place) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, value, place)
    if origin is Literal:
        if not any(value == a and type(value) is type(a) for a in args):
            place.fail(f"{_shown(value)} is not a choice; {choices(str(value), map(str, args))}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        rest = [a for a in args if a is not type(None)]
        if len(rest) == 1:
            return _value(rest[0], value, place)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(_value(args[0], v, place.under(i)) for i, v in enumerate(value))
        place.fail(f"expected a list of {_type_text(args[0])}, got {_shown(value)}")
        return None
    if (
        isinstance(origin, type)
        and issubclass(origin, Mapping)
        and args
        and isinstance(value, Mapping)
    ):
        return Frozen({k: _value(args[1], v, place.under(k)) for k, v in value.items()})
    if hint is str and type(value) is int:
        return str(value)  # `run.name=7`: Hydra reads a number, and its text is the same
    try:
        return freeze(msgspec.convert(value, hint))
    except msgspec.ValidationError:
        place.fail(f"expected {_type_text(hint)}, got {_shown(value)}")
        return None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    kind = "a mapping" if isinstance(value, Mapping) else type(value).__name__
    return f"{kind} {value!r}" if len(repr(value)) < 60 else kind
