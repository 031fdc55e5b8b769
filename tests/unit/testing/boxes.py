"""A sandbox of folders and processes for the sandbox suite, and ones that break its promises.

A local plugin file. Folders isolate nothing from a command that means harm; this is for tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from miles import ExecResult, SandboxError

CAP = 100_000


class Folder:
    """A box that is a folder."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="miles-box-"))
        self.closed = False

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    async def exec(self, command, *, cwd=None, env=None, timeout=None, stdin=None):
        if self.closed:
            raise SandboxError("the box is closed")
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
            timed_out = False
            try:
                async with asyncio.timeout(timeout):
                    await process.communicate((stdin or "").encode())
            except TimeoutError:
                timed_out = True
            finally:
                self.kill(process.pid)
            await process.wait()
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read(CAP).decode(errors="replace"))
        return ExecResult(
            stdout=said[0], stderr=said[1], exit_code=process.returncode or 0, timed_out=timed_out
        )

    async def read(self, path):
        try:
            return (self.root / path).read_bytes()
        except OSError as error:
            raise SandboxError(f"cannot read {path}: {error.strerror}") from error

    async def write(self, path, data):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    async def close(self):
        self.closed = True
        shutil.rmtree(self.root, ignore_errors=True)


class Folders:
    """Boxes that are folders."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing to choose."""

    box = Folder

    def __init__(self, config, context):
        pass

    async def open(self, task):
        return self.box()


class LeavesChildren(Folder):
    def kill(self, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Timeless(Folders):
    """Kills the command and not what it started."""

    box = LeavesChildren


class OneRoom(Folder):
    shared = Path(tempfile.gettempdir()) / f"miles-boxes-{os.getpid()}"

    def __init__(self):
        super().__init__()
        self.root.rmdir()
        self.root = self.shared
        self.root.mkdir(exist_ok=True)


class Together(Folders):
    """All boxes are one folder."""

    box = OneRoom


class TextOnly(Folder):
    async def read(self, path):
        return (await super().read(path)).decode(errors="replace").encode()


class Textual(Folders):
    """Reads text."""

    box = TextOnly


class NoInput(Folder):
    async def exec(self, command, *, stdin=None, **how):
        return await super().exec(command, **how)


class Numb(Folders):
    """Passes no input."""

    box = NoInput


class Merged(Folder):
    async def exec(self, command, **how):
        if isinstance(command, str):
            command = f"exec 2>&1; {command}"
        return await super().exec(command, **how)


class OneStream(Folders):
    """Mixes both streams."""

    box = Merged


miles_components = {
    "sandbox": {
        "good": Folders,
        "timeout": Timeless,
        "boxes_apart": Together,
        "read_write": Textual,
        "exec_around": Numb,
        "exec": OneStream,
    }
}
