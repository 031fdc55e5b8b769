"""A sandbox of plain folders and processes, for tests: it isolates nothing.

Its commands run as the user who runs the test, so nothing that a model wrote belongs in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.errors import SandboxError
from miles.protocols import Context, ExecResult
from miles.types import Task

__all__ = ["FakeBox", "FakeSandbox"]

CAP = 100_000
"""Bytes of each stream that come back."""


class FakeBox:
    """A box that is a folder."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="miles-box-"))
        self.closed = False
        self.running: set[int] = set()

    def kill(self, pid: int) -> None:
        """End a command with what it started."""
        for each in _descendants(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | None = None,
    ) -> ExecResult:
        """As `Box.exec`; paths are below the folder."""
        self._must_be_open()
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    cwd=self.root / (cwd or "."),
                    env={"PATH": os.environ["PATH"], **(env or {})},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                return ExecResult(stdout="", stderr=str(error), exit_code=127)
            self.running.add(process.pid)
            timed_out = False
            try:
                async with asyncio.timeout(timeout):
                    await process.communicate((stdin or "").encode())
            except TimeoutError:
                timed_out = True
            finally:
                self.kill(process.pid)
                self.running.discard(process.pid)
            await process.wait()
            said = []
            for file in (out, err):
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                said.append(file.read(CAP).decode(errors="replace"))
                if size > CAP:
                    said[-1] += f"\n[output cut: {size - CAP} bytes left out]\n"
        code = process.returncode or 0
        code = 128 - code if code < 0 else code
        return ExecResult(stdout=said[0], stderr=said[1], exit_code=code, timed_out=timed_out)

    async def read(self, path: str) -> bytes:
        """As `Box.read`."""
        self._must_be_open()
        try:
            return (self.root / path).read_bytes()
        except OSError as error:
            raise SandboxError(f"cannot read {path}: {error.strerror}") from error

    async def write(self, path: str, data: bytes) -> None:
        """As `Box.write`."""
        self._must_be_open()
        file = self.root / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except OSError as error:
            raise SandboxError(f"cannot write {path}: {error.strerror}") from error

    async def close(self) -> None:
        """As `Box.close`."""
        self.closed = True
        for pid in self.running:
            self.kill(pid)
        shutil.rmtree(self.root, ignore_errors=True)

    def _must_be_open(self) -> None:
        if self.closed:
            raise SandboxError("the box is closed")


def _descendants(root: int) -> set[int]:
    """Children of a process, theirs, and so on, where /proc shows them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {p for p, parent in parents.items() if parent in {root, *found}} - found:
        found |= more
    return found


class FakeSandbox:
    """Boxes that are folders; `opened` holds every one of them."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing to choose."""

    box: type[FakeBox] = FakeBox

    def __init__(self, config: Config | None = None, context: Context | None = None) -> None:
        self.opened: list[FakeBox] = []

    async def open(self, task: Task) -> FakeBox:
        """A new folder."""
        self.opened.append(self.box())
        return self.opened[-1]
