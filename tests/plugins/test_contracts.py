"""Every built-in component keeps the contract of its kind."""

from __future__ import annotations

from importlib.metadata import distribution

import pytest

from miles.protocols import KINDS

AT_VENDORS = {("sandbox", name) for name in ("daytona", "e2b", "agentenv", "modal")}
"""They need a service, which `sandbox/test_vendor_contract.py` has for each."""

BUILT_IN = sorted(
    {
        (entry.group.removeprefix("miles."), entry.name)
        for entry in distribution("miles").entry_points
        if entry.group.startswith("miles.")
    }
    - AT_VENDORS
)


def _each(test):
    for kind, name in reversed(BUILT_IN):
        test = pytest.mark.miles_contract(kind, name)(test)
    return test


@_each
def test_built_in_keeps_its_contract(miles_contract) -> None:
    miles_contract()


def test_built_ins_cover_every_kind_but_sandboxes() -> None:
    missing = set(KINDS) - {kind for kind, _ in BUILT_IN}
    assert missing <= {"sandbox"}
