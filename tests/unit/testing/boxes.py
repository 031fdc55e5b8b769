"""A sandbox of folders and processes for the sandbox suite, and ones that break its promises.

A local plugin file. Folders isolate nothing from a command that means harm; this is for tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

from miles import BoxInfo, process_identity
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


class Open(FakeBox):
    async def exec(self, command, *, env=None, **how):
        return await super().exec(command, env={**os.environ, **(env or {})}, **how)


class Leaking(FakeSandbox):
    """Hands on the whole environment."""

    box = Open


class Quiet(FakeBox):
    async def exec(self, command, **how):
        result = await super().exec(command, **how)
        return replace(result, stdout=re.sub(r"(?m)^\[output cut.*", "", result.stdout))


class Silent(FakeSandbox):
    """Caps output without a word."""

    box = Quiet


class OneByOne(FakeBox):
    def __init__(self):
        super().__init__()
        self.turn = asyncio.Lock()

    async def exec(self, command, **how):
        async with self.turn:
            return await super().exec(command, **how)


class Queueing(FakeSandbox):
    """Runs one command at a time."""

    box = OneByOne


class Reopening(FakeBox):
    async def exec(self, command, **how):
        self.closed = False
        return await super().exec(command, **how)


class Revived(FakeSandbox):
    """Does not mind that a box is closed."""

    box = Reopening


class Stubborn(FakeBox):
    async def exec(self, command, **how):
        return await asyncio.shield(super().exec(command, **how))


class Lingering(FakeSandbox):
    """Lets a cancelled command run."""

    box = Stubborn


class Forgetful(FakeSandbox):
    """Lists boxes that are closed."""

    async def list(self):
        return [BoxInfo(id=box.root.name, owner=process_identity()) for box in self.opened]

    async def remove(self, id):
        for box in self.opened:
            if box.root.name == id:
                await box.close()


miles_components = {
    "sandbox": {
        "good": FakeSandbox,
        "timeout": Timeless,
        "boxes_apart": Together,
        "read_write": Textual,
        "exec_around": Numb,
        "exec": OneStream,
        "own_environment": Leaking,
        "much_output": Silent,
        "side_by_side": Queueing,
        "close": Revived,
        "cancelled": Lingering,
        "inventory": Forgetful,
    }
}
