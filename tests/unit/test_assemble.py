"""What is refused when the parts of a stage come together; how workers find each other again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from miles import ConfigError, WorkerError
from miles.assemble import _agree, _connect_again
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


@pytest.mark.parametrize(("failures", "lives"), [(2, True), (99, True), (2, False)])
def test_assemble_connects_a_new_rollout_worker_once_engines_that_died_with_it_are_back(
    monkeypatch: pytest.MonkeyPatch, failures: int, lives: bool
) -> None:
    """A machine that took both with it ended the run, whatever max_restarts was."""
    monkeypatch.setattr("miles.assemble._RETRY_S", 0.001)
    monkeypatch.setattr("miles.assemble._ENGINES_BACK_S", 0.05)
    tried: list[int] = []

    async def ping() -> None:
        if not lives:
            raise WorkerError("rollout: it exited with code 1")

    async def connect() -> Any:
        tried.append(1)
        if len(tried) <= failures:
            raise WorkerError("engine: the worker at h:1 cannot be reached")

    worker = FakeHandle("rollout", {"rollouts": SimpleNamespace(ping=ping)})
    connecting = _connect_again(connect, worker, ping_s=1.0)
    if failures == 2 and lives:
        asyncio.run(connecting)
        assert len(tried) == 3
        return
    with pytest.raises(WorkerError, match="cannot be reached" if lives else "exited with code 1"):
        asyncio.run(connecting)
    assert len(tried) == 1 or lives
