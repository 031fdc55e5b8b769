"""What is refused when the parts of a stage come together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from miles import ConfigError
from miles.assemble import _agree
from miles.testing import FakeHandle


def handle(name: str, *fingerprints: str) -> FakeHandle:
    ranks = [{"precision": SimpleNamespace(fingerprint=lambda f=f: f)} for f in fingerprints]
    return FakeHandle(name, *ranks)


def test_assemble_accepts_one_precision_everywhere() -> None:
    sides = [handle("trainer", "fp32", "fp32"), handle("engine", "fp32")]
    assert asyncio.run(_agree("fp32", sides, 5.0)) is None


def test_assemble_refuses_a_rank_of_another_precision() -> None:
    sides = [handle("trainer", "fp32", "fp8")]
    with pytest.raises(ConfigError, match="precision: trainer has fingerprint 'fp8', the driver"):
        asyncio.run(_agree("fp32", sides, 5.0))
