"""A server's secret, which outlives it, and the signals that end it."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles import ConfigError, asked_to_stop, secret_in


def test_secret_is_made_once_and_read_by_its_owner_alone(tmp_path):
    file = tmp_path / "token"
    secret = secret_in(file)
    assert len(secret) >= 40 and secret_in(file) == secret
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret_in(tmp_path / "another") != secret


def test_secret_that_is_empty_lets_nobody_in(tmp_path):
    (tmp_path / "token").write_text(" \n")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(ConfigError, match=r"token is empty; remove it"):
        secret_in(tmp_path / "token")


def test_secret_that_others_can_read_is_refused(tmp_path):
    secret_in(tmp_path / "token")
    (tmp_path / "token").chmod(0o640)
    with pytest.raises(ConfigError, match=r"token is not its owner's alone \(mode 640\)"):
        secret_in(tmp_path / "token")


def test_secret_of_many_that_start_at_once_is_one(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: secret_in(tmp_path / "token"), range(64)))
    assert len(found) == 1 and [p.name for p in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait(number):
    async def main():
        task = asyncio.create_task(asked_to_stop())
        await asyncio.sleep(0)
        os.kill(os.getpid(), number)
        await asyncio.wait({task}, timeout=10)
        assert task.done() and task.exception() is None

    before = signal.getsignal(number)
    try:
        asyncio.run(main())
    finally:
        signal.signal(number, before)
