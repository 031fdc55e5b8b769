"""Whether a component looks as its kind's protocol says; nothing of it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from miles.errors import ContractError
from miles.registry.conformance import check_class, component_faults
from miles.testing import CachingEngine, FakeEngine, FakeEnvironment, FakeTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Nothing to set."""


class Selector:
    """Keeps its protocol."""

    Config = Config

    def __init__(self, config: Any, context: Any) -> None:
        """Nothing to keep."""

    def next(self) -> Any: ...
    def admit(self, group: Any) -> Any: ...
    def observe(self, group: Any) -> None: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def changed(**members: Any) -> type:
    """The selector with other members; None removes one."""
    body = {k: v for k, v in vars(Selector).items() if members.get(k, v) is not None}
    body |= {k: v for k, v in members.items() if v is not None}
    body.pop("__dict__"), body.pop("__weakref__")
    return type("Selector", (), body)


def test_component_that_keeps_its_protocol_has_no_faults() -> None:
    assert component_faults("selector", Selector) == []
    assert component_faults("selector", Selector(None, None)) == []
    for kind, fake in (("engine", FakeEngine), ("engine", CachingEngine), ("trainer", FakeTrainer)):
        assert component_faults(kind, fake()) == [], fake


async def coroutine(self: Any, group: Any) -> Any:
    """A coroutine where a function is wanted."""


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ({"admit": None}, "has no method admit(group)"),
        ({"admit": lambda self: None}, "admit(self) cannot be called as admit(group)"),
        ({"admit": lambda self, a, b: None}, "admit(self, a, b) cannot be called as admit(group)"),
        ({"admit": coroutine}, "admit must not be a coroutine: def admit(group)"),
        ({"admit": 3}, "admit is int, not a method admit(group)"),
        ({"next": lambda self, *, split: None}, "next(self, *, split) cannot be called as next()"),
    ],
)
def test_component_faults_are_told_of_a_class(members: dict[str, Any], fault: str) -> None:
    assert component_faults("selector", changed(**members)) == [fault]


def test_component_may_take_more_than_it_is_given_and_name_it_as_it_likes() -> None:
    lenient = changed(admit=lambda self, of_these, strict=True: None, next=lambda *args: None)
    assert component_faults("selector", lenient) == []
    assert component_faults("selector", lenient(None, None)) == []


def test_component_that_lacks_everything_is_told_everything() -> None:
    assert component_faults("sandbox", object()) == ["has no method open(task)"]
    assert len(component_faults("selector", object())) == 5


def test_coroutines_are_wanted_where_the_protocol_has_them() -> None:
    class Sandbox:
        def open(self, task: Any) -> Any: ...

    assert component_faults("sandbox", Sandbox) == [
        "open must be a coroutine: async def open(task)"
    ]


def test_attributes_are_asked_of_an_instance_and_never_run() -> None:
    class Unready(FakeTrainer):
        @property
        def version(self) -> int:  # type: ignore[override]
            raise RuntimeError("not before it is built")

        @version.setter
        def version(self, value: int) -> None: ...

    assert component_faults("trainer", Unready()) == []
    bare = FakeEngine()
    assert component_faults("engine", bare) == []
    assert "has no attribute samples" in component_faults("engine", Selector(None, None))
    assert "has no attribute samples" not in component_faults("engine", Selector)


@pytest.mark.parametrize(
    ("depth", "method", "fault"),
    [
        ("episode", lambda self, task, seed: None, ""),
        (
            "play",
            lambda self, task, seed, tools: None,
            "play must be a coroutine: async def play(task, seed, tools)",
        ),
        (
            "rollout",
            lambda self, task, tools: None,
            "rollout must be a coroutine: async def rollout(task, tools)",
        ),
    ],
)
def test_environment_needs_one_depth_of_the_right_kind(depth: str, method: Any, fault: str) -> None:
    made = type("E", (), {"tasks": lambda self, split: [], depth: method})
    assert component_faults("environment", made) == ([fault] if fault else [])


def test_environment_without_a_depth_is_told_which_there_are() -> None:
    bare = type("E", (), {"tasks": lambda self, split: []})
    (fault,) = component_faults("environment", bare)
    assert "at least one of episode, play, rollout" in fault
    assert component_faults("environment", FakeEnvironment()) == []


@pytest.mark.parametrize(
    ("component", "said"),
    [
        (lambda config, context: None, "names <function"),
        (type("A", (), {}), "class A has no nested Config dataclass"),
        (type("A", (), {"Config": dict}), "A.Config is not a frozen dataclass"),
        (changed(__init__=lambda self, config: None), "cannot be built as Class(config, context)"),
    ],
)
def test_check_class_refuses_and_names_kind_and_name(component: Any, said: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_class("selector", "odd", component)
    assert str(caught.value).startswith("selector 'odd': ") and said in str(caught.value)


def test_check_class_keeps_the_word_name_for_itself() -> None:
    @dataclass(frozen=True)
    class Named:
        name: str = ""

    with pytest.raises(ContractError, match="a field 'name', the word that names the component"):
        check_class("selector", "odd", changed(Config=Named))
    check_class("selector", "good", Selector)
