"""Reasoning Gym's scorers in a child process that is killed when a deadline passes.

It knows nothing of tasks, tokens or the environment's configuration.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import Pool
from typing import Any

_START_S = 120.0  # importing the library on a busy machine
_dataset: Any = None  # in the child: what scores


class Scorer:
    """Scores answers one after the other in a child process, which starts with the first answer.

    May be used from several event loops.
    """

    def __init__(self, name: str, options: Mapping[str, Any], *, timeout_s: float) -> None:
        self._arguments = (name, dict(options))
        self._timeout_s = timeout_s
        self._pools: list[Pool] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reasoning-gym")
        weakref.finalize(self, _stop, self._pools, self._thread)

    async def __call__(
        self, answer: str | None, entry: Mapping[str, Any]
    ) -> tuple[float, Mapping[str, float]]:
        """The score, and whether the scorer had to be killed or could not read the answer."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._score, answer, dict(entry))

    def _score(
        self, answer: str | None, entry: dict[str, Any]
    ) -> tuple[float, Mapping[str, float]]:
        pool = self._pool()
        result = pool.apply_async(_score, (answer, entry))
        result.wait(self._timeout_s)
        done = result.ready()
        if not done:
            pool.terminate()
            self._pools.clear()
        readable = done and result.successful()
        metrics = {"reward_killed": float(not done), "reward_unreadable": float(done > readable)}
        return (float(result.get()) if readable else 0.0), metrics

    def _pool(self) -> Pool:
        if not self._pools:
            spawn = multiprocessing.get_context("spawn")
            self._pools.append(spawn.Pool(1, _open, self._arguments))
            self._pools[0].apply_async(_open, self._arguments).get(_START_S)
        return self._pools[0]


def _open(name: str, options: Mapping[str, Any]) -> None:
    global _dataset
    import reasoning_gym

    _dataset = reasoning_gym.create_dataset(name, seed=0, size=1, **options)


def _score(answer: str | None, entry: dict[str, Any]) -> float:
    return float(_dataset.score_answer(answer=answer, entry=entry))


def _stop(pools: list[Pool], thread: ThreadPoolExecutor) -> None:
    for pool in pools:
        pool.terminate()
    thread.shutdown(wait=False)
