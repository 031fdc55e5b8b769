"""The `none` sandbox: commands run on this machine, in a folder, as the user who runs miles.

It keeps order (time, output, leftovers), not safety: for code that you would run yourself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles import BoxInfo, Context, SandboxError, Task, process_identity
from miles_plugins.sandbox.code import compiled
from miles_plugins.sandbox.labels import end, label, running
from miles_plugins.sandbox.supervised import Launch, SupervisedBox, launch, value_faults

__all__ = ["Unsandboxed"]

_log = logging.getLogger("miles.sandbox")

_TITLE = "sandbox 'none'"
_PREFIX = "miles-none-"


class Unsandboxed:
    """NO ISOLATION: commands run on this machine as your own user. For trusted code only.

    Whatever a model writes can read your files, use your network and delete what you can delete.
    Boxes behave as those of other sandboxes do: each has a folder of its own that is gone after it,
    output is capped, a timeout kills all that a command started, your environment variables are not
    passed on, and everything ends with the run, also when that is killed. There are no limits on
    memory, processes, disk or network. Use `sandbox=process` for anything a model wrote.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """What commands are given."""

        timeout_s: float = 60.0
        """Seconds a command may run when it is not given a time of its own."""
        output_kb: int = 64
        """KiB kept of each of a command's streams, half from its beginning and half from its
        end."""
        file_mb: int = 64
        """MiB of the largest file that `read` and `write` move."""
        env: Mapping[str, str] = field(default_factory=dict)
        """More environment variables of every command; PATH is this process's, nothing else is
        inherited."""
        open_timeout_s: float = 30.0
        """Seconds that starting a box may take."""

    def __init__(self, config: Config, context: Context) -> None:
        self._config, self._run = config, context.directory.name
        _log.warning("%s %s", _TITLE, _warning())

    @classmethod
    def check(cls, config: Config, planned: Any) -> Sequence[str]:
        """Values that make no sense."""
        return value_faults(config)

    @classmethod
    def warnings(cls, config: Config, planned: Any) -> Sequence[str]:
        """That it isolates nothing, wherever a run is checked or begun."""
        return [f"{_TITLE} {_warning()}"]

    async def open(self, task: Task) -> SupervisedBox:
        """A folder of its own, and a supervisor for what runs in it. Raises `SandboxError`."""
        config, id = self._config, f"miles-{secrets.token_hex(5)}"
        python = sys.executable
        code = await asyncio.to_thread(compiled, python, _TITLE)
        try:
            home = tempfile.mkdtemp(prefix=f"{_folder(id)}{process_identity()}-")
        except OSError as error:
            raise SandboxError(f"{_TITLE}: cannot make a folder: {error}") from error
        how = Launch(
            title=_TITLE,
            around=(),
            python=python,
            label=label("none", id, self._run),
            code=code,
            home=home,
            folder=home,
            environment={
                "PATH": os.environ.get("PATH", os.defpath),
                "HOME": home,
                "LANG": "C.UTF-8",
                **config.env,
            },
            isolated=False,
            timeout_s=config.timeout_s,
            open_timeout_s=config.open_timeout_s,
            output_bytes=config.output_kb * 1024,
            file_bytes=config.file_mb << 20,
        )
        return await launch(how, id=id)

    async def list(self) -> Sequence[BoxInfo]:
        """Boxes whose supervisor runs, and folders of those whose supervisor was killed."""
        found = {info.id: info for _, info in running("none")}
        for folder in _folders():
            number, _, owner = folder.name.removeprefix(_PREFIX).partition("-")
            id, owner = f"miles-{number}", owner.rpartition("-")[0]
            if id not in found:
                with contextlib.suppress(FileNotFoundError):
                    made = folder.stat().st_mtime
                    found[id] = BoxInfo(id=id, owner=owner, created=made, state="a folder only")
        return list(found.values())

    async def remove(self, id: str) -> None:
        """End a box with all that it started, and delete its folder."""
        await end("none", id, signal.SIGTERM)
        for folder in _folders():
            if folder.name.startswith(_folder(id)):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                if folder.exists():
                    raise SandboxError(f"{_TITLE}: cannot delete {folder}")


def _warning() -> str:
    return (
        "isolates nothing: commands that a model writes run on this machine as its user "
        f"({os.environ.get('USER') or os.geteuid()}), with the files and the network of that "
        "user; sandbox=process isolates them"
    )


def _folder(id: str) -> str:
    return f"{_PREFIX}{id.removeprefix('miles-')}-"


def _folders() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
