"""Daytona's SDK, asked for what a remote box needs.

It judges errors and builds requests; trying again, labels and commands' semantics are not its
business. Daytona's `process.exec` gives one stream of text and cannot feed input, which is why
commands are wrapped by `remote_box`.
"""

from __future__ import annotations

import contextlib
import math
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from daytona import (
    AsyncDaytona,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    ListSandboxesQuery,
    Resources,
)
from daytona.common import errors

from miles_plugins.sandbox.provider import Fault, FileTooLarge, Found

if TYPE_CHECKING:
    from miles_plugins.sandbox.daytona import Daytona

__all__ = ["DaytonaBoxes"]

_BUSY = {408, 425, 429, 500, 502, 503, 504}


class DaytonaMachine:
    """One box."""

    def __init__(self, sandbox: Any, limit_s: float) -> None:
        self.id = str(sandbox.id)
        self.sandbox = sandbox
        self._limit_s = math.ceil(limit_s)
        self._folders: set[str] = set()

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> tuple[int, bytes]:
        """Run in the box's own shell, every word quoted."""
        answer = await self.sandbox.process.exec(shlex.join(argv), timeout=math.ceil(timeout_s))
        return int(answer.exit_code), answer.result.encode()

    async def read(self, path: str, *, most: int) -> bytes:
        """Through the toolbox's file API, after a look at the size."""
        try:
            info = await self.sandbox.fs.get_file_info(path, self._limit_s)
        except errors.DaytonaNotFoundError:
            await self.sandbox.refresh_data()  # is it the box that is not there? then this fails
            raise FileNotFoundError(f"no such file: {path}") from None
        if info.size > most:
            raise FileTooLarge(most)
        return bytes(await self.sandbox.fs.download_file(path, self._limit_s))

    async def write(self, path: str, data: bytes) -> None:
        """Through the toolbox's file API, folders first."""
        folder = posixpath.dirname(path)
        if folder not in self._folders:
            await self.run(["mkdir", "-p", "--", folder], timeout_s=self._limit_s)
            self._folders.add(folder)
        await self.sandbox.fs.upload_file(data, path, self._limit_s)


class DaytonaBoxes:
    """Boxes of one Daytona account."""

    title = "sandbox daytona"

    def __init__(self, config: Daytona.Config) -> None:
        self._config = config
        self._client = AsyncDaytona()
        self._open: dict[str, Any] = {}

    async def create(self, labels: Mapping[str, str]) -> DaytonaMachine:
        """From the image, or the snapshot."""
        config = self._config
        minutes = math.ceil(config.lifetime_s / 60)
        around: dict[str, Any] = {
            "labels": dict(labels),
            "ttl_minutes": minutes,
            # servers that know no lifetime stop a box that is idle as long, which deletes it
            "auto_stop_interval": minutes,
            "ephemeral": True,
            "network_block_all": not config.network,
        }
        params: Any
        if config.image:
            given: dict[str, Any] = {
                "cpu": config.cpu,
                "memory": config.memory_gib,
                "disk": config.disk_gib,
            }
            resources = Resources(**{k: v for k, v in given.items() if v})
            params = CreateSandboxFromImageParams(image=config.image, resources=resources, **around)
        else:
            params = CreateSandboxFromSnapshotParams(snapshot=config.snapshot or None, **around)
        sandbox = await self._client.create(params, timeout=config.open_timeout_s)
        machine = DaytonaMachine(sandbox, config.request_timeout_s)
        self._open[machine.id] = sandbox
        return machine

    async def find(self, labels: Mapping[str, str]) -> Sequence[Found]:
        """Page by page."""
        query = ListSandboxesQuery(labels=dict(labels))
        limit = self._config.request_timeout_s
        return [
            Found(
                id=str(box.id),
                labels=dict(box.labels or {}),
                created=_seconds(box.created_at),
                state=str(getattr(box.state, "value", box.state)),
            )
            async for box in self._client.list(query, limit)
        ]

    async def delete(self, id: str) -> None:
        """Accepted is enough: Daytona destroys it by itself then."""
        limit = self._config.request_timeout_s
        with contextlib.suppress(errors.DaytonaNotFoundError, errors.DaytonaGoneError):
            sandbox = self._open.pop(id, None) or await self._client.get(id, limit)
            try:
                await self._client.delete(sandbox, limit)
            except errors.DaytonaError:
                self._open[id] = sandbox
                raise

    def explain(self, error: BaseException) -> Fault:
        """By the SDK's classes and the HTTP status they carry."""
        if not isinstance(error, errors.DaytonaError):
            return Fault()
        if isinstance(error, errors.DaytonaFileNotFoundError | errors.DaytonaValidationError):
            return Fault()
        status = _status(error)
        if status is not None:
            asked = {str(k).lower(): v for k, v in error.headers.items()}.get("retry-after")
            return Fault(
                retryable=status in _BUSY,
                refused=status in (401, 403, 429),
                gone=status in (404, 410),
                after_s=_number(asked),
            )
        passing = errors.DaytonaConnectionError | errors.DaytonaTimeoutError
        return Fault(retryable=isinstance(error, passing))

    async def close(self) -> None:
        """Close the SDK's connections."""
        await self._client.close()


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an answer; transfers of files keep it only in the cause."""
    while error is not None:
        for name in ("status_code", "status"):
            if isinstance(status := getattr(error, name, None), int):
                return status
        error = error.__cause__
    return None


def _seconds(moment: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(str(moment)).timestamp()
    return 0.0


def _number(text: Any) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        return max(float(text), 0.0)
    return None
