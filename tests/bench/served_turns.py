"""A local plugin for `real_kills.py`: attempts of two turns over the session server's HTTP, and a
record of its own of what every step trained on.

Rewards are an arbitrary function of the text, so that there is always something to learn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

import miles
from miles import Context, Group, Task, Trajectory


class ServedTurns:
    """An agent outside the loop asks twice."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How many tasks."""

        count: int = 256
        """Training tasks."""

    def __init__(self, config: Config, context: Context) -> None:
        self._config = config

    def tasks(self, split: str) -> Sequence[Task]:
        """Numbers to talk about."""
        return [Task(id=f"{split}-{i}", prompt=_user(str(i))) for i in range(self._config.count)]

    async def play(self, task: Task, seed: int, tools: Any) -> Trajectory:
        """Two turns; the second is told what the first said."""
        async with tools.serve(tools.id) as served, aiohttp.ClientSession() as client:
            history = list(task.prompt)
            texts = []
            for _ in range(2):
                reply = await _ask(client, served, history)
                texts.append(reply["content"])
                history += [reply, *_user("are you sure?")]
            return served.trajectory(reward=sum("".join(texts).encode()) % 101 / 100)


def _user(text: str) -> tuple[dict[str, str]]:
    return ({"role": "user", "content": text},)


async def _ask(client: aiohttp.ClientSession, served: Any, messages: list[Any]) -> Any:
    async with client.post(
        f"{served.base_url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {served.api_key}"},
        json={"model": served.model, "messages": messages},
        raise_for_status=True,
    ) as answer:
        return (await answer.json())["choices"][0]["message"]


class Record:
    """Every step with the groups that it trained on, in `trained.jsonl` of the run's directory."""

    path: Path | None = None

    @miles.hookimpl
    def miles_run_started(self, directory: str, config: Any) -> None:
        """Where to write."""
        self.path = Path(directory) / "trained.jsonl"

    @miles.hookimpl
    def miles_step_finished(
        self, step: int, groups: Sequence[Group], update: Any, metrics: Any
    ) -> None:
        """One line; a step taken again after a resume has another, later one."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "groups": [g.id for g in groups]}) + "\n")


_record = Record()
miles_run_started = _record.miles_run_started
miles_step_finished = _record.miles_step_finished
miles_components = {"environment": {"served_turns": ServedTurns}}
