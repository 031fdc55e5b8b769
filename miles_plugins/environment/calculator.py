"""Problems for a model with a Python tool: a few operations, one after another, made from a seed.

It makes tasks with demonstrations of several turns; what runs the tool is the environment's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from miles import ConfigError, LazyTasks, Message, Split, Task, derive_seed
from miles_plugins.environment.arithmetic import shuffled, text_hash

__all__ = ["Calculator", "calculator_tasks"]

TOOL = "python"
"""The tool that demonstrations call, with the argument `code`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculator:
    """Problems such as `34+57, -12`: each operation works on the result so far.

    A problem is held out or not by a BLAKE2 hash of its text alone, so the splits are disjoint
    under every seed. A demonstration calls the tool once an operation, then says the last result.
    """

    digits: int = 2
    """Digits of each operand."""
    operations: tuple[str, ...] = ("+", "-")
    """Of `+`, `-` and `*`."""
    calls: tuple[int, ...] = (1, 2)
    """How many operations a problem may have: the difficulty. Each number has an equal share of the
    tasks, as far as there are problems; with its answer, an attempt takes one turn more."""
    prompt: str = "{problem}"
    """The user's message, with `{problem}` in it."""
    mistakes: float = 0.0
    """Share of problems whose demonstration guesses, wrongly, instead of calling the tool: a
    careless teacher, beyond which only the reward leads. Answers and rewards are never wrong."""
    heldout_fraction: float = 0.1
    """Share of all problems that is never trained on."""
    train: int = 4096
    """Training tasks at most."""
    heldout: int = 256
    """Held-out tasks at most."""


Problem = tuple[int, tuple[tuple[str, int], ...]]
"""The first operand, then operations with theirs."""


def calculator_tasks(config: Calculator, *, seed: int, split: Split, where: str) -> Sequence[Task]:
    """Distinct problems of a split in seeded order. Raises `ConfigError` under the name `where`."""
    _check(config, where)
    wanted = config.train if split == "train" else config.heldout
    threshold = int(config.heldout_fraction * 2**64)
    found: list[Problem] = []
    for problem in _problems(config, derive_seed(seed, "calculator", split)):
        if len(found) == wanted:
            break
        if (text_hash(_text(problem)) < threshold) == (split == "heldout"):
            found.append(problem)
    return LazyTasks(found, partial(_task, config))


def _check(config: Calculator, where: str) -> None:
    if not 1 <= config.digits <= 6:
        raise ConfigError(f"{where}: calculator.digits is {config.digits}; 1 to 6 is wanted")
    wrong = [sign for sign in config.operations if sign not in "+-*" or len(sign) != 1]
    if wrong or not config.operations or len(set(config.operations)) != len(config.operations):
        raise ConfigError(
            f"{where}: calculator.operations is {list(config.operations)}; valid, each at most "
            "once: +, -, *"
        )
    if not config.calls or not all(1 <= n <= 8 for n in config.calls):
        raise ConfigError(
            f"{where}: calculator.calls is {list(config.calls)}; numbers from 1 to 8 are wanted"
        )
    for name in ("heldout_fraction", "mistakes"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(
                f"{where}: calculator.{name} is {getattr(config, name)}; 0 to 1 is wanted"
            )
    if min(config.train, config.heldout) < 0:
        raise ConfigError(
            f"{where}: calculator.train is {config.train} and heldout {config.heldout}; neither "
            "may be negative"
        )
    if "{problem}" not in config.prompt:
        raise ConfigError(
            f"{where}: calculator.prompt is {config.prompt!r}, which lacks {{problem}}"
        )


def _problems(config: Calculator, seed: int) -> Iterator[Problem]:
    """Every problem once; those of each length in their own order, taken in turns."""
    low = 10 ** (config.digits - 1)
    span = 10**config.digits - low

    def of_length(length: int) -> Iterator[Problem]:
        size = span * (span * len(config.operations)) ** length
        for number in shuffled(size, derive_seed(seed, length)):
            number, first = divmod(number, span)
            steps = []
            for _ in range(length):
                number, operand = divmod(number, span)
                number, sign = divmod(number, len(config.operations))
                steps.append((config.operations[sign], operand + low))
            yield first + low, tuple(steps)

    for turn in zip_longest(*(of_length(n) for n in sorted(set(config.calls)))):
        yield from (problem for problem in turn if problem is not None)


def _text(problem: Problem) -> str:
    first, steps = problem
    return f"{first}" + ", ".join(f"{sign}{operand}" for sign, operand in steps)


def _run(problem: Problem) -> list[tuple[str, int]]:
    """Each operation as an expression, with its result."""
    value, steps = problem
    found = []
    for sign, operand in steps:
        said = f"{value}{sign}{operand}"
        value = (
            value + operand if sign == "+" else value - operand if sign == "-" else value * operand
        )
        found.append((said, value))
    return found


def _task(config: Calculator, problem: Problem) -> Task:
    text = _text(problem)
    answer = str(_run(problem)[-1][1])
    return Task(
        id=text,
        prompt=({"role": "user", "content": config.prompt.replace("{problem}", text)},),
        answer=answer,
        solution=_solution(config, problem, answer),
    )


def _solution(config: Calculator, problem: Problem, answer: str) -> tuple[Message, ...]:
    """Calls, their results, and the answer; for a share of the problems, chosen by their text, one
    wrong guess."""
    lot = derive_seed("careless", _text(problem))
    if lot < config.mistakes * 2**63:
        return ({"role": "assistant", "content": _other_digit(answer, lot // 4)},)
    messages: list[Message] = []
    for index, (said, value) in enumerate(_run(problem)):
        messages += _call(index, said, str(value))
    return (*messages, {"role": "assistant", "content": answer})


def _call(index: int, code: str, result: str) -> tuple[Message, Message]:
    arguments = json.dumps({"code": code}, separators=(",", ":"))
    call: dict[str, Any] = {
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": TOOL, "arguments": arguments},
    }
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": TOOL, "content": result},
    )


def _other_digit(text: str, lot: int) -> str:
    """The text with one digit changed; never into a leading zero."""
    places = [i for i, letter in enumerate(text) if letter.isdigit()]
    place = places[lot % len(places)]
    lot //= len(places)
    if place == places[0]:
        digit = 1 + (int(text[place]) - 1 + 1 + lot % 8) % 9
    else:
        digit = (int(text[place]) + 1 + lot % 9) % 10
    return f"{text[:place]}{digit}{text[place + 1 :]}"
