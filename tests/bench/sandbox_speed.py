"""What a box costs: opening and closing one, a Python snippet, a shell line; CPU and wall time.

    python tests/bench/sandbox_speed.py [--sandbox process] [--boxes 40] [--snippets 200]

CPU seconds are user plus system time of this process, of what it starts, and of everything inside
the boxes, which is all a descendant of this process. Exits 0 exactly when open and close take at
most 40 CPU ms and a snippet at most 8.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from miles import Context, Spec, Task
from miles.plugins import Registry

OPEN_MS, SNIPPET_MS = 40.0, 8.0
TASK = Task(id="bench", prompt="")


def cpu() -> float:
    """CPU seconds of this process and of descendants that ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in both)


async def opening(sandbox, boxes: int) -> tuple[float, float]:
    """CPU milliseconds and wall milliseconds of one open and close."""
    await (await sandbox.open(TASK)).close()  # compiles the supervisor
    walls, began = [], cpu()
    for _ in range(boxes):
        at = time.perf_counter()
        await (await sandbox.open(TASK)).close()
        walls.append(time.perf_counter() - at)
    return (cpu() - began) / boxes * 1e3, median(walls) * 1e3


async def running(sandbox, command, times: int, **how) -> tuple[float, float]:
    """The same of one command, in boxes that run 20 each; opening them is taken off."""
    walls, spent, n = [], 0.0, 0
    empty, _ = await opening(sandbox, 10)
    while n < times:
        began = cpu()
        box = await sandbox.open(TASK)
        for _ in range(20):
            at = time.perf_counter()
            result = await box.exec(command, **how)
            walls.append(time.perf_counter() - at)
            if result.exit_code:
                raise SystemExit(f"{command} failed: {result}")
            n += 1
        await box.close()  # descendants are accounted for when they end
        spent += cpu() - began - empty / 1e3
    return spent / n * 1e3, median(walls) * 1e3


async def crowd(sandbox, boxes: int) -> float:
    """Seconds of wall time for as many attempts at once: open, three snippets, close."""
    began = time.perf_counter()

    async def one() -> None:
        box = await sandbox.open(TASK)
        for _ in range(3):
            await box.exec(["python3", "-c", "print(1)"])
        await box.close()

    await asyncio.gather(*(one() for _ in range(boxes)))
    return time.perf_counter() - began


async def measure(args: argparse.Namespace) -> int:
    """Print a line each; the exit code."""
    registry = Registry.load()
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(kind="sandbox", name=args.sandbox)
        sandbox = registry.build(spec, Context(directory=Path(folder)))
        opened = await opening(sandbox, args.boxes)
        print(f"open and close: {opened[0]:.1f} CPU ms, {opened[1]:.1f} ms")
        snippet = ["python3", "-c", "print(1)"]
        path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        env = path if args.sandbox == "none" else {}
        quick = await running(sandbox, snippet, args.snippets, env=env)
        print(f"python3 -c 'print(1)': {quick[0]:.2f} CPU ms, {quick[1]:.2f} ms")
        fresh = {**env, "PYTHONHASHSEED": "0"}
        slow = await running(sandbox, snippet, args.snippets // 4, env=fresh)
        print(f"the same in a fresh interpreter: {slow[0]:.2f} CPU ms, {slow[1]:.2f} ms")
        shell = await running(sandbox, "echo 1", args.snippets)
        print(f"sh -c 'echo 1': {shell[0]:.2f} CPU ms, {shell[1]:.2f} ms")
        seconds = await crowd(sandbox, 64)
        print(f"64 attempts at once, three snippets each: {seconds:.2f} s")
    good = opened[0] <= OPEN_MS and quick[0] <= SNIPPET_MS
    print(f"limits: {OPEN_MS:g} and {SNIPPET_MS:g} CPU ms: {'met' if good else 'not met'}")
    return 0 if good else 1


def main() -> int:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandbox", default="process", choices=["process", "none"])
    parser.add_argument("--boxes", type=int, default=40)
    parser.add_argument("--snippets", type=int, default=200)
    logging.disable(logging.WARNING)
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
