"""The driver's mirrors of components in other processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.batch import Update
from miles.errors import EngineError, TrainerError, WorkerError
from miles.protocols import Engine
from miles.testing import CachingEngine, FakeHandle
from miles.types import Completion, Request, Sampling
from miles.wire.remote import RemoteEngine, RemoteTrainer


class Trainer:
    """Remembers what it was asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asked: list[Any] = []
        self.fault: Exception | None = None

    def step(self, batch: Any) -> Update:
        if self.fault is not None:
            raise self.fault
        self.asked.append("step")
        return Update(version=batch + 1, metrics={"lr": float(self.rank)})

    def save(self, directory: str) -> None:
        self.asked.append(("save", directory))

    def load(self, directory: str, weights_only: bool = False) -> None:
        self.asked.append(("load", directory, weights_only))

    def logprobs(self, tokens: Any, source: str) -> np.ndarray:
        return np.full(2, self.rank, np.float32)  # (tokens,) float32

    def sleep(self) -> None:
        self.asked.append("sleep")

    def wake(self) -> None:
        self.asked.append("wake")


class Timed(FakeHandle):
    """Remembers the time limits of calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.limits: dict[str, float | None] = {}

    async def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        self.limits[target] = kwargs.get("timeout")
        return await super().call(target, *args, **kwargs)


def request(key: str = "g0.0") -> Request:
    tokens = np.arange(5, dtype=np.int32)  # (tokens,) int32
    sampling = Sampling(max_new_tokens=3)
    return Request(id=f"{key}/0", key=key, tokens=tokens, sampling=sampling, seed=1)


def test_remote_trainer_asks_every_rank_and_takes_the_first_answer() -> None:
    ranks = [Trainer(0), Trainer(1)]
    remote = RemoteTrainer(FakeHandle("trainer", *({"trainer": r} for r in ranks)), timeout_s=5)

    async def play() -> None:
        update = await remote.step(6)  # type: ignore[arg-type]
        assert (update.version, update.metrics["lr"]) == (7, 0.0)
        assert remote.version == 7 and remote.certain
        values = await remote.logprobs(None, "current")  # type: ignore[arg-type]
        assert values.tolist() == [0, 0]
        await remote.save(Path("/there"))
        await remote.load(Path("/there"), weights_only=True)
        await remote.sleep()
        await remote.wake()

    asyncio.run(play())
    expected = ["step", ("save", "/there"), ("load", "/there", True), "sleep", "wake"]
    assert [rank.asked for rank in ranks] == [expected, expected]


def test_remote_trainer_is_uncertain_only_after_a_step_that_was_lost() -> None:
    trainer = Trainer(0)
    handle = FakeHandle("trainer", {"trainer": trainer})
    remote = RemoteTrainer(handle, timeout_s=5, version=3)
    trainer.fault = TrainerError("the gradient is not finite")
    with pytest.raises(TrainerError, match="not finite"):
        asyncio.run(remote.step(3))  # type: ignore[arg-type]
    assert remote.certain and remote.version == 3  # it refused: the weights are as they were
    handle.dead = True
    with pytest.raises(WorkerError, match="dead"):
        asyncio.run(remote.step(3))  # type: ignore[arg-type]
    assert not remote.certain and remote.version == 3


def test_remote_trainer_names_the_key_of_a_step_that_took_too_long() -> None:
    class Slow(FakeHandle):
        async def call_all(self, target: str, *args: Any, **how: Any) -> list[Any]:
            await asyncio.sleep(how["timeout"])
            raise WorkerError(f"trainer: {target} did not answer within {how['timeout']} s")

    remote = RemoteTrainer(Slow("trainer"), timeout_s=5, step_timeout_s=0.01)
    with pytest.raises(WorkerError, match=r"trainer\.step did not answer within 0\.01") as found:
        asyncio.run(remote.step(3))  # type: ignore[arg-type]
    assert "step_timeout_s is 0.01" in found.value.detail and not remote.certain


def test_remote_trainer_that_is_at_work_or_gone_is_not_free() -> None:
    class Precision:
        def fingerprint(self) -> str:
            return "fp32"

    handle = Timed("trainer", {"precision": Precision()})
    remote = RemoteTrainer(handle, timeout_s=5)
    assert asyncio.run(remote.free(3)) and handle.limits == {"precision.fingerprint": 3}
    handle.dead = True
    assert not asyncio.run(remote.free(3))


def test_remote_calls_have_a_limit_except_a_generation() -> None:
    """How long a completion may take is its session's or router's matter."""
    handle = Timed("engine", {"engine": CachingEngine(), "trainer": Trainer(0)})
    engine = RemoteEngine(handle, timeout_s=7)

    async def play() -> None:
        await engine.generate(request())
        for method in (engine.pause, engine.resume, engine.version, engine.health, engine.abort):
            await method()  # type: ignore[operator]
        await engine.score(np.arange(3, dtype=np.int32))
        trainer = RemoteTrainer(handle, timeout_s=9, step_timeout_s=4)
        await trainer.save(Path("x"))
        await trainer.step(6)  # type: ignore[arg-type]

    asyncio.run(play())
    assert handle.limits.pop("trainer.step") == 4
    assert handle.limits.pop("engine.generate") is None
    assert handle.limits.pop("trainer.save") == 9
    assert set(handle.limits.values()) == {7}


def test_remote_engine_is_an_engine_and_answers_as_the_one_there() -> None:
    there = CachingEngine(CachingEngine.Config(chunk=2))
    engine = RemoteEngine(FakeHandle("engine", {"engine": there}), timeout_s=5)

    async def play() -> None:
        assert isinstance(engine, Engine)
        completion = await engine.generate(request())
        assert completion.tokens.tolist() == (await there.generate(request())).tokens.tolist()
        items = [item async for item in engine.stream(request())]
        assert isinstance(items[-1], Completion)
        assert np.concatenate(items[:-1]).tolist() == completion.tokens.tolist()
        assert await engine.version() == 0 and (await engine.health())["active"] == 0
        await engine.pause()
        assert not there.stuck.is_set()
        await engine.resume()
        assert (await engine.score(np.arange(2, dtype=np.int32))).tolist() == [0, -1]
        await engine.sleep()
        await engine.wake()

    asyncio.run(play())


def test_remote_engine_aborts_by_key() -> None:
    there = CachingEngine(CachingEngine.Config(decode_s=0.02, chunk=1))
    engine = RemoteEngine(FakeHandle("engine", {"engine": there}), timeout_s=5)

    async def play() -> None:
        tasks = [asyncio.create_task(engine.generate(request(key))) for key in ("a", "b")]
        await asyncio.sleep(0.01)
        assert await engine.abort(("a", "unknown")) == 1
        assert (await tasks[0]).finish == "abort"
        assert (await tasks[1]).finish == "length"

    asyncio.run(play())


def test_remote_engine_has_the_ranks_of_the_one_there() -> None:
    class Ranked(CachingEngine):
        async def health(self) -> dict[str, float]:
            return {**await super().health(), "dp_ranks": 4.0}

    engine = RemoteEngine(FakeHandle("engine", {"engine": Ranked()}), timeout_s=5)
    assert engine.dp_ranks == 1
    assert asyncio.run(engine.look()) is engine and engine.dp_ranks == 4


def test_remote_engine_raises_what_the_one_there_raised() -> None:
    there = CachingEngine()
    there.fault = EngineError("it does not fit")
    engine = RemoteEngine(FakeHandle("engine", {"engine": there}), timeout_s=5)
    with pytest.raises(EngineError, match="it does not fit"):
        asyncio.run(engine.generate(request()))


def test_remote_engine_takes_no_weights() -> None:
    engine = RemoteEngine(FakeHandle("engine", {}), timeout_s=5)
    with pytest.raises(TypeError, match="publish them with a transport"):
        asyncio.run(engine.load(1, []))
