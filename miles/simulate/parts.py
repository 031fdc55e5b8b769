"""Modelled trainer and transport: how long a step and a publish take, and who is held up by them.

What is trained and moved is counted, not computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from miles.batch import Batch, Receipt, Update
from miles.errors import WorkerError
from miles.router import Router
from miles.simulate.engine import ModelledEngine
from miles.simulate.keys import Keys

__all__ = ["ModelledTrainer", "ModelledWeights"]

_SLOW = 10.0  # times as long, when that goes wrong


class ModelledTrainer:
    """What the loop asks of a trainer."""

    def __init__(self, keys: Keys, engines: Sequence[ModelledEngine], rng: Random) -> None:
        self.version = 0
        self.certain = True
        self.computing = False
        self.dead = ""
        """Why it does nothing any more; empty while it lives."""
        self._keys = keys
        self._engines = engines
        self._rng = rng
        self._left = self._at = 0.0  # seconds of work, as of when
        self._speed = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[None] | None = None

    def seconds(self, lengths: Sequence[int]) -> float:
        """What a step on samples of these many tokens takes when nothing is in the way."""
        keys = self._keys.trainer
        tokens = float(sum(int(x) for x in lengths))
        return (
            keys.step_s
            + len(lengths) * keys.sample_s
            + tokens / (keys.gpus * keys.tokens_per_gpu_s)
        )

    async def step(self, batch: Batch) -> Update:
        """Take the time of a step on the batch's `lengths`. Raises `WorkerError` when it dies."""
        self.refuse_dead()
        seconds = self.seconds(batch.tokens.lengths.tolist())
        if self._rng.random() < self._keys.faults.slow_step:
            seconds *= _SLOW
        await self._work(seconds)
        self.version += 1
        return Update(version=self.version)

    def die(self, why: str) -> None:
        """Fail the step that is being taken, and everything from now on."""
        self.dead = why
        if self._done is not None and not self._done.done():
            self.certain = False
            self._done.set_exception(WorkerError(f"trainer: {why}"))

    def refuse_dead(self) -> None:
        """Raise `WorkerError` when it is dead."""
        if self.dead:
            raise WorkerError(f"trainer: {self.dead}")

    async def sleep(self) -> None:
        """Nothing: what that takes is part of a step."""

    async def wake(self) -> None:
        """Nothing."""

    async def _work(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.computing = True
        share = self._keys.engine.trainer_share
        for engine in self._engines:
            engine.at_speed(share)
        self._left, self._at, self._done = seconds, loop.time(), loop.create_future()
        self._aim()
        try:
            await self._done
        finally:
            self._done, self.computing = None, False
            if self._timer is not None:
                self._timer.cancel()
            for engine in self._engines:
                engine.at_speed(1.0)

    def engines_changed(self) -> None:
        """An engine began or ended to compute; matters where they share processors."""
        if self._done is None or self._keys.trainer.engine_share == 1.0:
            return
        now = asyncio.get_running_loop().time()
        self._left -= (now - self._at) * self._speed
        self._at = now
        self._aim()

    def _aim(self) -> None:
        busy = any(engine.computing for engine in self._engines)
        self._speed = self._keys.trainer.engine_share if busy else 1.0
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._at + max(0.0, self._left) / self._speed, self._end)

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class ModelledWeights:
    """What a stage asks of `miles.workers.weights`."""

    def __init__(
        self,
        keys: Keys,
        *,
        pause: str,
        trainer: ModelledTrainer,
        engines: Sequence[ModelledEngine],
        router: Router,
        rng: Random,
        changed: Callable[[], None],
    ) -> None:
        """`pause` is the setting of that name; `changed` is called as engines stop and go on."""
        self.version = 0
        """What an engine that starts is given."""
        self._keys = keys
        self._pause = pause
        self._trainer = trainer
        self._engines = engines
        self._router = router
        self._rng = rng
        self._changed = changed

    async def publish(self) -> Receipt:
        """Take the time of a publish, and do to requests what `pause` says. Raises `WorkerError`
        when the trainer is dead."""
        self._trainer.refuse_dead()
        keys, version = self._keys.publish, self._trainer.version
        seconds = keys.fixed_s + keys.bytes / keys.bytes_per_s
        busy = any(engine.computing for engine in self._engines)
        if self._rng.random() < self._keys.faults.slow_step:
            seconds *= _SLOW
        await asyncio.sleep(seconds * (1 - keys.stopped) + (keys.busy_s if busy else 0.0))
        for engine in self._engines:
            await engine.pause()
            if self._pause == "abort":
                await engine.abort()
        self._changed()
        await asyncio.sleep(seconds * keys.stopped)
        self._trainer.refuse_dead()
        self.version = version
        for engine in self._engines:
            if not engine.dead:
                await engine.load(version)
                if self._pause != "in_place":
                    engine.forget()
            await engine.resume()
        self._router.published(version)
        self._changed()
        return Receipt(version=version, digest="", bytes=int(keys.bytes), seconds=seconds)

    async def recover(self) -> bool:
        """Nothing to do: engines that died come back by themselves."""
        return False
