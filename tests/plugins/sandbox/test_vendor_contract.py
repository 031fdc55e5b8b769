"""Sandboxes at vendors keep the contract of their kind: the vendor's own SDK against a local server
that speaks its protocol and really runs commands."""

from __future__ import annotations

import pytest

from miles.testing import contract

pytestmark = pytest.mark.slow

CHECKS = [
    pytest.param(name, check, config, id=f"{name}-{check.name}")
    for name, config in {"daytona": None, "e2b": None, "modal": None, "agentenv": "own"}.items()
    for check in contract.checks("sandbox")
]


@pytest.mark.parametrize(("name", "check", "config"), CHECKS)
def test_vendor_keeps_the_contract(
    name, check, config, open_vendor, miles_registry, miles_context
) -> None:
    case = open_vendor(name)
    values = case.kind.config(case.vendor.url) if config else None
    try:
        contract.run(check, "sandbox", name, miles_registry, config=values, context=miles_context)
    except contract.Inapplicable as reason:
        pytest.skip(str(reason))
    assert case.vendor.boxes() == [], "the check left a box behind"
