"""The suites pass what is good, and each check notices the component that breaks its promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles import ConfigError
from miles.plugins import Registry
from miles.protocols import KINDS
from miles.testing import FakeEnvironment, context, contract

HERE = Path(__file__).parent
REGISTRY = Registry.load(files=[HERE / "broken.py", HERE / "boxes.py"])
REGISTRY.verify()

LOCAL = [(e.kind, e.name) for e in REGISTRY.entries if e.local and e.kind != "hook"]
GOOD = [(kind, name) for kind, name in LOCAL if name.startswith("good")]
BROKEN = [(kind, name) for kind, name in LOCAL if not name.startswith("good")]
CONFIGS = {"engine": {"loaded": False}}


def _check_of(kind: str, name: str) -> contract.Check:
    """The check that a broken component is named after."""
    found = [c for c in contract.checks(kind) if f"{name}_".startswith(f"{c.name}_")]
    return max(found, key=lambda c: len(c.name))


@pytest.mark.parametrize(("kind", "name"), GOOD)
def test_suite_passes_a_good_component(kind: str, name: str) -> None:
    assert contract.check(kind, name, REGISTRY, config=CONFIGS.get(kind)) == []


SLOW = {("runtime", "stop"), ("runtime", "end")}
"""They wait for processes that do not end."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*each, marks=pytest.mark.slow if each in SLOW else ()) for each in BROKEN],
)
def test_check_notices_the_broken_component(kind: str, name: str, miles_context) -> None:
    check = _check_of(kind, name)
    with pytest.raises(Exception, match=r"\w{3,}") as raised:
        contract.run(check, kind, name, REGISTRY, context=miles_context, config=CONFIGS.get(kind))
    assert not isinstance(raised.value, contract.Inapplicable)


@pytest.mark.parametrize("kind", KINDS)
def test_checks_say_what_they_promise(kind: str) -> None:
    checks = contract.checks(kind)
    assert len(checks) > 8
    assert len({c.name for c in checks}) == len(checks)
    for check in checks:
        assert check.promise.endswith("."), check.name
        assert len(check.promise.split()) > 3, check.name


def test_every_kind_has_a_broken_component() -> None:
    assert {kind for kind, _ in BROKEN} == set(KINDS)


def test_checks_of_an_unknown_kind_names_the_close_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'environment'"):
        contract.checks("enviroment")


def test_check_says_kind_name_check_and_fault() -> None:
    faults = contract.check("environment", "splits_disjoint", REGISTRY)
    assert len(faults) == 1
    assert faults[0].startswith("environment splits_disjoint: splits_disjoint: 4 ids are in both")


def test_check_stops_when_the_component_cannot_be_built() -> None:
    faults = contract.check("environment", "good", REGISTRY, config={"trian": 3})
    assert len(faults) == 1
    assert "builds: ConfigError" in faults[0]
    assert "did you mean 'train'" in faults[0]


PICKY = """
from dataclasses import dataclass

from miles.testing import FakeEnvironment


class Ordered:
    "Tasks by a key that only one environment gives them."

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config, context):
        self.tasks = sorted(context.environment.tasks("train"), key=lambda t: t.data["size"])
        self.at = 0

    def next(self):
        self.at += 1
        return self.tasks[self.at % len(self.tasks)]

    def admit(self, group): ...
    def observe(self, group): ...
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


miles_components = {"selector": {"ordered": Ordered}}
"""


class Sized(FakeEnvironment):
    """Tasks that say their size, and are no others'."""

    def tasks(self, split):
        return [replace(t, id=f"my-{t.id}", data={"size": 1}) for t in super().tasks(split)]


def test_selector_of_one_environment_is_told_that_another_stood_in(tmp_path: Path) -> None:
    """It said `KeyError: 'size'` and no word of tasks that were not those of the author."""
    (tmp_path / "ordered.py").write_text(PICKY)
    registry = Registry.load(files=[tmp_path / "ordered.py"])
    (fault,) = contract.check("selector", "ordered", registry)
    assert "cannot be built: KeyError: 'size'\n  File " in fault
    assert fault.endswith(
        "the suite's own environment stood in, miles.testing.FakeEnvironment; in a test of yours, "
        "a fixture miles_context with environment=... brings another"
    )


def test_selector_is_held_to_the_tasks_of_the_environment_that_was_given(tmp_path: Path) -> None:
    """`next` compared with the stand-in's tasks, whatever the context brought."""
    (tmp_path / "ordered.py").write_text(PICKY)
    registry = Registry.load(files=[tmp_path / "ordered.py"])
    around = context(tmp_path, environment=Sized())
    assert contract.check("selector", "ordered", registry, context=around) == []


def test_check_gives_what_the_component_raised_as_a_fault() -> None:
    faults = contract.check("tracker", "takes_odd_values", REGISTRY)
    assert any("ValueError: nan is not finite" in fault for fault in faults)


def test_check_builds_with_the_example_config(miles_context) -> None:
    with pytest.raises(ConfigError, match="path"):
        contract.run(
            contract.checks("environment")[0],
            "environment",
            "dataset",
            REGISTRY,
            config={},
            context=miles_context,
        )
    contract.run(
        contract.checks("environment")[0], "environment", "dataset", REGISTRY, context=miles_context
    )


def test_import_is_light_notices_torch(tmp_path: Path, miles_context) -> None:
    heavy = tmp_path / "heavy.py"
    heavy.write_text(
        "import torch\n"
        "from miles.testing import FakeEnvironment\n"
        "class Heavy(FakeEnvironment):\n    'Imports torch at once.'\n"
        "miles_components = {'environment': {'heavy': Heavy}}\n"
    )
    faults = contract.check("environment", "heavy", Registry.load(files=[heavy]))
    assert len(faults) == 1
    assert "imports torch; move that into a neighbouring module" in faults[0]
