"""E2B's SDK, asked for what a remote box needs, at E2B or wherever its API is spoken.

It judges errors and builds requests; labels and commands' semantics are not its business. The SDK
itself repeats requests to the control plane that are answered with 429 or 503, waiting as long as
`Retry-After` says; what is left after that is tried again by `provider.ask`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import e2b
import httpx
from connectrpc.errors import ConnectError
from e2b import exceptions

from miles_plugins.sandbox.provider import Fault, FileTooLarge, Found, RemoteConfig

__all__ = ["E2bBoxes"]

_PASSING = re.compile(r"(: )?(5\d\d: |Code\.(INTERNAL|UNAVAILABLE|ABORTED|UNKNOWN): )")
"""How errors begin that stand for a server in trouble; a status is not always an attribute."""


class E2bMachine:
    """One box."""

    def __init__(self, sandbox: Any, *, user: str | None, limit_s: float) -> None:
        self.id = str(sandbox.sandbox_id)
        self._sandbox = sandbox
        self._user = user
        self._limit_s = limit_s

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> tuple[int, bytes]:
        """Run in the box's bash, every word quoted."""
        try:
            done = await self._sandbox.commands.run(
                shlex.join(argv),
                timeout=timeout_s,
                user=self._user,
                request_timeout=self._limit_s,
            )
        except e2b.CommandExitException as exit:
            done = exit
        return int(done.exit_code), done.stdout.encode()

    async def read(self, path: str, *, most: int) -> bytes:
        """Through the box's file API, as a stream."""
        data = bytearray()
        async with await self._sandbox.files.read(
            path, format="stream", user=self._user, request_timeout=self._limit_s
        ) as file:
            async for part in file:
                data += part
                if len(data) > most:
                    raise FileTooLarge(most)
        return bytes(data)

    async def write(self, path: str, data: bytes) -> None:
        """Through the box's file API, which makes folders."""
        await self._sandbox.files.write(path, data, user=self._user, request_timeout=self._limit_s)


class E2bBoxes:
    """Boxes of one account at one address."""

    def __init__(
        self,
        config: RemoteConfig,
        *,
        title: str,
        template: str,
        user: str,
        where: Mapping[str, str] | None = None,
    ) -> None:
        self.title = title
        self._config = config
        self._template = template or None
        self._user = user or None
        self._where: dict[str, Any] = dict(where or {})

    async def create(self, labels: Mapping[str, str]) -> E2bMachine:
        """From the template."""
        sandbox = await e2b.AsyncSandbox.create(
            template=self._template,
            timeout=self._config.lifetime_s,
            metadata=dict(labels),
            allow_internet_access=self._config.network,
            request_timeout=self._config.open_timeout_s,
            **self._where,
        )
        return E2bMachine(sandbox, user=self._user, limit_s=self._config.request_timeout_s)

    async def find(self, labels: Mapping[str, str]) -> Sequence[Found]:
        """Page by page, running and paused."""
        pages = e2b.AsyncSandbox.list(
            query=e2b.SandboxQuery(metadata=dict(labels)), **self._requests()
        )
        found = []
        while pages.has_next:
            for box in await pages.next_items():
                found.append(
                    Found(
                        id=box.sandbox_id,
                        labels=dict(box.metadata),
                        created=box.started_at.timestamp(),
                        state=str(getattr(box.state, "value", box.state)),
                    )
                )
        return found

    async def delete(self, id: str) -> None:
        """Kill it, whatever its state."""
        with contextlib.suppress(exceptions.NotFoundException):
            await e2b.AsyncSandbox.kill(id, **self._requests())

    def explain(self, error: BaseException) -> Fault:
        """By the SDK's classes, and where they only carry a status, by that."""
        if isinstance(error, exceptions.RateLimitException):
            return Fault(retryable=True, refused=True)
        if isinstance(error, exceptions.AuthenticationException):
            return Fault(refused=True)
        if isinstance(error, exceptions.FileNotFoundException):
            return Fault()
        gone = exceptions.SandboxNotRunningException | exceptions.NotFoundException
        if isinstance(error, gone):
            return Fault(gone=True)
        passing = exceptions.TimeoutException | exceptions.ServiceBusyException
        if isinstance(error, passing | httpx.TransportError | ConnectError):
            return Fault(retryable=True)
        if isinstance(error, exceptions.SandboxException):
            said = f"{error.status_code or ''}: {error}"
            return Fault(retryable=bool(_PASSING.match(said)))
        return Fault()

    async def close(self) -> None:
        """Connections are the SDK's own, shared by the process."""

    def _requests(self) -> dict[str, Any]:
        return {"request_timeout": self._config.request_timeout_s, **self._where}
