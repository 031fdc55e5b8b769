"""Conversational tasks from a JSON Lines file: prompts, answers, and demonstrations of any length.

Rows are held in memory as they are; large single-turn data sets are `dataset`'s business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles import ConfigError, Message, Split, Task

__all__ = ["read_tasks"]

_KEYS = ("id", "prompt", "answer", "solution", "data")
_ROLES = ("system", "user", "assistant", "tool", "developer")


def read_tasks(
    path: str, *, heldout_fraction: float, system: str, where: str
) -> dict[Split, list[Task]]:
    """Tasks of both splits in file order; a row is held out by a BLAKE2 hash of its prompt.

    A row has `prompt` (text, or a list of messages) and may have `id`, `answer`, `solution` (text,
    or the messages that follow the prompt) and `data` (an object). Raises `ConfigError` naming the
    first line that is no task.
    """
    if not 0 <= heldout_fraction < 1:
        raise ConfigError(
            f"{where}: heldout_fraction is {heldout_fraction}; at least 0 and below 1 is wanted"
        )
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{where}: tasks: there is no file {path!r}")
    found: dict[Split, list[Task]] = {"train": [], "heldout": []}
    seen: dict[str, int] = {}
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{where}: {file}, line {number}"
        task = _task(line, number, system, place)
        if (first := seen.setdefault(task.id, number)) != number:
            raise ConfigError(f"{place}: id is {task.id!r}, as in line {first}; ids must be unique")
        said = json.dumps(task.prompt, sort_keys=True)
        digest = hashlib.blake2b(said.encode("utf-8", "replace"), digest_size=8).digest()
        heldout = int.from_bytes(digest, "little") < heldout_fraction * 2**64
        found["heldout" if heldout else "train"].append(task)
    if not seen:
        raise ConfigError(f"{where}: {file} has no rows")
    return found


def _task(line: bytes, number: int, system: str, place: str) -> Task:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict) or "prompt" not in row:
        raise ConfigError(f"{place}: an object with `prompt` is wanted")
    if strange := sorted(set(row) - set(_KEYS)):
        raise ConfigError(f"{place}: unknown key {strange[0]!r}; valid: {', '.join(_KEYS)}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = _messages(prompt, f"{place}: prompt")
    if system and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    solution = row.get("solution")
    if solution is not None and not isinstance(solution, str):
        solution = _messages(solution, f"{place}: solution")
        if solution[0]["role"] != "assistant":
            raise ConfigError(f"{place}: solution begins with the {solution[0]['role']}'s message")
    data = row.get("data", {})
    if not isinstance(data, Mapping):
        raise ConfigError(f"{place}: data is {data!r}, not an object")
    return Task(
        id=str(row.get("id", f"line-{number}")),
        prompt=messages,
        answer=row.get("answer"),
        solution=solution,
        data=data,
    )


def _messages(value: Any, place: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{place} is {value!r}, neither text nor messages")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise ConfigError(
                f"{place}: message {index} is {message!r}; an object with a role is wanted, one of "
                f"{', '.join(_ROLES)}"
            )
    return tuple(value)
