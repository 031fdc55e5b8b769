"""OpenEnv environments: which server to ask, how many sessions at once, what their tasks are.

What is said in an attempt is `stepping`'s; a server of our own is `serve`'s.
"""

from __future__ import annotations

import asyncio
import os
import re
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from miles import (
    ChildServer,
    ConfigError,
    Context,
    EpisodeError,
    LazyTasks,
    Split,
    Task,
    derive_seed,
)
from miles_plugin_openenv.serve import server_of
from miles_plugin_openenv.stepping import Speak, Stepping

_WHERE = "environment openenv"


class OpenEnv:
    """Any OpenEnv environment, by the URL of its server or the name of its installed package.

    An attempt is one session of the server: its observations are the user's messages, the model's
    replies its actions, and the reward is the sum of what its steps gave. A task is a seed.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which environment, and how the model speaks with it."""

        url: str = ""
        """A running server, such as `http://127.0.0.1:8000`; empty starts one from `package`."""
        package: str = "miles_plugin_openenv.guess"
        """An installed OpenEnv package, whose `server/app.py` offers `app`."""
        token_variable: str = ""
        """Environment variable with the bearer token that `url` wants."""
        speak: Speak = "text"
        """How a reply becomes an action: its `text` in one field, a `json` object, or calls of the
        environment's `tools`."""
        action: str = "message"
        """The action's field that takes the text."""
        observation: str = ""
        """The observation's field to show; empty shows its only text, or all of it as JSON."""
        instruction: str = ""
        """A system message, put before the first observation."""
        reset: Mapping[str, Any] = field(default_factory=dict)
        """Further arguments of the environment's reset."""
        reward: Literal["sum", "last"] = "sum"
        """What an attempt is worth: all that its steps gave, or the last of it."""
        sessions: int = 16
        """Sessions that the server holds at once; further attempts wait for one."""
        wait_s: float = 600.0
        """Seconds an attempt waits for a session."""
        step_s: float = 60.0
        """Seconds the server may take to answer a step."""
        train: int = 1000
        """Training tasks: seeds."""
        heldout: int = 50
        """Held-out tasks, of other seeds."""

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        self.config = config
        self._seed = context.seed
        self._name = config.url or config.package
        self._headers: Mapping[str, str] | None = None
        self._server: ChildServer | None = None
        if not config.url:
            log = context.directory / "logs" / f"openenv-{os.getpid()}.log"
            self._server = server_of(config.package, log)
        elif config.token_variable:
            token = os.environ[config.token_variable]
            self._headers = {"Authorization": f"Bearer {token}"}
        self._places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        """Seeds of a split."""
        size = self.config.heldout if split == "heldout" else self.config.train
        return LazyTasks(range(size), partial(self._task, split))

    def episode(self, task: Task, seed: int) -> Stepping:
        """One attempt; the server is told the task's seed, so that all attempts begin alike."""
        return Stepping(task, self.config, self._connected)

    def _task(self, split: Split, index: int) -> Task:
        seed = derive_seed(self._seed, "openenv", split, index) % 2**31
        begin = self.config.instruction or f"{self._name}, seed {seed}"
        return Task(
            id=f"{self._name}-{split}-{index}",
            prompt=({"role": "user", "content": begin},),
            data={"seed": seed},
        )

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """A client with a session of its own, once a place is free."""
        loop, config = asyncio.get_running_loop(), self.config
        place = self._places.setdefault(loop, asyncio.Semaphore(config.sessions))
        try:
            await asyncio.wait_for(place.acquire(), config.wait_s)
        except TimeoutError:
            raise EpisodeError(
                f"{_WHERE}: no session of {self._name} was free within {config.wait_s:g} s; "
                f"{config.sessions} are held at once (environment.sessions)"
            ) from None
        try:
            make = await asyncio.to_thread(_client_class)
            url, headers = config.url, self._headers
            if self._server is not None:
                url, headers = await asyncio.to_thread(self._server.url), self._server.headers
            client = make(
                base_url=url,
                message_timeout_s=config.step_s,
                headers=None if headers is None else dict(headers),
                mode="simulation",
            )
            try:
                await client.connect()
            except ConnectionError as error:
                raise EpisodeError(f"{_WHERE}: {self._name} cannot be reached: {error}") from error
            try:
                yield client
            finally:
                await client.close()
        finally:
            place.release()


def _client_class() -> Any:
    """OpenEnv's client; importing it takes seconds, which no event loop should wait for."""
    from openenv.core import GenericEnvClient

    return GenericEnvClient


def _check(config: OpenEnv.Config) -> None:
    if find_spec("openenv") is None:
        raise ConfigError(
            f"{_WHERE}: the package openenv is not installed; "
            "pip install miles-plugin-openenv brings it"
        )
    if config.url and not re.match(r"(https?|wss?)://", config.url):
        raise ConfigError(f"{_WHERE}: url {config.url!r} begins with none of http, https, ws, wss")
    if config.url and config.token_variable and config.token_variable not in os.environ:
        raise ConfigError(
            f"{_WHERE}: the environment variable {config.token_variable} (token_variable) is not "
            "set"
        )
    if not config.url and not _serves(config.package):
        raise ConfigError(
            f"{_WHERE}: package {config.package!r} is not installed, or has no server/app.py; "
            "give an OpenEnv package, or the url of a running server"
        )
    if min(config.sessions, config.train) < 1 or min(config.wait_s, config.step_s) <= 0:
        raise ConfigError(
            f"{_WHERE}: sessions is {config.sessions}, train {config.train}, wait_s "
            f"{config.wait_s:g} and step_s {config.step_s:g}; at least 1, at least 1, and above 0 "
            "are wanted"
        )
    if config.heldout < 0:
        raise ConfigError(f"{_WHERE}: heldout is {config.heldout}; at least 0 is wanted")


def _serves(package: str) -> bool:
    """Whether a package has the module with the server, without importing it."""
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        return False
    places = found.submodule_search_locations if found else None
    return any(os.path.isfile(os.path.join(p, "server", "app.py")) for p in places or ())
