"""Every built-in component keeps the contract of its kind."""

from __future__ import annotations

from importlib.metadata import distribution

import pytest

from miles.protocols import KINDS
from miles_plugins.sandbox.process.bubblewrap import faults

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


ELSEWHERE = {("sandbox", name) for name in ("agentenv", "daytona", "e2b", "modal")}
"""They need a server: `sandbox/test_vendor_contract.py` starts one and runs the suite."""
ELSEWHERE |= {("runtime", "ray")}
"""It needs a cluster, which `runtime/test_ray.py` starts once."""


def _each(test):
    for kind, name in reversed([each for each in BUILT_IN if each not in ELSEWHERE]):
        test = pytest.mark.miles_contract(kind, name)(test)
    return test


@_each
def test_built_in_keeps_its_contract(miles_contract, request) -> None:
    if "sandbox-process" in request.node.name and (missing := faults()):
        pytest.skip("; ".join(missing))
    if "transport-rdma" in request.node.name:
        pytest.importorskip("mooncake.engine", reason="needs libibverbs", exc_type=ImportError)
    miles_contract()


def test_built_ins_cover_every_kind() -> None:
    assert set(KINDS) == {kind for kind, _ in BUILT_IN}
