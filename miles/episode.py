"""The shortest way to write an environment: a one-turn episode from a prompt and a reward function,
and tasks that are made when they are asked for.

It also says what a usable reward is. Tokens, engines and time limits are the loop's business.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, overload

from miles.errors import BadReward
from miles.protocols import Reply, Step
from miles.types import Message, Task

__all__ = ["LazyTasks", "Reward", "SingleTurn", "check_reward"]

Reward = float | tuple[float, Mapping[str, float]]
"""What an attempt was worth, alone or with metrics to log."""

_LIMIT = float.fromhex("0x1.fffffep+127")  # the largest float32
_DONE = Step()


class LazyTasks(Sequence[Task]):
    """Tasks of a split that are made when they are asked for: only their keys are held."""

    __slots__ = ("_keys", "_make")

    def __init__(self, keys: Sequence[Any], make: Callable[[Any], Task]) -> None:
        """`make(key)` must give the same task every time."""
        self._keys = keys
        self._make = make

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return LazyTasks(self._keys[index], self._make)
        return self._make(self._keys[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class SingleTurn:
    """An `Episode` of one assistant turn: the prompt, and a function of the text that came back.

    `reward` takes the text and returns a number, or a number with metrics, or a coroutine of
    either; what it returns is checked with `check_reward` under the name `environment`.
    """

    __slots__ = ("_environment", "_prompt", "_reward", "_text")

    def __init__(
        self,
        prompt: str | Sequence[Message],
        reward: Callable[[str], Reward | Awaitable[Reward]],
        *,
        environment: str = "environment",
    ) -> None:
        """`environment` is the name that error messages use."""
        self._prompt = prompt
        self._reward = reward
        self._environment = environment
        self._text = ""

    async def reset(self) -> str | Sequence[Message]:
        """The prompt."""
        return self._prompt

    async def step(self, reply: Reply) -> Step:
        """Keep the text; there is no second turn."""
        self._text = reply.text
        return _DONE

    async def reward(self) -> tuple[float, Mapping[str, float]]:
        """What the function says. Raises `BadReward` when that is not a finite number."""
        value = self._reward(self._text)
        if inspect.isawaitable(value):
            value = await value
        return check_reward(value, self._environment)


def check_reward(value: Any, environment: str) -> tuple[float, Mapping[str, float]]:
    """The reward as a float and its metrics.

    Raises `BadReward` naming the environment when it is None, not one number, not finite, or beyond
    float32.
    """
    metrics: Mapping[str, float] = {}
    if type(value) is tuple and len(value) == 2 and isinstance(value[1], Mapping):
        value, metrics = value
        for name, number in metrics.items():
            _number(number, f"environment {environment!r}: metric {name!r}")
    return _number(value, f"environment {environment!r}: reward"), metrics


def _number(value: Any, what: str) -> float:
    if type(value) is not float:
        value = _scalar(value, what)
    if not -_LIMIT <= value <= _LIMIT:  # false for NaN as well
        word = "NaN" if math.isnan(value) else str(value)
        raise BadReward(f"{what} is {word}; a finite float32 number is wanted")
    return float(value)


def _scalar(value: Any, what: str) -> float:
    """A number from anything that is one number: bool, int, numpy or torch scalars of no
    dimensions."""
    shape = getattr(value, "shape", ())
    if hasattr(value, "__len__") and not hasattr(value, "shape"):
        found = (
            repr(value)
            if isinstance(value, str)
            else f"{len(value)} values ({type(value).__name__})"
        )
    elif tuple(shape):
        found = f"an array of shape {tuple(shape)}"
    elif hasattr(value, "__float__"):
        try:
            return float(value)
        except OverflowError:
            found = "an integer beyond every float"
    else:
        found = "None" if value is None else f"a {type(value).__name__}"
    raise BadReward(f"{what} is {found}; one finite number is wanted")
