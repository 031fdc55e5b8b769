"""Tasks from JSON Lines or Parquet files, scored by a reward that is chosen by name.

Reading is `miles_plugins.environment.rows`, scoring `scoring`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from miles import ConfigError, Context, LazyTasks, Message, SingleTurn, Split, Task
from miles_plugins.environment.rewards import REWARDS
from miles_plugins.environment.rows import find_files, open_rows, place
from miles_plugins.environment.scoring import Scorer

_WHERE = "environment dataset"


class Dataset:
    """Prompts and answers from files; one assistant turn each.

    A row's prompt is text, or chat messages as a list of `{role, content}`. Rewards: `exact`,
    `numeric` (the last number), `math` (the `math-verify` library), `regex` (the last match of
    `pattern`), or any that a plugin registered with `miles_rewards`. Needs the extra `data`: `pip
    install 'miles[data]'`.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which files and columns, and how answers are scored."""

        path: str
        """A `.jsonl`, `.json` or `.parquet` file, a folder of them, or a glob."""
        heldout_path: str = ""
        """Held-out rows, likewise; empty holds out a fraction of `path`."""
        heldout_fraction: float = 0.05
        """Share of `path` held out by a hash of the prompt, when there is no `heldout_path`."""
        limit: int = 0
        """Training tasks at most; 0 is all."""
        heldout_limit: int = 256
        """Held-out tasks at most; 0 is all."""
        prompt: str = "prompt"
        """Column of the prompt."""
        answer: str = "answer"
        """Column of what the reward compares with; empty for none."""
        solution: str = ""
        """Column of a demonstration, for supervised training; empty for none."""
        id: str = ""
        """Column of a unique id; empty numbers the rows."""
        system: str = ""
        """A system message put before every chat prompt that has none."""
        chat: bool = True
        """A text prompt becomes a user's message; off, it is text to continue as it is."""
        reward: str = "exact"
        """Name of the reward."""
        pattern: str = ""
        """For `regex`: the pattern; its first group, if any, is compared with the answer."""
        reward_timeout_s: float = 10.0
        """Seconds one reward may take."""
        reward_processes: int = 1
        """Processes that compute slow rewards (`math`, `regex`); threads for a plugin's."""

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: 40 sums in a file."""
        rows = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(40)]
        path = directory / "sums.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(path), "solution": "answer", "heldout_fraction": 0.2}

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        self.config = config
        self._files = tuple(find_files(config.path, f"{_WHERE}: path"))
        self._heldout_files = (
            tuple(find_files(config.heldout_path, f"{_WHERE}: heldout_path"))
            if config.heldout_path
            else self._files
        )
        self._grade = Scorer(
            environment="dataset",
            reward=config.reward,
            pattern=config.pattern,
            timeout_s=config.reward_timeout_s,
            processes=config.reward_processes,
            offered=context.rewards,
        )
        self._read: dict[tuple[Path, ...], tuple[Any, np.ndarray]] = {}

    def tasks(self, split: Split) -> Sequence[Task]:
        """Rows of a split in file order, read as they are asked for.

        Raises `ConfigError` for files that cannot be used; every row is looked at once, here."""
        config = self.config
        heldout = split == "heldout"
        files = self._heldout_files if heldout else self._files
        if files not in self._read:
            self._read[files] = _read(files, config)
        rows, hashes = self._read[files]
        if config.heldout_path:
            numbers = np.arange(len(hashes))
        else:
            held = hashes < np.uint64(config.heldout_fraction * 2**64)
            numbers = np.flatnonzero(held if heldout else ~held)
        limit = config.heldout_limit if heldout else config.limit
        return LazyTasks(numbers[: limit or None], partial(_task, config, rows))

    def episode(self, task: Task, seed: int) -> SingleTurn:
        """One turn, scored by the chosen reward."""
        return SingleTurn(task.prompt, partial(self._grade, task), environment="dataset")


def _task(config: Dataset.Config, rows: Any, number: Any) -> Task:
    row = rows[int(number)]
    return Task(
        id=str(row[config.id]) if config.id else f"row-{number + 1}",
        prompt=_prompt(row[config.prompt], config),
        answer=row[config.answer] if config.answer else None,
        solution=row[config.solution] if config.solution else None,
    )


def _check(config: Dataset.Config) -> None:
    if config.reward in REWARDS and not config.answer and not config.pattern:
        raise ConfigError(
            f"{_WHERE}: reward {config.reward!r} compares with an answer, but `answer` names no "
            "column"
        )
    if not 0 <= config.heldout_fraction < 1:
        raise ConfigError(
            f"{_WHERE}: heldout_fraction is {config.heldout_fraction}; at least 0 and below 1 is "
            "wanted"
        )


def _read(files: Sequence[Path], config: Dataset.Config) -> tuple[Any, np.ndarray]:
    """The rows, and (rows,) uint64 hashes of their prompts. Raises `ConfigError` at the first row
    that cannot be a task."""
    columns = [c for c in (config.prompt, config.answer, config.solution, config.id) if c]
    rows = open_rows(files, columns, _WHERE)
    hashes: list[int] = []
    seen: dict[str, int] = {}
    needs_answer = config.reward in REWARDS and config.answer
    for batch in rows.iter(batch_size=1024):
        for index, prompt in enumerate(batch[config.prompt]):
            fault = _fault(prompt)
            if needs_answer and batch[config.answer][index] is None:
                fault = f"{config.answer} is null"
            if config.solution and not isinstance(batch[config.solution][index], str):
                fault = f"{config.solution} is not text"
            if config.id:
                name = str(batch[config.id][index])
                if name in seen:
                    first = place(files, seen[name])
                    fault = f"{config.id} is {name!r}, as in {first}; ids must be unique"
                seen[name] = len(hashes)
            if fault:
                raise ConfigError(f"{_WHERE}: {place(files, len(hashes))}: {fault}")
            hashes.append(_hash(prompt))
    return rows, np.array(hashes, np.uint64)  # (rows,) uint64


def _fault(prompt: Any) -> str:
    """What is wrong with a prompt, empty when nothing is."""
    if isinstance(prompt, str):
        return "" if prompt else "the prompt is empty"
    if not isinstance(prompt, list) or not prompt:
        return f"the prompt is {prompt!r}, neither text nor a list of messages"
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"the prompt holds {message!r}, which is not a message with a role"
    return ""


def _prompt(prompt: Any, config: Dataset.Config) -> str | tuple[Message, ...]:
    if isinstance(prompt, str):
        if not config.chat:
            return prompt
        messages: tuple[Message, ...] = ({"role": "user", "content": prompt},)
    else:  # a column has every key that any row has; those this row lacks are null
        messages = tuple({k: v for k, v in m.items() if v is not None} for m in prompt)
    if config.system and messages[0]["role"] != "system":
        return ({"role": "system", "content": config.system}, *messages)
    return messages


def _hash(prompt: Any) -> int:
    text = prompt if isinstance(prompt, str) else repr(prompt)
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
