"""Sandboxes whose boxes live at a provider: opening them, labelling them, and finding those that
were left behind.

What a provider is asked, and how often, is `provider`; what happens in a box is `remote_box`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from miles import BoxInfo, ConfigError, Context, SandboxError, Task, process_identity
from miles_plugins.sandbox.provider import Machine, Provider, RemoteConfig, ask, judged
from miles_plugins.sandbox.remote_box import RemoteBox

__all__ = ["RemoteSandbox"]

_log = logging.getLogger("miles.sandbox")

_MADE_BY = {"miles": "box"}
"""Label of every box of ours, whatever its run."""

_SWEEP_S = 30.0
"""Seconds to look for a box whose creation failed half-way."""


class RemoteSandbox:
    """What the sandboxes of all providers share."""

    name: ClassVar[str]
    """As it is registered."""
    package: ClassVar[str]
    """Module of the vendor's SDK."""
    extra: ClassVar[str]
    """Extra of miles that installs it."""
    boxes: ClassVar[str]
    """Module beside this one that speaks through it."""

    def __init__(self, config: Any, context: Context) -> None:
        if faults := self.faults(config):
            error = ConfigError(f"sandbox {self.name}: {faults[0]}")
            for fault in faults[1:]:
                error.add_note(fault)
            raise error
        import_module(self.boxes)  # seconds, and better spent now than in the middle of episodes
        self._config = config
        self._run = context.directory.name
        self._owner = process_identity()
        self._provider: Provider | None = None

    @classmethod
    def check(cls, config: Any, planned: Any) -> Sequence[str]:
        """What would fail once the run needs its first box; asks no server."""
        return cls.faults(config)

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """Why no box could be opened: the SDK, its credentials, or a value."""
        faults = [
            f"{name}: {getattr(config, name)} is not above 0" for name in _not_positive(config)
        ]
        if find_spec(cls.package) is None:
            install = f'pip install "miles[{cls.extra}]"'
            return [*faults, f"needs the package {cls.package}, which is not installed: {install}"]
        return [*faults, *cls.missing(config)]

    @classmethod
    def missing(cls, config: Any) -> list[str]:
        """Credentials that are not there, as the vendor's SDK looks for them."""
        raise NotImplementedError

    def provider(self) -> Provider:
        """Connect to the service: made once, in the event loop that uses it."""
        raise NotImplementedError

    async def open(self, task: Task) -> RemoteBox:
        """A new box, labelled with the run, this process and the task. Creation is tried again
        while that may help; what failed half-way is removed. Raises `SandboxError`."""
        provider = self._connected()
        labels = {
            **_MADE_BY,
            "miles-run": _label(self._run),
            "miles-owner": self._owner,
            "miles-task": _label(task.id),
            "miles-created": str(int(time.time())),
        }
        machine = await ask(
            provider,
            f"create a box for task {task.id!r}",
            lambda: self._create(provider, labels),
            limit_s=self._config.open_timeout_s,
            attempts=self._config.attempts,
        )
        box = RemoteBox(provider, machine, self._config)
        try:
            await box.prepare()
        except BaseException:
            await asyncio.shield(box.close())
            raise
        return box

    async def list(self) -> Sequence[BoxInfo]:
        """Every box of ours at the provider, of whatever run. Raises `SandboxError`."""
        found = await self._ask("list boxes", lambda p: p.find(_MADE_BY))
        return [
            BoxInfo(
                id=box.id,
                owner=box.labels.get("miles-owner", ""),
                run=box.labels.get("miles-run", ""),
                task=box.labels.get("miles-task", ""),
                created=box.created or float(box.labels.get("miles-created") or 0),
                state=box.state,
            )
            for box in found
        ]

    async def remove(self, id: str) -> None:
        """Delete a box; one that is gone is no error. Raises `SandboxError`."""
        await self._ask(f"delete box {id}", lambda p: p.delete(id))

    async def close(self) -> None:
        """Let go of the connection to the provider; boxes that are open stay open."""
        provider, self._provider = self._provider, None
        if provider is not None:
            await provider.close()

    async def _create(self, provider: Provider, labels: Mapping[str, str]) -> Machine:
        """One attempt. A request that fails may have made a box all the same; its own label finds
        it."""
        own = {"miles-box": secrets.token_hex(8)}
        try:
            return await provider.create({**labels, **own})
        except BaseException as error:
            if not judged(provider, error).refused:
                await asyncio.shield(self._sweep(provider, own))
            raise

    async def _sweep(self, provider: Provider, own: Mapping[str, str]) -> None:
        """Remove what a creation may have left, as patiently as anything else is asked."""
        try:
            async with asyncio.timeout(_SWEEP_S):
                for box in await self._ask("look for its box", lambda p: p.find(own)):
                    await self.remove(box.id)
        except Exception as error:  # noqa: BLE001 - the first failure is the one to tell
            _log.warning(
                "%s: a creation that failed may have left a box (%s); see `miles sandboxes list`",
                provider.title,
                error,
            )

    async def _ask(self, what: str, call: Any) -> Any:
        provider = self._connected()
        return await ask(
            provider,
            what,
            lambda: call(provider),
            limit_s=self._config.request_timeout_s,
            attempts=self._config.attempts,
        )

    def _connected(self) -> Provider:
        if self._provider is None:
            try:
                self._provider = self.provider()
            except Exception as error:
                raise SandboxError(
                    f"sandbox {self.name}: {type(error).__name__}: {error}"
                ) from error
        return self._provider


def _not_positive(config: RemoteConfig) -> list[str]:
    times = ("timeout_s", "open_timeout_s", "request_timeout_s", "lifetime_s")
    numbers = ("attempts", "output_kb", "file_mb")
    return [name for name in (*times, *numbers) if not getattr(config, name) > 0]


def _label(value: str) -> str:
    """A value that every provider takes as a label."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value)[:63] or "-"
