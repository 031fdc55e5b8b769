"""One Ray cluster for the slow tests of this folder."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# 127.0.0.1 stays what it is; Ray reads this once, as it is imported
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of the head of two nodes on loopback, with 4 CPUs and 2 pretended GPUs each; it wants
    a token, which is in the environment then."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    kept = dict(os.environ)
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    cluster = None
    try:
        for _ in range(3):  # Ray gives its own processes 15 s, whatever else the machine does
            cluster, address = _start()
            if address:
                break
        assert cluster is not None and address, "the cluster did not start"
        yield address
        cluster.stdin.close()
        cluster.wait(30)
    finally:
        if cluster is not None:
            cluster.kill()
        os.environ.clear()
        os.environ.update(kept)


def _start() -> tuple[subprocess.Popen[str], str]:
    program = Path(__file__).with_name("ray_cluster.py")
    pipe = subprocess.PIPE
    cluster = subprocess.Popen(
        [sys.executable, str(program), "4", "2"], stdin=pipe, stdout=pipe, text=True
    )
    return cluster, cluster.stdout.readline().strip()
