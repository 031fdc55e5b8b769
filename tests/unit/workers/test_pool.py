"""Rollout workers that die or hang, and how groups are spread over those that work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from miles import ConfigError, Group, Settings, Task, WorkerError
from miles.buffer import Lease
from miles.metrics import faults
from miles.testing import FakeHandle
from miles.workers.pool import TRIES, Pool


class Rollouts:
    """What the worker holds; `how` decides what becomes of a group."""

    def __init__(self, how: Any = None) -> None:
        self.how = how
        self.groups: list[int] = []
        self.version = -1

    async def ping(self) -> None:
        if self.how == "hang":
            raise WorkerError("no answer")

    async def group(
        self, group: int, task: Task, samples: Any, sampling: Any, of: str = ""
    ) -> Group:
        self.groups.append(group)
        if self.how == "hang":
            await asyncio.sleep(0.01)
            raise WorkerError("rollouts.group did not answer within 1 s")
        if self.how == "bug":
            raise ConfigError("a bug of the environment")
        if self.how == "late":
            await asyncio.sleep(60)
        if self.how == "engine":
            raise WorkerError("engine: ended")
        await asyncio.sleep(0.01)
        return Group(id=group, task=task, trajectories=())

    async def returning(self, group: int, task: Task) -> AsyncIterator[Group | None]:
        yield await self.group(group, task, None, None)

    async def published(self, version: int) -> None:
        self.version = version

    async def counts(self) -> dict[str, Any]:
        count = len(self.groups)
        router = {"requests": count, "prompt_tokens": 10 * count, "cached_tokens": 6 * count}
        return {"session": {"token_mismatches": count}, "router": router}


def pool(
    *workers: Rollouts, restarts: int = 2, how: Any = None, episode_timeout_s: float = 1.0
) -> tuple[Pool, list[FakeHandle]]:
    handles = [FakeHandle(f"rollout-{i}", {"rollouts": w}) for i, w in enumerate(workers)]
    began: list[FakeHandle] = []

    async def restart(handle: Any) -> FakeHandle:
        new = FakeHandle(handle.name, {"rollouts": Rollouts(how)})
        began.append(new)
        return new

    keys = Settings(episode_timeout_s=episode_timeout_s, worker_timeout_s=1, max_restarts=restarts)
    made = Pool(handles, restart=restart, settings=keys)  # type: ignore[arg-type]
    return made, began


def lease(group: int) -> Lease:
    return Lease(id=group, task=Task(id=str(group), prompt="x"))


def test_pool_spreads_groups_and_adds_counters_up() -> None:
    one, two = Rollouts(), Rollouts()
    made, _ = pool(one, two)

    async def main() -> None:
        await asyncio.gather(*(made.group(lease(i)) for i in range(6)))
        await made.published(4)
        metrics = await made.metrics()
        assert (metrics["session/token_mismatches"], metrics["router/requests"]) == (6, 6)
        assert metrics["router/prefix_hit_rate"] == 0.6
        assert faults(metrics) == ()  # every one is in the table
        await made.group(lease(7))
        assert (await made.metrics())["session/token_mismatches"] == 1  # since the last time

    asyncio.run(main())
    assert sorted((len(one.groups), len(two.groups))) == [3, 4] and one.version == two.version == 4


@pytest.mark.parametrize("returned", [None, lambda: None])
def test_pool_plays_the_groups_of_a_dead_worker_again_in_the_next(
    returned: Callable[[], None] | None,
) -> None:
    made, began = pool(Rollouts("hang"))

    async def main() -> list[Group]:
        return await asyncio.gather(*(made.group(lease(i), returned=returned) for i in range(4)))

    groups = asyncio.run(main())
    assert [(g.id, g.failure) for g in groups] == [(i, None) for i in range(4)]
    assert len(began) == made.restarts == 1
    assert sorted(began[0].ranks[0]["rollouts"].groups) == [0, 1, 2, 3]


def test_pool_gives_a_group_up_under_which_every_worker_dies() -> None:
    made, began = pool(Rollouts("hang"), restarts=5, how="hang")
    group = asyncio.run(made.group(lease(7)))
    assert group.failure is not None and group.failure.reason == "worker_lost"
    assert "did not answer within 1 s" in group.failure.detail and len(began) == TRIES


def test_pool_loses_late_groups_of_a_worker_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    worker = Rollouts("late")

    async def hang() -> None:
        raise WorkerError("no answer")

    worker.ping = hang  # type: ignore[method-assign]
    made, began = pool(worker, episode_timeout_s=-19.95)

    async def main() -> list[Group]:
        groups = await asyncio.gather(*(made.group(lease(i)) for i in range(4)))
        return [*groups, await made.group(lease(9))]

    *lost, fine = asyncio.run(main())
    assert [g.failure.reason for g in lost if g.failure] == ["worker_lost"] * 4
    assert "rollout-0 is started again: no answer" in caplog.text
    assert fine.failure is None and len(began) == made.restarts == 1


@pytest.mark.parametrize(("how", "error"), [("bug", ConfigError), ("engine", WorkerError)])
def test_pool_raises_what_a_living_worker_raised(how: str, error: type[Exception]) -> None:
    made, began = pool(Rollouts(how))
    with pytest.raises(error):
        asyncio.run(made.group(lease(0)))
    assert not began


@pytest.mark.parametrize("returned", [None, lambda: None])
def test_pool_gives_up_one_late_group_of_a_worker_that_answers(
    returned: Callable[[], None] | None,
) -> None:
    """Such as an environment that takes long to close: neither the run nor the worker ends."""
    made, began = pool(Rollouts("late"), episode_timeout_s=-19.95)
    group = asyncio.run(made.group(lease(3), returned=returned))
    assert group.failure is not None and group.failure.reason == "timeout"
    assert group.failure.detail == "not back 0.05 s after its start" and not began


@pytest.mark.parametrize("restarts", [2, 0])
def test_pool_starts_a_worker_again_that_died_while_it_played_nothing(restarts: int) -> None:
    made, began = pool(Rollouts(), Rollouts(), restarts=restarts)

    async def main() -> None:
        await made.group(lease(0))
        await made.metrics()
        handles = [worker.handle for worker in made._workers]
        handles[1].dead = True  # type: ignore[attr-defined]
        await made.published(4)
        assert await made.metrics()

    if not restarts:
        with pytest.raises(WorkerError, match="is dead"):
            asyncio.run(main())
        return
    asyncio.run(main())
    (new,) = began
    assert new.name == "rollout-1" and new.ranks[0]["rollouts"].version == 4


def test_pool_gives_up_after_max_restarts() -> None:
    made, began = pool(Rollouts("hang"), restarts=0)
    with pytest.raises(WorkerError, match="did not answer within 1 s"):
        asyncio.run(made.group(lease(0)))
    assert not began


def test_pool_without_restarts_says_what_a_worker_that_hangs_is_at() -> None:
    """The error was a `TimeoutError` without a word."""
    worker = Rollouts("late")

    async def hang() -> None:
        raise WorkerError("rollout-0: at x.py:3 f")

    worker.ping = hang  # type: ignore[method-assign]
    made, _ = pool(worker, restarts=0, episode_timeout_s=-19.95)
    with pytest.raises(WorkerError, match=r"rollout-0: at x\.py:3 f"):
        asyncio.run(made.group(lease(0)))


def test_pool_starts_a_worker_again_once_though_the_group_that_noticed_is_cancelled() -> None:
    handle = FakeHandle("rollout-0", {"rollouts": Rollouts()})
    handle.dead = True
    began: list[str] = []

    async def restart(old: Any) -> Any:
        began.append(old.name)
        await asyncio.sleep(0.1)
        return FakeHandle(old.name, {"rollouts": Rollouts()})

    handles: Any = [handle]
    made = Pool(handles, restart=restart, settings=Settings())

    async def main() -> list[Group]:
        noticing = asyncio.create_task(made.group(lease(0)))
        while not began:
            await asyncio.sleep(0.01)
        noticing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await noticing
        return [await made.group(lease(1)), await made.group(lease(2))]

    waiting, fine = asyncio.run(main())
    assert (waiting.id, waiting.failure) == (1, None)
    assert fine.failure is None and len(began) == made.restarts == 1
