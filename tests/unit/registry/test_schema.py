"""A `Config` as a schema: sentences, defaults, and plain values made an object."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.errors import ConfigError, ContractError
from miles.registry import schema

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A part."""

    size: int = 2
    """How large."""

    def __post_init__(self) -> None:
        if self.size > 9:
            raise ValueError(f"size {self.size} is above 9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What others build on."""

    path: str
    """Where
    it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything(Base):
    """A field of each type that components use."""

    rate: float = 1.0
    """How fast."""
    on: bool = False
    """Whether."""
    mode: Literal["fast", "exact"] = "fast"
    """Which way."""
    limit: int | None = None
    """At most."""
    names: tuple[str, ...] = ()
    """Which ones."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """How much of each."""
    inner: Inner = field(default_factory=Inner)
    """A part."""
    silent: int = 0


def faults(**values: Any) -> str:
    made, found = schema.convert(Everything, {"path": "x"} | values, owner="kind 'name'")
    assert (made is None) == bool(found)
    return "\n".join(found)


def test_fields_have_types_defaults_and_sentences_inherited_ones_too() -> None:
    rows = {f.name: (f.type_text, f.default, f.doc) for f in schema.fields(Everything)}
    assert rows["path"] == ("str", schema.REQUIRED, "Where it is.")
    assert rows["mode"] == ("'fast' | 'exact'", "fast", "Which way.")
    assert rows["limit"] == ("int | None", None, "At most.")
    assert rows["names"] == ("tuple[str, ...]", [], "Which ones.")
    assert rows["shares"] == ("Mapping[str, float]", {}, "How much of each.")
    assert rows["inner"] == ("Inner", {"size": 2}, "A part.")
    assert rows["silent"] == ("int", 0, "")
    assert repr(schema.REQUIRED) == "(required)"


def test_defaults_leave_out_what_is_required() -> None:
    assert "path" not in schema.defaults(Everything)
    assert schema.defaults(Everything)["inner"] == {"size": 2}


def test_convert_builds_the_frozen_object() -> None:
    values = {"path": 7, "rate": 2, "names": ["a"], "shares": {"a": 1}, "inner": {"size": 3}}
    made, found = schema.convert(Everything, values, owner="")
    assert found == []
    assert made == Everything(
        path="7", rate=2.0, names=("a",), shares={"a": 1.0}, inner=Inner(size=3)
    )
    assert isinstance(made.rate, float) and isinstance(made.shares, schema.Frozen)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rat": 1}, "kind 'name': rat: there is no such key; did you mean 'rate'? valid: inner,"),
        ({"rate": "fast"}, "kind 'name': rate: expected float, got str 'fast'"),
        ({"on": 1}, "on: expected bool, got int 1"),
        ({"silent": True}, "silent: expected int, got bool True"),
        ({"silent": None}, "silent: expected int, got null"),
        ({"mode": "exat"}, "mode: str 'exat' is not a choice; did you mean 'exact'? valid: exact"),
        ({"limit": "x"}, "limit: expected int, got str 'x'"),
        ({"names": "a"}, "names: expected a list of str, got str 'a'"),
        ({"names": ["a", None]}, "names.1: expected str, got null"),
        ({"shares": {"a": "b"}}, "shares.a: expected float, got str 'b'"),
        ({"shares": [1]}, "shares: expected Mapping[str, float], got list [1]"),
        ({"inner": 3}, "inner: expected a mapping of Inner's keys, got int 3"),
        ({"inner": {"size": 10}}, "inner: size 10 is above 9"),
        ({"inner": {"sise": 1}}, "inner.sise: there is no such key; did you mean 'size'?"),
        ({"path": "???"}, "path: a value is required (str): Where it is."),
    ],
)
def test_convert_says_what_where_and_what_instead(values: dict[str, Any], message: str) -> None:
    assert message in faults(**values)


def test_convert_tells_every_fault_and_where_values_came_from() -> None:
    _, found = schema.convert(
        Everything,
        {"rate": "x", "inner": {"size": "y"}},
        owner="engine 'e'",
        origin=lambda key: {"inner.size": "conf/engine/e.yaml"}.get(key, ""),
    )
    assert found == [
        "engine 'e': path: a value is required (str): Where it is.",
        "engine 'e': rate: expected float, got str 'x'",
        "engine 'e': inner.size: expected int, got str 'y' (conf/engine/e.yaml)",
    ]


def test_build_raises_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        schema.build(Everything, {"on": "maybe"}, owner="thing")
    assert str(caught.value).splitlines() == [
        "thing: path: a value is required (str): Where it is.",
        "thing: on: expected bool, got str 'maybe'",
    ]


@given(
    st.builds(
        Everything,
        path=st.text(),
        rate=st.floats(allow_nan=False),
        on=st.booleans(),
        mode=st.sampled_from(["fast", "exact"]),
        limit=st.none() | st.integers(),
        names=st.lists(st.text(), max_size=3).map(tuple),
        shares=st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
        inner=st.builds(Inner, size=st.integers(-5, 9)),
        silent=st.integers(),
    )
)
def test_convert_gives_back_what_plain_took_apart(config: Everything) -> None:
    if config.path == "???":
        return  # means that a value is missing
    made, found = schema.convert(Everything, schema.plain(config), owner="")
    assert (made, found) == (config, [])


def test_frozen_cannot_be_changed_by_any_method_and_stays_a_dict() -> None:
    frozen = schema.freeze({"a": [1, {"b": 2}]})
    assert frozen == {"a": (1, {"b": 2})}
    for change in (
        lambda: frozen.update(a=1),
        lambda: frozen.pop("a"),
        lambda: frozen.clear(),
        lambda: frozen["a"][1].setdefault("c", 3),
        lambda: frozen.__ior__({"c": 1}),
    ):
        with pytest.raises(TypeError, match="immutable once composed"):
            change()
    again = pickle.loads(pickle.dumps(frozen))
    assert again == frozen and type(again) is schema.Frozen


def test_hints_name_an_annotation_that_does_not_exist_at_run_time() -> None:
    @dataclass(frozen=True)
    class Config:
        key: Hashable = 0

    with pytest.raises(ContractError, match=r"Config: an annotation cannot be resolved.*Hashable"):
        schema.hints(Config)


def test_frozen_dataclass_is_a_class_and_frozen() -> None:
    @dataclass
    class Loose:
        """Not frozen."""

    assert schema.frozen_dataclass(Inner)
    assert not any(map(schema.frozen_dataclass, (Loose, Inner(), dict, None)))
