"""Measures the scheduler and the simulator, in CPU seconds of one process.

The scheduler: `miles.loop` and `miles.buffer` with 4,096 trajectories in flight, whose playing is
nothing but a timer each; 50 µs a trajectory are allowed. The simulator: turns a second, at least
20,000, and a day of the case study, at most 60 s. Exits 0 when all three hold.
    python tests/bench/simulator_speed.py
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from miles import loop
from miles.batch import Batch, Receipt, Tokens, Update
from miles.buffer import Buffer, Lease
from miles.config import compose
from miles.placement import Split
from miles.plugins import Registry
from miles.settings import Settings
from miles.simulate import clock
from miles.simulate.command import player
from miles.simulate.keys import read
from miles.simulate.requests import blank
from miles.simulate.sweep import Case
from miles.types import Group, Sample, Span, Task, Trajectory

IN_FLIGHT, SAMPLES, STEPS = 4096, 8, 40


class Run:
    """The least that the loop needs: attempts are timers, steps take ten seconds."""

    def __init__(self) -> None:
        self.settings = Settings(steps=STEPS, groups_per_step=128, samples_per_group=SAMPLES)
        self.buffer = Buffer(
            groups_per_step=128, samples_per_group=SAMPLES, max_lag=8, concurrency=IN_FLIGHT,
            capacity=4096, free_each_sample=True, until=STEPS + 8,
        )  # fmt: skip
        self.placement = Split()
        self.hook = SimpleNamespace(
            weights_published=lambda receipt: None,
            group_started=lambda group, task: None,
            group_finished=lambda group, drop: None,
        )
        self.trainer = self
        self.version = self.leased = self.most = 0
        self.rng = Random(0)
        ones = blank(10).astype(bool) | True
        self.of_version = [
            Sample(tokens=blank(10), sampled=ones, trainable=ones, logprobs=None,
                   spans=(Span(start=0, stop=10, version=v),))
            for v in range(STEPS + 1)
        ]  # fmt: skip
        self.task = Task(id="t", prompt="")

    def steps(self) -> Iterator[int]:
        yield from range(1, STEPS + 1)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        yield

    def lease(self) -> Lease:
        self.leased += 1
        self.most = max(self.most, self.buffer._running_total + SAMPLES)
        return Lease(id=self.leased, task=self.task)

    async def rollout(self, lease: Lease, *args: Any, **more: Any) -> Group:
        version = self.buffer.published_version
        now = asyncio.get_running_loop()
        waits = sorted(self.rng.lognormvariate(2.5, 1.0) for _ in range(SAMPLES))
        for wait in waits[:-1]:
            now.call_later(wait, self.buffer.returned, lease.id)
        await asyncio.sleep(waits[-1])
        self.buffer.returned(lease.id)
        made = Trajectory(id="t", samples=(self.of_version[version],), reward=1.0)
        return Group(id=lease.id, task=lease.task, trajectories=(made,))

    def judge(self, group: Group) -> None:
        return None

    async def prepare(self, groups: Any) -> Batch:
        none = blank(0)
        empty = none.astype(bool)
        tokens = Tokens(tokens=none, lengths=none, sampled=empty, trainable=empty, versions=none)
        return Batch(tokens=tokens, terms=())

    async def step(self, batch: Batch) -> Update:
        await asyncio.sleep(10.0)
        self.version += 1
        return Update(version=self.version)

    async def checkpoint(self, step: int, *of: Any) -> None: ...

    async def send_weights(self) -> Receipt:
        return Receipt(version=self.version, digest="", bytes=0, seconds=0.0)

    async def evaluate(self, step: int) -> None: ...

    def finish_step(self, *args: Any, **more: Any) -> None:
        self.buffer.ended.clear()


def scheduler() -> float:
    """CPU seconds a trajectory, the timers that stand for playing included."""
    run = Run()
    began = time.process_time()
    clock.run(loop.train(run))
    spent = time.process_time() - began
    trajectories = run.leased * SAMPLES
    print(f"scheduler: {trajectories} trajectories, at most {run.most} in flight")
    return spent / trajectories


def simulator() -> tuple[float, float]:
    """Turns a second in ten steps of the case study, best of eight, and CPU seconds of a
    day of it."""
    plan = compose(["experiment=case_glm5_2_744b"], registry=Registry.load()).verify()
    stage = plan.stages[-1]
    case = Case(settings=stage.settings, keys=read(stage.settings.simulate))
    rate = 0.0
    for seed in range(8):  # short, as what else the machine does lengthens CPU seconds too
        began = time.process_time()
        settings = replace(case.settings, seed=seed, steps=10)
        result = player(stage, plan.registry, timeline_steps=1)(replace(case, settings=settings))
        rate = max(rate, result.turns / (time.process_time() - began))
    began = time.process_time()
    result = player(stage, plan.registry, hours=24, timeline_steps=1)(case)
    day = time.process_time() - began
    print(f"a day: {len(result.steps)} steps, {result.turns} turns")
    return rate, day


def main() -> int:
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    each = min(scheduler() for _ in range(3))
    print(f"scheduler and buffer: {each * 1e6:.1f} µs a trajectory; limit 50")
    rate, day = simulator()
    print(f"simulator: {rate:,.0f} turns a second; limit 20,000")
    print(f"a day of the case study: {day:.1f} CPU seconds; limit 60")
    return 0 if each <= 50e-6 and rate >= 20_000 and day <= 60 else 1


if __name__ == "__main__":
    sys.exit(main())
