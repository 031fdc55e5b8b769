"""The loop over a scripted engine and trainer: versions, accounts, depths, and failures as
values."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles import (
    Batch,
    ContractError,
    Drop,
    EngineError,
    Group,
    Receipt,
    RunError,
    Sample,
    Sampling,
    Settings,
    Span,
    Task,
    Trajectory,
    Update,
    flatten,
    loop,
)
from miles.buffer import Buffer, Lease
from miles.placement import Split


def trajectory(key: str, version: int, reward: float = 1.0) -> Trajectory:
    ones = np.ones(2, bool)
    made = Sample(
        tokens=np.zeros(2, np.int32), sampled=ones, trainable=ones,
        logprobs=np.zeros(2, np.float32),
        spans=(Span(start=0, stop=2, version=version),),
    )  # fmt: skip
    return Trajectory(id=key, samples=(made,), reward=reward)


class Environment:
    """Plays by itself; `how` decides what an attempt does."""

    def __init__(self, how: Any = None) -> None:
        self.how = how
        self.version = 0

    async def play(self, task: Task, seed: int, tools: Any) -> Trajectory:
        await asyncio.sleep(0)
        if self.how is not None:
            await self.how(task, tools)
        return trajectory(tools.id, self.version)


class Run:
    """The least that `miles.loop` needs."""

    def __init__(self, environment: Any, *, tasks: int | None = None, **keys: Any) -> None:
        self.settings = Settings(
            **{"groups_per_step": 2, "samples_per_group": 2, "steps": 3, **keys}
        )
        self.environment = environment
        self.buffer = Buffer(
            groups_per_step=self.settings.groups_per_step,
            samples_per_group=self.settings.samples_per_group,
            max_lag=self.settings.max_lag,
            oversample=self.settings.oversample,
            until=self.settings.steps,
            starved_after_s=2.0,
        )
        self.placement = Split()
        self.selector = None
        self.hook = SimpleNamespace(
            weights_published=lambda receipt: self.log.append(f"published {receipt.version}"),
            group_started=lambda group, task: None,
            group_finished=lambda group, drop: self.finished.append((group, drop)),
        )
        self.trainer = self
        self.version = 0
        self.tasks = tasks
        self.log: list[str] = []
        self.finished: list[tuple[Group, Drop | None]] = []
        self.trained: list[list[int]] = []
        self.leased = 0

    def steps(self) -> Iterator[int]:
        yield from range(1, self.settings.steps + 1)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        yield

    def lease(self) -> Lease | None:
        if self.tasks is not None and self.leased >= self.tasks:
            return None
        self.leased += 1
        return Lease(id=self.leased - 1, task=Task(id=str(self.leased - 1), prompt="x"))

    async def rollout(
        self, lease: Lease, samples: int | None = None, sampling: Sampling | None = None
    ) -> Group:
        return await loop.rollout(self, lease, samples)  # type: ignore[arg-type]

    def returned(self, lease: Lease) -> None:
        self.buffer.returned(lease.id)

    def tools(self, lease: Lease, index: int | None, sampling: Sampling | None = None) -> Any:
        return SimpleNamespace(id=f"g{lease.id}.{index}", seed=0, group=lease.id)

    async def prepare(self, groups: Sequence[Group]) -> Batch:
        return Batch(tokens=flatten([s for g in groups for s in g.samples]), terms=())

    async def step(self, batch: Batch) -> Update:
        self.version += 1
        self.log.append(f"step {self.version}")
        return Update(version=self.version)

    async def checkpoint(self, step: int, *of: Any) -> None:
        self.log.append(f"checkpoint {step}")

    async def send_weights(self) -> Receipt:
        self.environment.version = self.version
        return Receipt(version=self.version, digest="", bytes=0, seconds=0.0)

    def judge(self, group: Group) -> Drop | None:
        return group.failure

    async def evaluate(self, step: int) -> None:
        self.log.append(f"evaluate {step}")

    def finish_step(self, step: int, groups: Any, batch: Batch, update: Update) -> None:
        self.trained.append([g.id for g in groups])


def train(run: Run) -> Run:
    asyncio.run(asyncio.wait_for(loop.train(run), 20))  # type: ignore[arg-type]
    return run


def test_loop_synchronous_order_of_a_step() -> None:
    run = train(Run(Environment(), steps=2))
    assert run.log == [
        "published 0", "evaluate 0",
        "step 1", "checkpoint 1", "published 1", "evaluate 1",
        "step 2", "checkpoint 2", "published 2", "evaluate 2",
    ]  # fmt: skip
    assert run.trained == [[0, 1], [2, 3]]
    assert run.leased == 4  # nothing was started that no step would take
    assert run.buffer.accounts.balanced
    assert run.buffer.accounts.trained == 4


def test_loop_asynchronous_is_the_same_loop_and_holds_its_bound() -> None:
    run = Run(Environment(), steps=20, max_lag=2)
    seen: list[int] = []
    take = run.buffer.take

    async def spy(count: int, *, last: str = "keep") -> list[Group]:
        groups = await take(count, last=last)
        seen.extend(run.version - g.oldest for g in groups if g.oldest is not None)
        return groups

    run.buffer.take = spy  # type: ignore[method-assign]
    train(run)
    assert max(seen) <= 2
    assert run.buffer.accounts.balanced


def test_loop_refuses_to_train_a_token_older_than_max_lag() -> None:
    """Whatever let it through: here a batch that is not made of the groups that were taken."""
    run = Run(Environment(), steps=4, max_lag=2)
    old = Group(id=0, task=Task(id="0", prompt="x"), trajectories=(trajectory("g0", 0),))

    async def prepare(groups: Sequence[Group]) -> Batch:
        return Batch(tokens=flatten(old.samples), terms=())

    run.prepare = prepare  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup) as caught:
        train(run)
    words = r"step 4: a token to be trained is 3 versions old; max_lag is 2"
    assert caught.group_contains(RunError, match=words)
    assert run.version == 3


def test_loop_failures_are_values_and_places_come_back() -> None:
    async def sometimes(task: Task, tools: Any) -> None:
        if int(task.id) % 3 == 0:
            raise EngineError("the engine refused")

    run = train(Run(Environment(sometimes)))
    accounts = run.buffer.accounts
    assert accounts.balanced
    assert accounts.trained == 6
    assert accounts.dropped["engine_error"] == accounts.dropped.total() >= 3
    assert all("refused" in d.detail for _, d in run.finished if d)


def test_loop_attempt_past_its_deadline_is_a_timeout_value() -> None:
    async def slow(task: Task, tools: Any) -> None:
        if task.id == "0":
            await asyncio.sleep(60)

    began = time.monotonic()
    run = train(Run(Environment(slow), steps=1, episode_timeout_s=0.05))
    assert run.buffer.accounts.dropped == {"timeout": 1}
    assert time.monotonic() - began < 10


def test_loop_bug_in_an_environment_stops_the_run() -> None:
    async def bug(task: Task, tools: Any) -> None:
        raise KeyError("a bug")

    with pytest.raises(BaseExceptionGroup) as caught:
        train(Run(Environment(bug)))
    assert caught.group_contains(KeyError, match="a bug")


def test_loop_ends_when_the_tasks_run_out() -> None:
    kept = train(Run(Environment(), tasks=3, steps=10))
    assert kept.trained == [[0, 1], [2]]
    dropped = train(Run(Environment(), tasks=3, steps=10, last_batch="drop"))
    assert dropped.trained == [[0, 1]]
    assert dropped.buffer.ended[-1] == (2, "run_ended")


def test_loop_groups_left_at_the_end_are_dropped_and_none_is_lost() -> None:
    run = train(Run(Environment(), steps=3, oversample=3))
    accounts = run.buffer.accounts
    assert accounts.trained == 6
    assert accounts.dropped.keys() <= {"stale", "run_ended"} and accounts.dropped["run_ended"]
    assert accounts.started == len(run.buffer.ended) == run.leased


def test_loop_groups_in_flight_at_a_failure_stay_leased() -> None:
    async def bug(task: Task, tools: Any) -> None:
        if task.id == "1":
            raise KeyError("a bug")
        await asyncio.sleep(10)

    run = Run(Environment(bug))
    with pytest.raises(BaseExceptionGroup):
        train(run)
    assert [x.id for x in run.buffer.leases()] == [0, 1]
    assert not run.buffer.ended


@pytest.mark.parametrize("reward", [None, float("nan")])
@pytest.mark.parametrize("depth", ["play", "rollout"])
def test_loop_reward_that_is_no_number_is_a_failure_at_every_depth(depth: str, reward: Any) -> None:
    class Odd:
        async def play(self, task: Task, seed: int, tools: Any) -> Trajectory:
            return trajectory(tools.id, 0, reward if task.id == "0" else 1.0)

        async def rollout(self, task: Task, tools: Any) -> Group:
            made = trajectory("x", 0, reward if task.id == "0" else 1.0)
            return Group(id=tools.group, task=task, trajectories=(made,))

    if depth == "play":
        del Odd.rollout
    run = train(Run(Odd(), steps=1))
    assert run.trained == [[1, 2]]
    drop = run.finished[0][1]
    assert drop is not None and drop.reason == "bad_reward"
    assert "Odd': reward is" in drop.detail


@pytest.mark.parametrize("depth", ["play", "rollout"])
def test_loop_exit_in_an_environment_is_a_failure_of_its_group(depth: str) -> None:
    class Leaves:
        async def play(self, task: Task, seed: int, tools: Any) -> Trajectory:
            if task.id == "0":
                sys.exit("usage: grade FILE")
            return trajectory(tools.id, 0)

        async def rollout(self, task: Task, tools: Any) -> Group:
            made = await self.play(task, 0, tools)
            return Group(id=tools.group, task=task, trajectories=(made,))

    if depth == "play":
        del Leaves.rollout
    run = train(Run(Leaves(), steps=1))
    assert run.trained == [[1, 2]]
    drop = run.finished[0][1]
    assert drop is not None and drop.reason == "episode_error"
    assert drop.detail == "environment Leaves: task '0': its code called exit(usage: grade FILE)"


def test_loop_group_under_another_id_is_named() -> None:
    class Liar:
        async def rollout(self, task: Task, tools: Any) -> Group:
            return Group(id=7, task=task, trajectories=(trajectory("x", 0),))

    with pytest.raises(BaseExceptionGroup) as caught:
        train(Run(Liar()))
    assert caught.group_contains(ContractError, match="Liar: rollout of task '0' returned group 7")


def test_loop_whole_group_depth() -> None:
    class Deep:
        version = 0

        async def rollout(self, task: Task, tools: Any) -> Group:
            if task.id == "1":
                raise EngineError("no")
            made = tuple(trajectory(f"{tools.id}.{i}", self.version) for i in range(3))
            return Group(id=tools.group, task=task, trajectories=made)

    run = train(Run(Deep(), steps=1))
    assert run.trained == [[0, 2]]
    assert [len(g.trajectories) for g, d in run.finished if d is None] == [3, 3]
    assert run.buffer.accounts.dropped == {"engine_error": 1}


def test_loop_whole_group_depth_plays_attempts_the_shallower_way() -> None:
    class Both(Environment):
        async def rollout(self, task: Task, tools: Any) -> Group:
            first = await tools.play(0)
            again = await tools.play(1)
            return Group(id=tools.group, task=task, trajectories=(first, again))

    class Playing(Run):
        def tools(self, lease: Lease, index: int | None, sampling: Any = None) -> Any:
            made = super().tools(lease, index, sampling)
            made.play = lambda i: loop.play(self, lease, i)  # type: ignore[arg-type]
            return made

    run = train(Playing(Both(), steps=1))
    ids = [t.id for g, _ in run.finished for t in g.trajectories]
    assert ids == ["g0.0", "g0.1", "g1.0", "g1.1"]


def test_loop_episode_depth_drives_turns_until_done_or_the_limit() -> None:
    class Talk:
        def __init__(self, turns: int) -> None:
            self.turns, self.seen = turns, 0

        async def reset(self) -> str:
            return "go"

        async def step(self, reply: str) -> Any:
            self.seen += 1
            return SimpleNamespace(done=self.seen == self.turns, messages=("more",))

        async def reward(self) -> Any:
            return float(self.seen), {"seen": float(self.seen)}

    class Conversation:
        def __init__(self) -> None:
            self.said: list[Any] = []

        async def turn(self, messages: Any, *, tools: Any) -> str:
            self.said.append(messages)
            return "reply"

        def trajectory(self, *, reward: float, metrics: Any) -> Any:
            return reward, metrics

    for turns, limit, expected in ((1, 5, 1.0), (3, 5, 3.0), (9, 4, 4.0)):
        conversation = Conversation()
        made = Talk(turns)
        got = asyncio.run(loop.episode(made, conversation, limit))  # type: ignore[arg-type]
        assert got == (expected, {"seen": expected})
        assert conversation.said == ["go"] + [("more",)] * (int(expected) - 1)
