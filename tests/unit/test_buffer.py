"""The buffer's accounts, staleness and admission under random schedules."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import BufferStarved, Drop, Group, Sample, Span, Task, Trajectory
from miles.buffer import Buffer, Lease


def group(number: int, version: int) -> Group:
    size = 3
    sample = Sample(
        tokens=np.zeros(size, np.int32),
        sampled=np.ones(size, bool),
        trainable=np.ones(size, bool),
        logprobs=np.zeros(size, np.float32),
        spans=(Span(start=0, stop=size, version=version),),
    )
    task = Task(id=str(number), prompt="x")
    return Group(
        id=number, task=task, trajectories=(Trajectory(id=f"g{number}", samples=(sample,)),)
    )


def lease(number: int) -> Lease:
    return Lease(id=number, task=Task(id=str(number), prompt="x"))


def buffer(**more: object) -> Buffer:
    keys = {"groups_per_step": 2, "samples_per_group": 1, "starved_after_s": 5.0, **more}
    return Buffer(**keys)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    max_lag=st.integers(0, 4),
    per_step=st.integers(1, 4),
    oversample=st.integers(0, 3),
    steps=st.integers(1, 8),
    order=st.sampled_from(["fifo", "freshest", "started"]),
)
def test_buffer_never_trains_stale_and_always_balances(
    seed: int, max_lag: int, per_step: int, oversample: int, steps: int, order: str
) -> None:
    """Thousands of groups over random schedules: accounts add up at every moment, no trained
    token is older than `max_lag`, a trained group is trained once, and take gives ascending ids."""
    rng = random.Random(seed)
    trained: list[int] = []

    async def main() -> None:
        b = buffer(
            groups_per_step=per_step,
            max_lag=max_lag,
            oversample=oversample,
            take_order=order,
            samples_per_group=2,
            concurrency=rng.randint(2, 24),
            capacity=rng.randint(1, 9),
        )

        async def produce() -> None:
            number = 0
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await b.place()
                    assert b.room()
                    b.start(lease(number))
                    assert b._running_total <= b.concurrency
                    tasks.create_task(bring(number, b.published_version))
                    number += 1

        async def bring(number: int, version: int) -> None:
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(0)
            drop = Drop(reason="zero_variance") if rng.random() < 0.2 else None
            b.finish(group(number, version), drop)
            assert b.accounts.balanced

        producing = asyncio.create_task(produce())
        for version in range(1, steps + 1):
            got = await b.take(per_step)
            ids = [g.id for g in got]
            assert len(got) == per_step and ids == sorted(ids)
            for g in got:
                assert g.oldest is not None and b.trainer_version - g.oldest <= max_lag
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            b.stepped(version, got)
            trained.extend(ids)
            assert b.accounts.balanced
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            b.published(version)
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        b.end()
        assert b.accounts.balanced and b.accounts.in_flight == b.accounts.buffered == 0
        assert b.accounts.started == len(b.ended) and not b.leases()
        assert len(b.ended) == b.accounts.trained + b.accounts.dropped.total()

    asyncio.run(main())
    assert len(trained) == len(set(trained)) == per_step * steps


def test_buffer_synchronous_starts_nothing_while_training() -> None:
    b = buffer()
    for n in (0, 1):
        b.start(lease(n))
    assert not b.room()  # a step's worth is in flight
    for n in (0, 1):
        b.finish(group(n, 0), None)
    taken = asyncio.run(b.take(2))
    assert not b.room()  # in training
    b.stepped(1, taken)
    assert not b.room()  # not published
    b.published(1)
    assert b.room()


def test_buffer_drop_returns_its_place() -> None:
    b = buffer()
    for n in (0, 1):
        b.start(lease(n))
    b.finish(group(0, 0), Drop(reason="zero_variance"))
    assert b.room() and b.accounts.dropped == {"zero_variance": 1}


def test_buffer_evicts_stale_at_take() -> None:
    async def main() -> None:
        b = buffer(groups_per_step=1, max_lag=1)
        for n in (0, 1):
            b.start(lease(n))
            b.finish(group(n, 0), None)
        b.stepped(1, await b.take(1))
        b.published(1)
        b.start(lease(2))
        b.finish(group(2, 1), None)
        b.stepped(2, await b.take(1))  # group 1 is one version old: allowed
        b.published(2)
        b.start(lease(3))
        b.finish(group(3, 0), None)  # a straggler from version 0
        b.stepped(3, await b.take(1))
        assert b.accounts.dropped == {"stale": 1} and b.accounts.trained == 3

    asyncio.run(main())


def test_buffer_keeps_tasks_of_stale_groups_only_when_they_are_to_be_retried() -> None:
    async def main(retries: int) -> list[str]:
        b = buffer(groups_per_step=1, oversample=1, max_retries=retries)
        for n in (0, 1):
            b.start(lease(n))
            b.finish(group(n, 0), None)
        b.stepped(1, await b.take(1))
        b.published(1)
        b.start(lease(2))
        b.finish(group(2, 1), None)
        assert [g.id for g in await b.take(1)] == [2]
        assert b.accounts.dropped == {"stale": 1} and b.accounts.balanced
        return [task.id for task in b.unused]

    assert asyncio.run(main(1)) == ["1"]
    assert asyncio.run(main(0)) == []


def test_buffer_retries_a_task_no_more_often_than_it_may() -> None:
    async def main() -> None:
        b = buffer(groups_per_step=1, max_retries=2, max_lag=0)
        again = []
        for n in range(5):
            b.start(Lease(id=n, task=Task(id="same", prompt="x")))
            b.trainer_version = n + 1
            b.finish(replace(group(n, 0), task=Task(id="same", prompt="x")), None)
            b._evict()
            again.append(len(b.unused))
        assert again == [1, 2, 2, 2, 2]

    asyncio.run(main())


def test_buffer_started_order_waits_for_the_first_started() -> None:
    """Completion order prefers short groups; this order does not."""

    async def main() -> None:
        b = buffer(groups_per_step=2, max_lag=3, take_order="started")
        for n in range(4):
            b.start(lease(n))
        for n in (1, 2, 3):
            b.finish(group(n, 0), None)
        taking = asyncio.create_task(b.take(2))
        await asyncio.sleep(0.01)
        assert not taking.done()
        b.finish(group(0, 0), None)
        assert [g.id for g in await taking] == [0, 1]

    asyncio.run(main())


def test_buffer_cancels_what_began_too_long_ago() -> None:
    async def main() -> None:
        b = buffer(groups_per_step=1, max_lag=1, cancel_doomed=True, max_retries=1)
        cancelled: list[int] = []
        for n in range(2):
            b.start(lease(n), partial(cancelled.append, n))
        b.finish(group(0, 0), None)
        b.stepped(1, await b.take(1))
        b.published(1)
        assert cancelled == []  # group 1 is one version old, which is allowed
        b.start(lease(2), partial(cancelled.append, 2))
        b.finish(group(2, 1), None)
        taken = await b.take(1)
        assert cancelled == [1]  # as soon as it is certain: the next are taken at version 2
        b.stepped(2, taken)
        b.stepped(3, [])
        assert cancelled == [1]  # once
        assert [x.id for x in b.leases()] == [1] and not b.unused  # or a resumed run plays it twice
        drop = b.doomed(1)
        assert drop is not None and drop.reason == "aborted"
        assert "began under version 0, more than max_lag (1) before version 2" in drop.detail
        b.finish(group(1, 0), drop)
        assert b.accounts.dropped == {"aborted": 1} and b.accounts.balanced
        assert [task.id for task in b.unused] == ["1"] and b.doomed(1) is None

    asyncio.run(main())


def test_buffer_retries_a_task_once_whose_group_was_back_before_it_could_be_cancelled() -> None:
    async def main() -> None:
        b = buffer(groups_per_step=1, oversample=1, cancel_doomed=True, max_retries=3)
        for n in range(2):
            b.start(lease(n), lambda: None)
        b.finish(group(0, 0), None)
        taken = await b.take(1)
        b.finish(group(1, 0), None)  # its cancel came too late
        b.stepped(1, taken)
        b._evict()
        assert [task.id for task in b.unused] == ["1"] and b.doomed(1) is None
        assert b.accounts.dropped == {"stale": 1} and b.accounts.retried == 1

    asyncio.run(main())


def test_buffer_synchronous_remainder_is_cancelled_at_take_and_not_replaced() -> None:
    """What was started beyond a step's need ends when the step has its groups (a colocated trainer
    would otherwise wait for it), and nothing else starts before new weights are there."""

    async def main() -> None:
        b = buffer(oversample=2, cancel_doomed=True)
        cancelled: list[int] = []
        for n in range(4):
            assert b.room()
            b.start(lease(n), partial(cancelled.append, n))
        assert not b.room()
        for n in (1, 3):
            b.finish(group(n, 0), None)
        taken = await b.take(2)
        assert cancelled == [0, 2]
        for n in cancelled:
            b.finish(group(n, 0), b.doomed(n))
        assert not b.room() and b.accounts.dropped == {"aborted": 2}
        b.stepped(1, taken)
        assert not b.room()
        b.published(1)
        assert b.room() and b.accounts.balanced

    asyncio.run(main())


def test_buffer_starved_says_what_it_saw() -> None:
    async def main() -> None:
        b = buffer(starved_after_s=0.05)
        taking = asyncio.create_task(b.take(2))
        await asyncio.sleep(0)  # the clock starts
        for n in range(5):
            b.start(lease(n))
            b.finish(group(n, 0), Drop(reason="zero_variance" if n else "length"))
        await taking

    with pytest.raises(
        BufferStarved, match=r"0 of 2 groups in 0 s; 5 dropped: zero_variance 4, length 1; 0 in"
    ) as caught:
        asyncio.run(main())
    assert "80% of the dropped groups had equal rewards" in caught.value.detail


def test_buffer_starved_names_what_it_waits_for_and_why_nothing_new_starts() -> None:
    """One group hangs, others come back too long: who waits for what, since when."""

    async def main() -> None:
        b = buffer(starved_after_s=0.05, concurrency=2)
        taking = asyncio.create_task(b.take(2))
        await asyncio.sleep(0)
        b.start(lease(7))
        for n in range(3):
            b.start(lease(n))
            cut = group(n, 0)
            (made,) = cut.trajectories
            (sample,) = made.samples
            long = replace(made, samples=(replace(sample, finish="length"),))
            b.finish(replace(cut, trajectories=(long,)), Drop(reason="refused"))
        b.hold()
        b.release()
        b.start(lease(8))
        await taking

    with pytest.raises(BufferStarved) as caught:
        asyncio.run(main())
    said = str(caught.value)
    assert "2 in flight, longest group 7 (task '7'), for 0 s" in said
    assert "no further group starts: max_lag allows no more to be under way" in said
    assert "3 of 3 attempts were truncated by a length limit" in caught.value.detail


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda b: None, ""),
        (lambda b: b.hold(), "new ones are held"),
        (lambda b: b.close(), "the tasks have run out"),
        (lambda b: [b.start(lease(n)) for n in range(2)], "all places are taken"),
        (lambda b: setattr(b, "trainer_version", 9), "max_lag allows no more to be under way"),
        (
            lambda b: [(b.start(lease(n)), b.finish(group(n, 0), None)) for n in range(2)],
            "the buffer is full",
        ),
    ],
)
def test_buffer_says_why_no_group_may_start(prepare: object, why: str) -> None:
    b = buffer(max_lag=3, concurrency=2, capacity=2)
    prepare(b)  # type: ignore[operator]
    assert b.blocked() == why
    assert b.room() == (not why)


def test_buffer_closed_gives_a_last_short_batch_or_none() -> None:
    async def main(last: str) -> int:
        b = buffer()
        b.start(lease(0))
        b.finish(group(0, 0), None)
        b.close()
        return len(await b.take(2, last=last))

    assert asyncio.run(main("keep")) == 1
    assert asyncio.run(main("drop")) == 0


def test_buffer_stopped_keeps_leases_open() -> None:
    """An interrupted run starts again exactly what had not ended."""

    async def main() -> Buffer:
        b = buffer()
        for n in (0, 1):
            b.start(lease(n))
        b.finish(group(0, 0), None)
        b.stop()
        assert await b.take(2) == []
        b.end()
        return b

    b = asyncio.run(main())
    assert [x.id for x in b.leases()] == [0, 1]
    assert b.accounts.balanced and not b.accounts.dropped


def test_buffer_places_are_freed_by_sample_or_by_group() -> None:
    by_group = buffer(samples_per_group=2, concurrency=3, max_lag=3)
    by_sample = buffer(samples_per_group=2, concurrency=3, max_lag=3, free_each_sample=True)
    for b in (by_group, by_sample):
        b.start(lease(0))
        assert not b.room()
        b.returned(0)
    assert not by_group.room()
    assert by_sample.room()


def test_buffer_of_one_step_fills_while_the_step_before_is_trained() -> None:
    """Rollouts do not wait for a training step: groups in training are not in the buffer."""
    b = buffer(max_lag=3, capacity=2)
    for n in (0, 1):
        b.start(lease(n))
        b.finish(group(n, 0), None)
    assert b.blocked() == "the buffer is full"
    asyncio.run(b.take(2))
    assert b.room()


def test_buffer_starts_nothing_that_no_step_will_take() -> None:
    b = buffer(groups_per_step=1, max_lag=5, until=2)
    for n in (0, 1):
        assert b.room()
        b.start(lease(n))
    assert not b.room()


def test_buffer_slow_attempts_do_not_starve_the_trainer() -> None:
    """Nothing was dropped and something is in flight: its own deadline decides, not the trainer's;
    meanwhile it can be asked what it waits for."""

    async def main() -> int:
        b = buffer(groups_per_step=1, starved_after_s=0.02)
        b.start(lease(0))
        assert b.standstill() is None
        taking = asyncio.create_task(b.take(1))
        await asyncio.sleep(0.1)
        said = str(b.standstill())
        assert "0 of 1 groups" in said and "longest group 0 (task '0')" in said
        b.finish(group(0, 0), None)
        taken = await taking
        assert b.standstill() is None
        return len(taken)

    assert asyncio.run(main()) == 1
