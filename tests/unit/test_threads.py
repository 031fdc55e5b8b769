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


def test_in_thread_uses_a_thread_again_but_not_one_that_is_stuck() -> None:
    async def main() -> list[int]:
        async def ask(seconds: float = 0.0, timeout_s: float = 5) -> int:
            def call() -> int:
                time.sleep(seconds)
                return threading.get_ident()

            return await in_thread(call, name="sums", timeout_s=timeout_s)

        first, second = await ask(), await ask()
        with pytest.raises(TimeoutError):
            await ask(0.5, 0.02)
        return [first, second, await ask()]

    first, second, after = asyncio.run(main())
    assert first == second != after
