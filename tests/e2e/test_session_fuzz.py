"""The short form of `tests/bench/session_load.py --fuzz 300`: no 500, no crash, nothing of another
session."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("schemathesis") is None:  # run as a command, and slow to import
    pytest.skip("needs schemathesis", allow_module_level=True)


def _bench():
    path = Path(__file__).parents[1] / "bench" / "session_load.py"
    spec = importlib.util.spec_from_file_location("session_load", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_session_server_stands_requests_that_nobody_thought_of(tmp_path):
    bench = _bench()
    server = bench.Server(str(tmp_path))
    try:
        assert bench.fuzz(server, 10, seed=11) == []
    finally:
        server.end()


@pytest.mark.slow
def test_session_server_loses_no_turn_under_load(tmp_path):
    import asyncio

    bench = _bench()
    server = bench.Server(str(tmp_path))
    try:
        found = asyncio.run(bench.load(server, 60, 10, 0))
    finally:
        server.end()
    for name in ("errors", "turns lost", "token mismatches"):
        assert found[name] == 0
    assert found["array bytes a session"] <= found["bound: 16 a token + 2 kB a turn"]
