"""Functions beside the event loop that can be given up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from miles.threads import Threads, in_thread, take_turns


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
        "import asyncio, time; from miles.threads import Threads, in_thread\n"
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


def test_threads_run_in_order_and_give_what_calls_return_or_raise() -> None:
    ran: list[int] = []
    threads = Threads(1, name="sums", timeout_s=5)

    async def main() -> list[object]:
        def call(number: int) -> tuple[int, str]:
            ran.append(number)
            return 1 // (number - 3), threading.current_thread().name

        asked = (threads.call(lambda n=number: call(n)) for number in range(6))
        return await asyncio.gather(*asked, return_exceptions=True)

    for _ in range(2):  # in a second event loop as well
        ran.clear()
        found = asyncio.run(main())
        assert ran == [0, 1, 2, 3, 4, 5]
        assert isinstance(found.pop(3), ZeroDivisionError)
        assert found == [(1 // (number - 3), "sums") for number in (0, 1, 2, 4, 5)]


@pytest.mark.parametrize("most", [1, 3])
def test_threads_run_so_many_at_a_time(most: int) -> None:
    lock, running, seen = threading.Lock(), 0, 0

    def call() -> None:
        nonlocal running, seen
        with lock:
            running += 1
            seen = max(seen, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    async def main() -> None:
        threads = Threads(most, name="sums", timeout_s=5)
        await asyncio.gather(*(threads.call(call) for _ in range(12)))

    asyncio.run(main())
    assert seen == most


def test_threads_count_no_waiting_and_leave_what_is_stuck_behind() -> None:
    free = threading.Event()

    async def main() -> list[object]:
        threads = Threads(1, name="sums", timeout_s=0.2)
        slow = [threads.call(lambda: time.sleep(0.15) or 1) for _ in range(3)]
        stuck = threads.call(lambda: free.wait(10))
        return await asyncio.gather(*slow, stuck, threads.call(lambda: 2), return_exceptions=True)

    try:
        found = asyncio.run(main())
    finally:
        free.set()
    assert isinstance(found.pop(3), TimeoutError) and found == [1, 1, 1, 2]


def test_threads_never_begin_what_was_cancelled_before_its_turn() -> None:
    begun: list[str] = []

    async def main() -> None:
        threads = Threads(1, name="sums", timeout_s=5)
        first = asyncio.create_task(threads.call(lambda: time.sleep(0.1) or begun.append("first")))
        second = asyncio.create_task(threads.call(lambda: begun.append("second")))
        await asyncio.sleep(0.02)
        second.cancel()
        await first
        await threads.call(lambda: begun.append("third"))

    asyncio.run(main())
    assert begun == ["first", "third"]


def test_threads_bring_a_stop_iteration_back_as_another_error() -> None:
    """No future takes one, and what ended beside it has to arrive all the same."""

    async def main() -> list[object]:
        threads = Threads(1, name="sums", timeout_s=5)
        calls = (lambda: time.sleep(0.02), lambda: next(iter(())), lambda: 2)
        alone = in_thread(calls[1], name="sums", timeout_s=5)
        asked = (*(threads.call(call) for call in calls), alone)
        async with asyncio.timeout(5):
            return await asyncio.gather(*asked, return_exceptions=True)

    first, *errors, alone = asyncio.run(main())
    assert first is None and errors.pop() == 2
    for error in (*errors, alone):
        assert isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
        assert "StopIteration" in str(error)


@pytest.mark.parametrize("timeout_s", [5.0, 0.1])
def test_threads_serve_on_when_a_loop_was_closed_over_a_call(timeout_s: float) -> None:
    """Whether its function ends or is given up afterwards."""
    free, begun = threading.Event(), threading.Event()
    threads = Threads(1, name="sums", timeout_s=timeout_s)
    loop = asyncio.new_event_loop()

    async def leave() -> object:
        task = asyncio.create_task(threads.call(lambda: begun.set() or free.wait(10)))
        await asyncio.to_thread(begun.wait)
        return task

    task = loop.run_until_complete(leave())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    if timeout_s > 1:
        free.set()

    async def main() -> list[object]:
        async with asyncio.timeout(5):
            return await asyncio.gather(*(threads.call(lambda n=n: n) for n in range(3)))

    try:
        assert asyncio.run(main()) == [0, 1, 2]
    finally:
        free.set()
    task._log_destroy_pending = False


def test_threads_bring_quick_results_back_together() -> None:
    async def main() -> int:
        threads = Threads(1, name="sums", timeout_s=5)
        loop = asyncio.get_running_loop()
        told, tell = 0, loop.call_soon_threadsafe

        def count(*args: object, **more: object) -> object:
            nonlocal told
            told += 1
            return tell(*args, **more)

        loop.call_soon_threadsafe = count
        blocked = threads.call(lambda: time.sleep(0.05))
        await asyncio.gather(blocked, *(threads.call(int) for _ in range(500)))
        return told

    assert asyncio.run(main()) < 250


def test_threads_give_a_place_back_that_no_thread_could_take(monkeypatch):
    threads = Threads(1, name="few", timeout_s=5)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr("miles.threads._idle", [])
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await threads.call(lambda: ran.append(1))
        return await threads.call(lambda: 2)

    ran = []
    assert asyncio.run(main()) == 2 and ran == []


def test_computation_beside_a_busy_thread_is_not_held_up_at_every_operation() -> None:
    """Checking a snapshot of 0.3 GB beside 256 requests held up a publish for 15 s."""
    before, over = sys.getswitchinterval(), threading.Event()

    def busy() -> None:
        while not over.is_set():
            sum(range(1000))

    def seconds() -> float:
        took = []
        for _ in range(41):
            began = time.perf_counter()
            time.sleep(1e-4)  # lets go of the interpreter, also on one core, and wants it back
            took.append(time.perf_counter() - began)
        return sorted(took)[20]  # the median: another process may hold up some

    thread = threading.Thread(target=busy)
    thread.start()
    sys.setswitchinterval(0.005)  # Python's own: a test before may have called `take_turns`
    try:
        # a thread that has no core yet, as beside other processes, holds nobody up
        held_up = next((each for each in (seconds() for _ in range(50)) if each > 2e-3), 0.0)
        assert held_up, "the busy thread never held this one up"
        take_turns()
        assert seconds() < held_up / 2
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join()
