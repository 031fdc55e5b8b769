"""A reward chosen by name: built-in quick ones at once, slow ones in a process, a plugin's in a
thread.

Comparing is `rewards`, killing what takes too long `grading`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from miles import ConfigError, EpisodeTimeout, Task, Threads, choices
from miles_plugins.environment.grading import Grader
from miles_plugins.environment.rewards import REWARDS, SLOW

__all__ = ["Scorer"]


class Scorer:
    """`scorer(task, text)`: what a text is worth, a number or an awaitable of one."""

    def __init__(
        self,
        *,
        environment: str,
        reward: str,
        pattern: str,
        timeout_s: float,
        processes: int,
        offered: Mapping[str, Any],
    ) -> None:
        """`offered` are the rewards of plugins. Raises `ConfigError` for a name that neither they
        nor miles have, and for a pattern or limits that make no sense."""
        where = f"environment {environment}"
        _check(where, reward, pattern, offered)
        if timeout_s <= 0 or processes < 1:
            raise ConfigError(
                f"{where}: reward_timeout_s is {timeout_s} and reward_processes {processes}; both "
                "must be above 0"
            )
        self._grade = self._grader(environment, reward, pattern, timeout_s, processes, offered)

    def __call__(self, task: Task, text: str) -> Any:
        """A number, a number with metrics, or an awaitable of either. Raises what the reward
        raises, `EpisodeTimeout` when a plugin's takes too long."""
        return self._grade(task, text)

    @staticmethod
    def _grader(
        environment: str,
        reward: str,
        pattern: str,
        timeout_s: float,
        processes: int,
        offered: Mapping[str, Any],
    ) -> Callable[[Task, str], Any]:
        if reward in SLOW:
            options = {"pattern": pattern} if reward == "regex" else {}
            grader = Grader(environment=environment, deadline_s=timeout_s, processes=processes)
            return lambda task, text: grader(reward, text, task, **options)
        if reward in REWARDS:
            return lambda task, text: REWARDS[reward](text, task)
        function = offered[reward]
        threads = Threads(processes, name="reward", timeout_s=timeout_s)

        async def ask(task: Task, text: str) -> Any:
            if not inspect.iscoroutinefunction(function):
                return await threads.call(partial(function, text, task))
            async with asyncio.timeout(timeout_s):
                return await function(text, task)

        async def grade(task: Task, text: str) -> Any:
            try:
                return await ask(task, text)
            except TimeoutError as error:
                raise EpisodeTimeout(
                    f"environment {environment}: reward {reward!r} took longer than {timeout_s:g} s"
                ) from error

        return grade


def _check(where: str, reward: str, pattern: str, offered: Mapping[str, Any]) -> None:
    known = {*REWARDS, *offered}
    taken = sorted(set(REWARDS) & set(offered))
    if taken:
        raise ConfigError(f"{where}: a plugin claims the built-in reward {taken[0]!r}; rename it")
    if reward not in known:
        raise ConfigError(f"{where}: no reward {reward!r}; {choices(reward, known)}")
    if reward == "math" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"{where}: reward 'math' needs `math-verify`: pip install 'miles[data]'")
    if pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{where}: pattern {pattern!r}: {error}") from error
