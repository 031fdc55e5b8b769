"""Environments of the verifiers library: their tasks, and how attempts are handed to `driving`.

What a turn is, which tools there are and what the end is worth stay the library environment's
business; the model it talks to is a served session of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from miles import (
    ConfigError,
    Context,
    EpisodeError,
    Group,
    LazyTasks,
    ServedSession,
    Split,
    Task,
    Tools,
    Trajectory,
)
from miles_plugin_verifiers import driving

_WHERE = "environment verifiers"


class Verifiers:
    """Any environment of the verifiers library (`load_environment`): single-turn, multi-turn,
    tools.

    The library's own loop drives each attempt through the chat completions API of a served session,
    so tokens are the session's; the reward is the environment's own rubric. A rubric that compares
    the attempts of a group with each other is given the group.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which environment of the library, and how it is set up."""

        id: str = "miles_plugin_verifiers.reverse_words"
        """What `verifiers.load_environment` takes: the installed module that offers a function of
        that name, dashes for underscores if you like."""
        arguments: Mapping[str, Any] = field(default_factory=dict)
        """The environment's own arguments."""
        heldout: int = 32
        """Rows kept from training, the last ones, where the environment has no evaluation set."""
        timeout_s: float = 300.0
        """Seconds one turn of the model may take."""

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        self._made = _load(config)
        self._rows = _rows(self._made, config)
        if self._made.requires_group_rollouts:
            self.rollout = self._rollout

    def tasks(self, split: Split) -> Sequence[Task]:
        """Rows of the environment's data set, or of its evaluation set."""
        return LazyTasks(range(len(self._rows[split])), partial(self._task, split))

    async def play(self, task: Task, seed: int, tools: Tools) -> Trajectory:
        """One attempt, driven and scored by the library."""
        async with _serve(tools)(tools.id) as session:
            row = self._row(task)
            state = await driving.drive(
                self._made, row, session, tools.sampling, self.config.timeout_s
            )
            await driving.score(self._made, [state], together=False)
            reward, metrics = driving.worth(state)
            return session.trajectory(reward=reward, metrics=metrics)

    async def _rollout(self, task: Task, tools: Tools) -> Group:
        """All attempts of a group, which the rubric scores together; one that fails, fails all."""
        row, serve = self._row(task), _serve(tools)
        async with AsyncExitStack() as stack:
            keys = [f"{tools.id}.{index}" for index in range(tools.samples)]
            sessions = [await stack.enter_async_context(serve(key)) for key in keys]
            states = await self._drive_all(row, sessions, tools)
            await driving.score(self._made, states, together=True)
            trajectories = []
            for session, state in zip(sessions, states, strict=True):
                reward, metrics = driving.worth(state)
                trajectories.append(session.trajectory(reward=reward, metrics=metrics))
        return Group(id=tools.group, task=task, trajectories=tuple(trajectories))

    async def _drive_all(
        self, row: Mapping[str, Any], sessions: Sequence[ServedSession], tools: Tools
    ) -> list[Any]:
        try:
            async with asyncio.TaskGroup() as running:
                drives = [
                    running.create_task(
                        driving.drive(self._made, row, s, tools.sampling, self.config.timeout_s)
                    )
                    for s in sessions
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the loop knows errors, not groups of them
        return [done.result() for done in drives]

    def _task(self, split: Split, index: int) -> Task:
        row = self._rows[split][index]
        answer = row.get("answer")
        return Task(
            id=f"{self.config.id}-{split}-{index}",
            prompt=tuple(_plain(message) for message in row["prompt"]),
            answer=answer if isinstance(answer, str | int | float | None) else str(answer),
            data={"split": split, "index": index},
        )

    def _row(self, task: Task) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._rows[task.data["split"]][task.data["index"]]
        return row


def _serve(tools: Tools) -> Any:
    if tools.serve is None:
        raise EpisodeError(f"{_WHERE}: this run serves no sessions to agents, which it needs")
    return tools.serve


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the empty fields that a data set's columns bring."""
    found = {key: value for key, value in dict(message).items() if value is not None}
    return {"content": "", **found}


def _load(config: Verifiers.Config) -> Any:
    if config.heldout < 0 or config.timeout_s <= 0:
        raise ConfigError(
            f"{_WHERE}: heldout is {config.heldout} and timeout_s {config.timeout_s}; "
            "at least 0 and above 0 are wanted"
        )
    try:
        import verifiers as vf

        load = vf.load_environment
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{_WHERE}: the package verifiers cannot be used ({error}); "
            "pip install miles-plugin-verifiers brings a version that can"
        ) from error
    try:
        with _own_signals():
            return load(config.id, **config.arguments)
    except Exception as error:  # foreign code, given the user's arguments
        raise ConfigError(
            f"{_WHERE}: {config.id!r} cannot be loaded with arguments {dict(config.arguments)}: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """The library's environments install handlers for Ctrl-C and termination when they are made.
    Those are the run's, and in a worker's thread installing any raises: let them install none."""
    module = import_module("verifiers.envs.environment")
    theirs = module.signal
    module.signal = SimpleNamespace(**{**vars(theirs), "signal": lambda *_: None})
    try:
        yield
    finally:
        module.signal = theirs


def _rows(made: Any, config: Verifiers.Config) -> dict[Split, Sequence[Any]]:
    """Rows of both splits, which share none."""
    train = made.build_dataset()
    if train is None:
        raise ConfigError(f"{_WHERE}: {config.id!r} has an evaluation set but no training rows")
    heldout = made.build_eval_dataset()
    if heldout is not None:
        return {"train": train, "heldout": heldout}
    size = len(train) - config.heldout
    if size < 1:
        raise ConfigError(
            f"{_WHERE}: {config.id!r} has {len(train)} rows, of which environment.heldout "
            f"({config.heldout}) leaves none to train on"
        )
    return {"train": train.select(range(size)), "heldout": train.select(range(size, len(train)))}
