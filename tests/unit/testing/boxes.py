"""A sandbox of folders and processes for the sandbox suite, and ones that break its promises.

A local plugin file. Folders isolate nothing from a command that means harm; this is for tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path

from miles.testing import FakeBox, FakeSandbox


class LeavesChildren(FakeBox):
    def kill(self, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Timeless(FakeSandbox):
    """Kills the command and not what it started."""

    box = LeavesChildren


class OneRoom(FakeBox):
    shared = Path(tempfile.gettempdir()) / f"miles-boxes-{os.getpid()}"

    def __init__(self):
        super().__init__()
        self.root.rmdir()
        self.root = self.shared
        self.root.mkdir(exist_ok=True)


class Together(FakeSandbox):
    """All boxes are one folder."""

    box = OneRoom


class TextOnly(FakeBox):
    async def read(self, path):
        return (await super().read(path)).decode(errors="replace").encode()


class Textual(FakeSandbox):
    """Reads text."""

    box = TextOnly


class NoInput(FakeBox):
    async def exec(self, command, *, stdin=None, **how):
        return await super().exec(command, **how)


class Numb(FakeSandbox):
    """Passes no input."""

    box = NoInput


class Merged(FakeBox):
    async def exec(self, command, **how):
        if isinstance(command, str):
            command = f"exec 2>&1; {command}"
        return await super().exec(command, **how)


class OneStream(FakeSandbox):
    """Mixes both streams."""

    box = Merged


miles_components = {
    "sandbox": {
        "good": FakeSandbox,
        "timeout": Timeless,
        "boxes_apart": Together,
        "read_write": Textual,
        "exec_around": Numb,
        "exec": OneStream,
    }
}
