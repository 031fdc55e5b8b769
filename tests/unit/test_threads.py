"""Functions beside the event loop that can be given up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from miles.threads import in_thread


def test_in_thread_gives_what_the_call_returns_without_blocking_the_loop() -> None:
    async def main() -> tuple[str, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        name = await in_thread(
            lambda: time.sleep(0.1) or threading.current_thread().name, name="sums", timeout_s=5
        )
        ticking.cancel()
        return name, ticks

    name, ticks = asyncio.run(main())
    assert name == "sums" and ticks >= 3


def test_in_thread_raises_what_the_call_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 // 0, name="sums", timeout_s=5))


def test_in_thread_that_is_given_up_ends_later_unseen() -> None:
    ended = threading.Event()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await in_thread(lambda: time.sleep(0.1) or ended.set(), name="slow", timeout_s=0.02)
        await asyncio.to_thread(ended.wait, 5)  # its answer finds nobody, and disturbs nobody

    asyncio.run(main())
    assert ended.is_set()


def test_process_exits_without_a_thread_that_was_given_up() -> None:
    code = (
        "import asyncio, time; from miles.threads import in_thread\n"
        "try: asyncio.run(in_thread(lambda: time.sleep(600), name='stuck', timeout_s=0.05))\n"
        "except TimeoutError: print('given up')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "given up\n", "")
