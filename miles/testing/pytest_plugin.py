"""What pytest gets from miles: three fixtures and one marker, for tests of plugins.

It is loaded in every pytest of everyone who has miles installed, so it imports nothing heavy, and
does nothing unless a test asks for it.

    @pytest.mark.miles_contract("environment", "reverse", config={"length": 3})
    def test_reverse_keeps_the_contract(miles_contract):
        miles_contract()

is one test for each promise that the kind `environment` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from miles.protocols import Context

MARKER = "miles_contract"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(kind, name, config=None): run the contract suite of a kind on one component, "
        "a test for each promise; needs the fixture of the same name",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each check of the marked kind."""
    if MARKER not in metafunc.fixturenames:
        return
    marks = list(metafunc.definition.iter_markers(MARKER))
    if not marks:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: mark it with @pytest.mark.{MARKER}(kind, name)"
        )
    from miles.testing import contract

    cases, ids = [], []
    for mark in marks:
        kind, name, config = _arguments(*mark.args, **mark.kwargs)
        for check in contract.checks(kind):
            cases.append((check, kind, name, config))
            ids.append(f"{kind}-{name}-{check.name}")
    metafunc.parametrize(MARKER, cases, ids=ids, indirect=True)


def _arguments(kind: str, name: str, config: Any = None) -> tuple[str, str, Any]:
    return kind, name, config


@pytest.fixture
def miles_context(tmp_path: Path) -> Context:
    """A context in a temporary directory, for building a component."""
    from miles.testing import context

    return context(tmp_path)


@pytest.fixture(scope="session")
def miles_registry() -> Any:
    """Everything installed. Override it to load local files:
    `Registry.load(files=["my_env.py"])`."""
    from miles.plugins import Registry

    return Registry.load()


@pytest.fixture
def miles_contract(
    request: pytest.FixtureRequest, miles_context: Context, miles_registry: Any
) -> Callable[[], None]:
    """Runs one check of the suite named by the marker; call it."""
    check, kind, name, config = request.param

    def run() -> None:
        from miles.testing import contract

        try:
            contract.run(check, kind, name, miles_registry, config=config, context=miles_context)
        except contract.Inapplicable as reason:
            pytest.skip(str(reason))

    return run
