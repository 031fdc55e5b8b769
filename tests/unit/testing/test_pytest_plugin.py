"""What plugin authors' pytest sees: a light import, one test a promise, faults as failures."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

GOOD = """
    import pytest
    from miles.plugins import Registry

    @pytest.fixture(scope="session")
    def miles_registry():
        return Registry.load(files=[BROKEN])

    @pytest.mark.miles_contract("selector", NAME, config=CONFIG)
    def test_contract(miles_contract):
        miles_contract()
"""
BROKEN = str(Path(__file__).parent / "broken.py")


pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Run pytest on a text in this process; what it said."""

    def call(text: str, **values: object) -> str:
        for name, value in values.items():
            text = text.replace(name, repr(value))
        pytester.makepyfile(test_mine=textwrap.dedent(text))
        ran = pytester.runpytest_inprocess("-q", "-rA", "-p", "no:cacheprovider")
        return "\n".join([*ran.outlines, *ran.errlines])

    return call


def test_marker_makes_one_test_of_every_promise(run) -> None:
    said = run(GOOD, BROKEN=BROKEN, NAME="admit", CONFIG=None)
    assert "PASSED test_mine.py::test_contract[selector-admit-state_continues]" in said
    assert "FAILED test_mine.py::test_contract[selector-admit-admit]" in said
    assert "reason 'I do not like it' is not one word with underscores" in said
    assert "1 failed" in said


def test_marker_hands_the_config_on(run) -> None:
    said = run(GOOD, BROKEN=BROKEN, NAME="shuffle", CONFIG={"epohcs": 1})
    assert "FAILED test_mine.py::test_contract[selector-shuffle-builds]" in said
    assert "there is no such key" in said


def test_fixture_without_the_marker_says_what_to_do(run) -> None:
    said = run("def test_mine(miles_contract):\n    miles_contract()\n")
    assert "mark it with @pytest.mark.miles_contract(kind, name)" in said


def test_context_and_registry_are_there(run) -> None:
    text = """
        def test_mine(miles_context, miles_registry):
            assert miles_context.directory.is_dir()
            assert "local" in miles_registry.names("runtime")
    """
    assert "1 passed" in run(text)


@pytest.mark.parametrize("module", ["miles.testing.pytest_plugin", "miles.testing.contract"])
def test_import_is_light(module) -> None:
    code = (
        f"import {module}, sys; "
        "print([m for m in ('torch', 'transformers', 'hydra', 'stevedore') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "[]"
