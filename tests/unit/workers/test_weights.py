"""Publishing to engines that live, die on the way, hang, or refuse; and restarts that run out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles import Context, EngineError, Receipt, WeightSyncError, WorkerError
from miles.buffer import Buffer
from miles.evaluation.fleet import EvalFleet
from miles.placement import Colocated, Split
from miles.testing import FakeHandle
from miles.wire.remote import RemoteTrainer
from miles.workers.engines import Engines
from miles.workers.weights import Weights


class Engine:
    def __init__(self) -> None:
        self.served = -1
        self.asleep = False

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False

    async def version(self) -> int:
        return self.served

    async def health(self) -> dict[str, float]:
        return {"tokens": 5.0, "max_len": 64.0}


class Door:
    async def listen(self, host: str, token: str) -> list[Any]:
        return [host, 1000 + len(token)]


class Runtime:
    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []

    async def start(self, name: str, parts: Any, context: Any, *, world: int = 1) -> FakeHandle:
        self.started.append(name)
        return FakeHandle(name, {"engine": Engine(), "worker": Door()})

    async def rebuild(self, handle: Any, parts: Any, context: Any) -> None:
        self.started.append(f"{handle.name} again")

    async def end(self, handle: Any) -> None:
        self.ended.append(handle.name)
        handle.dead = True


class Transport:
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.kill: list[Any] = []
        self.refuse = False

    async def publish(self, version: int, *, trainer: Any, engines: Any) -> Receipt:
        await asyncio.sleep(self.seconds)
        for handle in self.kill:
            handle.dead = True
        self.kill = []
        for handle in engines:
            await handle.call("engine.version")
            if self.refuse:
                raise WeightSyncError(f"{handle.name}: another digest")
            handle.ranks[0]["engine"].served = version
        return Receipt(version=version, digest="d", bytes=1, seconds=0.0)


class Pool:
    def __init__(self) -> None:
        self.doors: list[Any] = []
        self.version = -1

    async def rewire(self, doors: Any) -> None:
        self.doors.append([name for name, *_ in doors])

    async def published(self, version: int) -> None:
        self.version = version


async def made(tmp_path: Path, *, count: int = 2, restarts: int = 2, **keys: Any) -> Any:
    runtime, pool, transport = Runtime(), Pool(), Transport(keys.pop("seconds", 0.0))
    engines = Engines(runtime, timeout_s=5, max_restarts=restarts)  # type: ignore[arg-type]
    await engines.build([], Context(directory=tmp_path), count=count)
    trainer = RemoteTrainer(FakeHandle("trainer", {}), timeout_s=5, version=3)
    told: list[Receipt] = []
    weights = Weights(
        transport=transport, trainer=trainer, engines=engines, pool=pool,  # type: ignore[arg-type]
        placement=keys.pop("placement", Split()), timeout_s=keys.pop("timeout_s", 5.0),
        tell=told.append,
    )  # fmt: skip
    return SimpleNamespace(**locals())


def served(engines: Engines) -> list[int]:
    return [handle.ranks[0]["engine"].served for handle in engines.handles]  # type: ignore[attr-defined]


def test_weights_reach_every_engine_and_are_told_of(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path)
        receipt = await at.weights.publish()
        assert receipt.version == at.pool.version == 3 and served(at.engines) == [3, 3]
        assert at.told == [receipt] and not await at.weights.recover()
        assert (await at.engines.health())["tokens"] == 10 and at.engines.restarts == 0

    asyncio.run(main())


def test_weights_engine_that_dies_on_the_way_is_started_again_and_served(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path)
        at.transport.kill = [at.engines.handles[1]]
        await at.weights.publish()
        assert served(at.engines) == [3, 3] and at.runtime.ended == ["engine-1"]
        assert at.pool.doors == [["engine-0", "engine-1"]]

    asyncio.run(main())


def test_weights_dead_engine_is_recovered_with_the_same_weights(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path)
        await at.weights.publish()
        at.engines.handles[0].dead = True
        assert await at.engines.end_silent()
        assert await at.weights.recover()
        assert served(at.engines) == [3, 3] and at.engines.restarts == 1

    asyncio.run(main())


def test_weights_recovery_waits_for_the_trainers_step(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path)
        at.engines.handles[0].dead = True
        async with at.trainer.idle:
            recovering = asyncio.create_task(at.weights.recover())
            await asyncio.sleep(0.05)
            assert served(at.engines) == [-1, -1]
        assert await recovering and served(at.engines) == [3, 3]

    asyncio.run(main())


def test_weights_that_a_living_engine_refuses_are_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path)
        at.transport.refuse = True
        with pytest.raises(WeightSyncError, match="engine-0: another digest"):
            await at.weights.publish()
        assert not at.runtime.ended

    asyncio.run(main())


@pytest.mark.parametrize(("said", "started"), [("ab", "a, b, a"), ("a", "a, a")])
def test_weights_that_fail_alike_after_a_restart_do_not_use_up_all_restarts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str, started: str
) -> None:
    """Two faults that are the same but for ports one after the other end it, and the cause is said
    at once; others are tried again."""

    async def main() -> None:
        at = await made(tmp_path, count=1, restarts=2)
        faults: list[str] = []

        async def differs(version: int, *, trainer: Any, engines: Any) -> Receipt:
            engines[0].dead = True  # as one that cannot be used any more, for `revive`
            faults.append(said[len(faults) % len(said)])
            raise WeightSyncError(f"127.0.0.1:{4000 + len(faults)}: NCCL error in {faults[-1]}")

        at.transport.publish = differs
        with pytest.raises((WeightSyncError, WorkerError)) as found:
            await at.weights.publish()
        assert ", ".join(faults) == started
        assert "since it failed: 127.0.0.1:4001: NCCL error in a" in caplog.text
        if said == "a":
            assert isinstance(found.value, WeightSyncError) and at.engines.restarts == 1
            assert "with an engine started anew it failed in the same way" in found.value.detail
        else:
            assert "they are used up" in found.value.detail
            assert "publishing had failed: 127.0.0.1:4003: NCCL error in a" in found.value.detail

    asyncio.run(main())


def test_weights_of_an_engine_killed_twice_alike_are_published_to_a_third(tmp_path: Path) -> None:
    """A death is no fault of the update, and transports tell it in the same words each time."""

    async def main() -> None:
        at = await made(tmp_path, count=1, restarts=2)
        works, deaths = at.transport.publish, []

        async def dies(version: int, *, trainer: Any, engines: Any) -> Receipt:
            if len(deaths) == 2:
                return await works(version, trainer=trainer, engines=engines)
            engines[0].dead = True
            deaths.append(version)
            raise WeightSyncError("receiver.take failed: engine: killed") from WorkerError("killed")

        at.transport.publish = dies
        await at.weights.publish()
        assert at.engines.restarts == 2 and served(at.engines) == [3]

    asyncio.run(main())


def test_weights_restarts_run_out_with_the_first_fault(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path, count=1, restarts=1)
        at.engines.handles[0].dead = True
        assert await at.weights.recover()
        at.engines.handles[0].dead = True
        with pytest.raises(WorkerError, match="engine: worker 0 is dead") as found:
            await at.weights.recover()
        assert "max_restarts is 1, and they are used up" in found.value.detail

    asyncio.run(main())


def test_weights_publish_that_hangs_names_who_it_waited_for_and_how_long(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path, seconds=60, timeout_s=0.02)
        said = r"publishing version 3 took longer than publish_timeout_s \(0\.02 s\), waiting for "
        with pytest.raises(WeightSyncError, match=said + "Transport"):
            await at.weights.publish()
        trainer, engine = at.trainer.handle, at.engines.handles[1]
        trainer.owed = lambda: [("sender.fill", 61.2), ("worker.ping", 1.0)]
        engine.owed = lambda: [("receiver.stage", 7.0)]

        async def where() -> str:
            assert not at.weights._sending.done()  # or it would say where it gave up
            return "at transport/broadcast.py:96 _reached < free < fill"

        trainer.where = where
        said += (
            r"trainer \(sender\.fill, 61 s; at transport/broadcast\.py:96 _reached < free < fill\)"
        )
        said += r"; engine-1 \(receiver\.stage, 7 s\)$"
        with pytest.raises(WeightSyncError, match=said):
            await at.weights.publish()

    asyncio.run(main())


def test_weights_transport_that_ignores_being_given_up_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles.workers.weights._CLEAN_UP_S", 0.05)

    async def main() -> None:
        at = await made(tmp_path, timeout_s=0.02)
        heard = asyncio.Event()

        async def deaf(version: int, **_: Any) -> Receipt:
            entered.append(version)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await heard.wait()
            raise AssertionError("nobody waits for this")

        at.transport.publish, entered = deaf, []
        at.engines.handles[0].dead = True  # which would be a reason to begin anew
        with pytest.raises(WeightSyncError, match=r"publish_timeout_s \(0\.02 s\)") as found:
            await at.weights.publish()
        assert found.value.__notes__ == ["it did not stop in 0.05 s either"]
        assert entered == [3] and not at.runtime.ended
        heard.set()
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_weights_that_were_late_tell_what_ended_them(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path, timeout_s=0.02)

        async def worse(version: int, **_: Any) -> Receipt:
            try:
                await asyncio.sleep(60)
            finally:
                raise ValueError("the cause")

        at.transport.publish = worse
        with pytest.raises(WeightSyncError) as found:
            await at.weights.publish()
        assert str(found.value.__cause__) == "the cause"

    asyncio.run(main())


@pytest.mark.parametrize("when", ["starts", "publishes"])
def test_weights_recovery_outlives_the_group_that_noticed(tmp_path: Path, when: str) -> None:
    """It is cancelled while a worker starts, or while weights are sent: one worker is started, and
    nothing is begun twice."""

    async def main() -> None:
        at = await made(tmp_path, seconds=0.05 if when == "publishes" else 0.0)
        began, go_on = asyncio.Event(), asyncio.Event()
        start, publish, sent = at.runtime.start, at.transport.publish, []

        async def slowly(*args: Any, **more: Any) -> Any:
            began.set()
            await go_on.wait()
            return await start(*args, **more)

        async def told(version: int, **more: Any) -> Receipt:
            began.set()
            receipt = await publish(version, **more)
            sent.append(version)
            return receipt

        at.runtime.start = slowly if when == "starts" else start
        at.transport.publish = told if when == "publishes" else publish
        at.engines.handles[0].dead = True
        noticed = asyncio.create_task(at.weights.recover())
        await began.wait()
        noticed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await noticed
        go_on.set()
        while at.weights._recoveries:
            await asyncio.sleep(0.01)
        assert served(at.engines) == [3, 3] and not await at.weights.recover()
        assert at.runtime.started == ["engine-0", "engine-1", "engine-0"]
        assert sent == ([3] if when == "publishes" else [])

    asyncio.run(main())


def test_weights_close_gives_recoveries_up(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path, seconds=60)
        at.engines.handles[0].dead = True
        noticed = asyncio.create_task(at.weights.recover())
        await asyncio.sleep(0.02)
        await at.weights.close()
        with pytest.raises(asyncio.CancelledError):
            await noticed
        assert not at.weights._recoveries

    asyncio.run(main())


def test_weights_colocated_recovery_is_left_to_the_publish_after_the_step(tmp_path: Path) -> None:
    """While the trainer has the devices no engine may be started beside it; and outside of that it
    must be awake to send."""

    class Part:
        awake = True

        async def sleep(self) -> None:
            self.awake = False

        async def wake(self) -> None:
            self.awake = True

    async def main() -> None:
        trainer, buffer = Part(), Buffer(groups_per_step=1, samples_per_group=1)
        placement = Colocated(buffer=buffer, trainer=trainer, engine=Part(), drain_timeout_s=1)
        at = await made(tmp_path, placement=placement)
        publish = at.transport.publish

        async def exporting(version: int, **more: Any) -> Receipt:
            assert trainer.awake
            return await publish(version, **more)

        at.transport.publish = exporting
        async with placement.publishing():
            await at.weights.publish()
        at.engines.handles[0].dead = True
        assert not trainer.awake and await at.weights.recover() and not trainer.awake
        async with placement.training():
            at.engines.handles[0].dead = True
            assert not await at.weights.recover() and at.engines.restarts == 1
        async with placement.publishing():
            await at.weights.publish()
        assert served(at.engines) == [3, 3] and at.engines.restarts == 2

    asyncio.run(main())


def test_engines_one_that_cannot_sleep_is_ended_and_the_others_sleep(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path)
        at.engines.handles[0].dead = True
        await at.engines.sleep()
        assert at.runtime.ended == ["engine-0"]
        assert at.engines.handles[1].ranks[0]["engine"].asleep
        await at.engines.wake()
        assert not at.engines.handles[1].ranks[0]["engine"].asleep

    asyncio.run(main())


def test_engines_say_why_one_was_ended_that_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        at = await made(tmp_path, restarts=1)

        async def lost() -> int:
            raise EngineError("engine sglang: the server ended with -9")

        for restarts_left in (True, False):
            at.engines.handles[0].ranks[0]["engine"].version = lost
            assert await at.engines.end_silent() and await at.engines.end_silent()
            if restarts_left:
                assert await at.weights.recover()
        with pytest.raises(WorkerError, match=r"engine-0: .*the server ended with -9"):
            await at.weights.recover()

    asyncio.run(main())
    assert "engine-0 is started again: engine-0: engine sglang: the server ended with -9" in (
        caplog.text
    )


def test_engines_end_silent_spares_one_that_was_started_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path)
        old, faults = at.engines.handles[0], at.engines.faults

        async def slow_faults(**more: Any) -> Any:
            found = await faults(**more)
            at.engines.handles[0] = FakeHandle("engine-0", {"engine": Engine(), "worker": Door()})
            return found

        old.dead, at.engines.faults = True, slow_faults
        assert await at.engines.end_silent()
        assert not at.engines.handles[0].dead

    asyncio.run(main())


def test_engines_of_which_one_does_not_start_are_all_ended(tmp_path: Path) -> None:
    async def main() -> None:
        runtime = Runtime()
        start = runtime.start

        async def one_fails(name: str, *args: Any, **more: Any) -> FakeHandle:
            await asyncio.sleep(0.01 if name == "engine-1" else 0.0)
            if name == "engine-1":
                raise WorkerError("engine-1: no such GPU")
            return await start(name, *args, **more)

        runtime.start = one_fails  # type: ignore[method-assign]
        engines = Engines(runtime, timeout_s=5, max_restarts=2)  # type: ignore[arg-type]
        with pytest.raises(WorkerError, match="no such GPU"):
            await engines.build([], Context(directory=tmp_path), count=3)
        assert sorted(runtime.ended) == ["engine-0", "engine-2"] and engines.handles == []

    asyncio.run(main())


def test_eval_fleet_of_which_one_does_not_start_is_ended(tmp_path: Path) -> None:
    """And the next load starts it anew."""

    async def main() -> None:
        runtime = Runtime()
        start, broken = runtime.start, ["eval-engine"]

        async def one_fails(name: str, *args: Any, **more: Any) -> FakeHandle:
            if name in broken:
                await asyncio.sleep(0.01)
                raise WorkerError(f"{name}: no such GPU")
            return await start(name, *args, **more)

        runtime.start = one_fails  # type: ignore[method-assign]
        around = Context(directory=tmp_path)
        fleet = EvalFleet(runtime=runtime, engine=[], rollouts=[], context=around, count=1)
        with pytest.raises(WorkerError, match="no such GPU"):
            await fleet._start()
        assert runtime.ended == ["eval-rollout"]
        broken[:] = ["eval-rollout"]
        with pytest.raises(WorkerError, match="no such GPU"):
            await fleet._start()
        assert runtime.ended == ["eval-rollout", "eval-engine"]

    asyncio.run(main())


def test_engines_are_kept_rebuilt_or_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        at = await made(tmp_path)
        before = list(at.engines.handles)
        await at.engines.build([], Context(directory=tmp_path), count=2)
        assert at.engines.handles == before and at.runtime.started == ["engine-0", "engine-1"]
        await at.engines.build([SimpleNamespace()], Context(directory=tmp_path), count=2)
        assert at.runtime.started[2:] == ["engine-0 again", "engine-1 again"]
        at.runtime.started.clear()
        around = Context(directory=tmp_path)
        await at.engines.build([], around, count=2, variables={"X": "1"})
        assert at.runtime.started == ["engine-0", "engine-1"]  # others than they were born with
        await at.engines.build([], around, count=2, variables={"X": "1"})
        assert at.runtime.started == at.runtime.ended == ["engine-0", "engine-1"]
        at.runtime.ended.clear()
        await at.engines.build([], Context(directory=tmp_path), count=1)
        assert at.runtime.ended == ["engine-0", "engine-1"] and len(at.engines.doors) == 1

    asyncio.run(main())
