"""Modal's SDK, asked for what a remote box needs.

It judges errors and builds requests; labels and commands' semantics are not its business. Files
travel through commands, whose streams are bytes: Modal's own file API needs a program of Modal's in
the image. The SDK itself repeats requests that a broken connection interrupts, under one key, so
that they happen once; what is left after that is tried again by `provider.ask`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import modal
from grpclib.exceptions import StreamTerminatedError
from modal import exception
from modal.config import config as modal_config

from miles_plugins.sandbox.provider import Fault, FileTooLarge, Found

if TYPE_CHECKING:
    from miles_plugins.sandbox.modal import Modal

__all__ = ["ModalBoxes", "has_credentials"]

_CHUNK = 1 << 20
_AT_ONCE = 16
"""Boxes whose tags are asked for at a time; the SDK's list does not bring them."""


class FileTrouble(Exception):
    """A file in a box could not be read or written."""


def has_credentials() -> bool:
    """Whether the SDK finds a token; asks no server."""
    token = modal_config.get("token_id") and modal_config.get("token_secret")
    return bool(token or modal_config.get("oauth_refresh_token"))


class ModalMachine:
    """One box."""

    def __init__(self, sandbox: Any, limit_s: float) -> None:
        self.id = str(sandbox.object_id)
        self.sandbox = sandbox
        self._limit_s = math.ceil(limit_s)

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, data: bytes = b""
    ) -> tuple[int, bytes]:
        """Run argv as it is, standard error merged by nobody and dropped here."""
        code, out, _ = await self._exec(argv, timeout_s=timeout_s, data=data)
        return code, out

    async def read(self, path: str, *, most: int) -> bytes:
        """By `head`."""
        argv = ["head", "-c", str(most + 1), "--", path]
        code, out, err = await self._exec(argv, timeout_s=self._limit_s)
        if code:
            raise FileTrouble(err.decode(errors="replace").strip() or f"exit code {code}")
        if len(out) > most:
            raise FileTooLarge(most)
        return out

    async def write(self, path: str, data: bytes) -> None:
        """By `cat`, folders first."""
        script = 'mkdir -p -- "$1" && cat >"$2"'
        argv = ["sh", "-c", script, "sh", posixpath.dirname(path), path]
        code, _, err = await self._exec(argv, timeout_s=self._limit_s, data=data)
        if code:
            raise FileTrouble(err.decode(errors="replace").strip() or f"exit code {code}")

    async def _exec(
        self, argv: Sequence[str], *, timeout_s: float, data: bytes = b""
    ) -> tuple[int, bytes, bytes]:
        process = await self.sandbox.exec.aio(*argv, timeout=math.ceil(timeout_s), text=False)
        for start in range(0, len(data), _CHUNK):
            process.stdin.write(data[start : start + _CHUNK])
            await process.stdin.drain.aio()
        process.stdin.write_eof()
        await process.stdin.drain.aio()
        out, err = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
        code = await process.wait.aio()
        if code < 0:
            raise TimeoutError(f"a command did not end within {timeout_s:g} s")
        return code, out, err


class ModalBoxes:
    """Boxes of one app."""

    title = "sandbox modal"

    def __init__(self, config: Modal.Config) -> None:
        self._config = config
        self._app: Any = None
        self._image: Any = modal.Image.from_registry(config.image) if config.image else None
        self._open: dict[str, Any] = {}

    async def create(self, labels: Mapping[str, str]) -> ModalMachine:
        """A box that waits for commands."""
        config = self._config
        more: dict[str, Any] = {"image": self._image} if self._image is not None else {}
        if config.cpu:
            more["cpu"] = config.cpu
        if config.memory_mib:
            more["memory"] = config.memory_mib
        sandbox = await modal.Sandbox.create.aio(
            app=await self._its_app(),
            tags=dict(labels),
            timeout=config.lifetime_s,
            block_network=not config.network,
            **more,
        )
        machine = ModalMachine(sandbox, config.request_timeout_s)
        self._open[machine.id] = sandbox
        return machine

    async def find(self, labels: Mapping[str, str]) -> Sequence[Found]:
        """Those of the app that have not ended."""
        app = await self._its_app()
        sandboxes = modal.Sandbox.list.aio(app_id=app.app_id, tags=dict(labels))
        turn = asyncio.Semaphore(_AT_ONCE)

        async def found(sandbox: Any) -> Found | None:
            with contextlib.suppress(exception.NotFoundError, exception.ConflictError):
                async with turn:
                    return Found(id=sandbox.object_id, labels=await sandbox.get_tags.aio())
            return None  # it ended meanwhile

        each = await asyncio.gather(*[found(sandbox) async for sandbox in sandboxes])
        return [one for one in each if one is not None]

    async def delete(self, id: str) -> None:
        """Terminate it; Modal takes that for done when it has ended already."""
        with contextlib.suppress(exception.NotFoundError):
            sandbox = self._open.get(id) or await modal.Sandbox.from_id.aio(id)
            await sandbox.terminate.aio()
            self._open.pop(id, None)

    def explain(self, error: BaseException) -> Fault:
        """By the SDK's classes, which stand for gRPC's codes."""
        if isinstance(error, exception.ResourceExhaustedError):
            return Fault(retryable=True, refused=True)
        if isinstance(error, exception.AuthError | exception.PermissionDeniedError):
            return Fault(refused=True)
        ended = exception.SandboxTimeoutError | exception.SandboxTerminatedError
        if isinstance(error, ended | exception.ConflictError | exception.NotFoundError):
            return Fault(gone=True)
        passing = exception.ServiceError | exception.InternalError | exception.InternalFailure
        broken = exception.ConnectionError | exception.TimeoutError | StreamTerminatedError
        if isinstance(error, passing | broken):
            return Fault(retryable=True)
        return Fault()

    async def close(self) -> None:
        """The client is the SDK's own, shared by the process."""

    async def _its_app(self) -> Any:
        if self._app is None:
            self._app = await modal.App.lookup.aio(self._config.app, create_if_missing=True)
        return self._app
