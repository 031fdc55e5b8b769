"""Whole-number arithmetic made from a seed, with a held-out part that no seed can train on.

Problems are numbered, shuffled and split here; nothing is read from a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from miles import ConfigError, Context, LazyTasks, SingleTurn, Split, Task, derive_seed

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
}


class Arithmetic:
    """Problems such as `34+57=`, worth 1 when the answer is exactly right and 0 otherwise.

    Operands have exactly `digits` digits. A problem is held out or not by a BLAKE2 hash of its text
    alone, so the two splits are disjoint under every seed; the seed decides which problems of a
    split are used, and their order.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """What is asked."""

        digits: int = 2
        """Digits of each operand: the difficulty."""
        operations: tuple[str, ...] = ("+",)
        """Of `+`, `-` and `*`."""
        reverse: bool = True
        """Answers are written with their lowest digit first, as one adds by hand; much easier for a
        small model."""
        chat: bool = False
        """The prompt is a user's message for the model's template; off, it is text to continue as
        it is."""
        prompt: str = "{problem}="
        """The prompt's text, with `{problem}` in it."""
        final: bool = False
        """The last number in the text is the answer; off, the whole text must be the answer and
        nothing else."""
        mistakes: float = 0.0
        """Share of problems whose solution has one wrong digit: a careless teacher. Imitation then
        samples right answers 1 - `mistakes` of the time, and only the reward leads further. Answers
        and rewards are never wrong."""
        heldout_fraction: float = 0.1
        """Share of all problems that is never trained on."""
        train: int = 8192
        """Training tasks at most."""
        heldout: int = 256
        """Held-out tasks at most."""

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        self.config = config
        self._seed = context.seed
        self._splits: dict[Split, Sequence[Task]] = {}

    def tasks(self, split: Split) -> Sequence[Task]:
        """Distinct problems of a split, in seeded order; a task is made when it is asked for."""
        if split not in self._splits:
            numbers = _numbers(self.config, self._seed, split)
            self._splits[split] = LazyTasks(numbers, partial(_task, self.config))
        return self._splits[split]

    def episode(self, task: Task, seed: int) -> SingleTurn:
        """One turn; the reward compares with the task's answer."""
        return SingleTurn(
            task.prompt, partial(_reward, task.answer, self.config.final), environment="arithmetic"
        )


def _numbers(config: Arithmetic.Config, seed: int, split: Split) -> list[int]:
    """Numbers of a split's problems."""
    wanted = config.train if split == "train" else config.heldout
    threshold = int(config.heldout_fraction * 2**64)
    size = _span(config)[1] ** 2 * len(config.operations)
    numbers: list[int] = []
    for number in shuffled(size, derive_seed(seed, "arithmetic", split)):
        if len(numbers) == wanted:
            break
        heldout = text_hash(_problem(config, number)[0]) < threshold
        if heldout == (split == "heldout"):
            numbers.append(number)
    return numbers


def _task(config: Arithmetic.Config, number: int) -> Task:
    problem, result = _problem(config, number)
    answer = _written(result, config.reverse)
    text = config.prompt.replace("{problem}", problem)
    return Task(
        id=problem,
        prompt=({"role": "user", "content": text},) if config.chat else text,
        answer=answer,
        solution=_solution(config, problem, answer),
    )


def _solution(config: Arithmetic.Config, problem: str, answer: str) -> str:
    """The answer, or for a share of the problems, chosen by their text, a wrong one."""
    lot = derive_seed("mistake", problem)
    if lot >= config.mistakes * 2**63:
        return answer
    places = [i for i, letter in enumerate(answer) if letter.isdigit()]
    place = places[lot % len(places)]
    wrong = (int(answer[place]) + 1 + lot // 64 % 9) % 10
    return f"{answer[:place]}{wrong}{answer[place + 1 :]}"


def _span(config: Arithmetic.Config) -> tuple[int, int]:
    """The smallest operand, and how many there are."""
    low = 10 ** (config.digits - 1) if config.digits > 1 else 0
    return low, 10**config.digits - low


def _problem(config: Arithmetic.Config, number: int) -> tuple[str, int]:
    """The text of a numbered problem, and its result."""
    low, span = _span(config)
    number, operation = divmod(number, len(config.operations))
    x, y = divmod(number, span)
    sign = config.operations[operation]
    x, y = x + low, y + low
    return f"{x}{sign}{y}", _OPERATIONS[sign](x, y)


def _check(config: Arithmetic.Config) -> None:
    where = "environment arithmetic"
    if not 1 <= config.digits <= 18:
        raise ConfigError(f"{where}: digits is {config.digits}; 1 to 18 is wanted")
    wrong = [sign for sign in config.operations if sign not in _OPERATIONS]
    if wrong or not config.operations or len(set(config.operations)) != len(config.operations):
        raise ConfigError(
            f"{where}: operations is {list(config.operations)}; valid, each at most once: "
            f"{', '.join(_OPERATIONS)}"
        )
    if not 0 <= config.heldout_fraction < 1:
        raise ConfigError(
            f"{where}: heldout_fraction is {config.heldout_fraction}; at least 0 and below 1 is "
            "wanted"
        )
    if not 0 <= config.mistakes <= 1:
        raise ConfigError(f"{where}: mistakes is {config.mistakes}; 0 to 1 is wanted")
    if min(config.train, config.heldout) < 0:
        raise ConfigError(
            f"{where}: train is {config.train} and heldout {config.heldout}; neither may be "
            "negative"
        )
    if "{problem}" not in config.prompt:
        raise ConfigError(f"{where}: prompt is {config.prompt!r}, which lacks {{problem}}")


def text_hash(text: str) -> int:
    """A number below 2**64 that decides on which side of a split a problem is."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _written(number: int, reverse: bool) -> str:
    text = str(abs(number))
    return ("-" if number < 0 else "") + (text[::-1] if reverse else text)


def _reward(answer: str, final: bool, text: str) -> float:
    if final:
        return float(_last_number(text) == answer)
    return float(text.strip() == answer)


def _last_number(text: str) -> str | None:
    """The last run of ASCII digits in a text, with the minus sign before it unless that follows a
    digit or letter."""
    end = len(text)
    while end and not "0" <= text[end - 1] <= "9":
        end -= 1
    start = end
    while start and "0" <= text[start - 1] <= "9":
        start -= 1
    if start == end:
        return None
    if start and text[start - 1] == "-" and not (start > 1 and text[start - 2].isalnum()):
        start -= 1
    return text[start:end]


def shuffled(size: int, seed: int) -> Iterator[int]:
    """Every number below `size` once, in an order given by the seed, without holding them.

    A four-round Feistel network over the smallest even number of bits that holds `size`, walking on
    while the result is too large (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002). Only whole-number arithmetic, so that the order is the same everywhere.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [derive_seed(seed, i) for i in range(4)]
    for start in range(size):
        number = start
        while True:
            left, right = number >> half, number & mask
            for key in keys:
                mixed = ((right + key) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
                mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
                left, right = right, left ^ ((mixed ^ (mixed >> 29)) & mask)
            number = left << half | right
            if number < size:
                break
        yield number
