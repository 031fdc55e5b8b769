"""The `process` sandbox: opens boxes, and finds those that are still open.

What a box can see is `bubblewrap`, what it may ask of the kernel `seccomp`, how one is spoken to
`supervised`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles import BoxInfo, Context, SandboxError, Task
from miles_plugins.sandbox.code import compiled
from miles_plugins.sandbox.labels import end, label, running
from miles_plugins.sandbox.pool import Pool
from miles_plugins.sandbox.process import bubblewrap, seccomp
from miles_plugins.sandbox.supervised import Launch, SupervisedBox, launch, value_faults

__all__ = ["Process"]

_log = logging.getLogger("miles.sandbox")

_TITLE = "sandbox 'process'"
_MIB = 1 << 20


class Process:
    """Boxes in namespaces of this machine's kernel, made by bubblewrap: no network, a read-only
    system, a disk of their own in memory, nobody's rights, limits on everything.

    A box sees /usr and what programs need of /etc, both read-only; its other files, /work (where
    commands start) and /tmp among them, live in one tmpfs that is gone with it. It has no network
    but its own loopback, its own processes, IPC and host name, the rights of `nobody`, no way to
    gain any, and a system call filter. When the process that opened it ends, however that happens,
    the kernel ends the box.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """What a box may use."""

        timeout_s: float = 60.0
        """Seconds a command may run when it is not given a time of its own."""
        memory_mb: int = 512
        """MiB that one process may hold beside files, and that all of a box's together may: the
        first by the kernel at once, the second by looking ten times a second."""
        cpu_s: int = 120
        """Seconds of computing one process may do."""
        processes: int = 64
        """Processes and threads at a time."""
        open_files: int = 256
        """Files one process may have open."""
        file_mb: int = 64
        """MiB of the largest file a command may write, and that `read` and `write` move."""
        disk_mb: int = 256
        """MiB of all files together, held in this machine's memory; /dev/shm has 16 more."""
        files: int = 20_000
        """Files and folders in all; a command that makes more is killed."""
        output_kb: int = 64
        """KiB kept of each of a command's streams, half from its beginning and half from its
        end."""
        python: str = ""
        """Interpreter inside, 3.8 or later; empty is the system's python3, or without one that of
        miles itself."""
        read_only: tuple[str, ...] = ()
        """More of this machine's folders that boxes may read, at the same place."""
        env: Mapping[str, str] = field(default_factory=dict)
        """More environment variables of every command. Nothing else is inherited."""
        pool: int = 0
        """Boxes started before they are asked for; each is still used once."""
        open_timeout_s: float = 30.0
        """Seconds that starting a box may take."""

    def __init__(self, config: Config, context: Context) -> None:
        self._config, self._run = config, context.directory.name
        self._pool = Pool(self._start, size=config.pool, at_once=2 * (os.cpu_count() or 1))
        self._ready = False
        if bubblewrap.kernel() < (5, 14):
            _log.warning(
                "%s: this kernel (%s) counts the processes of all boxes together, so that "
                "sandbox.processes=%d holds for all of them at once; 5.14 and later count each box",
                _TITLE,
                os.uname().release,
                config.processes,
            )

    @classmethod
    def check(cls, config: Config, planned: Any) -> Sequence[str]:
        """What would fail at the first box: values, and what is not installed."""
        found = value_faults(config)
        for folder in config.read_only:
            if not os.path.isabs(folder) or not os.path.exists(folder):
                found.append(f"read_only: there is no {folder!r}, or it is no full path")
        return [*found, *bubblewrap.faults()]

    async def open(self, task: Task) -> SupervisedBox:
        """A fresh box. Raises `SandboxError` when bubblewrap is not there or not allowed to make
        one."""
        if not self._ready:
            found = bubblewrap.faults()
            if found:
                raise SandboxError(f"{_TITLE} {'; '.join(found)}")
            self._ready = True
        return await self._pool.take()

    async def close(self) -> None:
        """Close the boxes that were started and not asked for."""
        await self._pool.close()

    async def list(self) -> Sequence[BoxInfo]:
        """Every box on this machine, whoever opened it."""
        return [info for _, info in running("process")]

    async def remove(self, id: str) -> None:
        """Kill a box."""
        await end("process", id, signal.SIGKILL)  # a box dies with the process that made it

    async def _start(self) -> SupervisedBox:
        config, id = self._config, f"miles-{secrets.token_hex(5)}"
        python, folder = bubblewrap.find_python(config.python)
        code = await asyncio.to_thread(compiled, python, _TITLE)
        given = (seccomp.program(), bubblewrap.PASSWD.encode(), bubblewrap.GROUP.encode())
        with contextlib.ExitStack() as stack:
            rules, passwd, group = (_in_memory(data, stack) for data in given)
            around = bubblewrap.arguments(
                id=id,
                label=label("process", id, self._run),
                disk_bytes=config.disk_mb * _MIB,
                shown=[*config.read_only, *([folder] if folder else [])],
                seccomp=rules,
                files=[(passwd, "/etc/passwd"), (group, "/etc/group")],
            )
            how = self._how(around, python, code)
            return await launch(how, id=id, pass_fds=(rules, passwd, group))

    def _how(self, around: Sequence[str], python: str, code: bytes) -> Launch:
        config = self._config
        memory = config.memory_mb * _MIB
        return Launch(
            title=_TITLE,
            around=around,
            python=python,
            code=code,
            home=bubblewrap.HOME,
            environment={
                "PATH": bubblewrap.PATH,
                "HOME": bubblewrap.HOME,
                "LANG": "C.UTF-8",
                "USER": "nobody",
                **config.env,
            },
            isolated=True,
            timeout_s=config.timeout_s,
            open_timeout_s=config.open_timeout_s,
            output_bytes=config.output_kb * 1024,
            file_bytes=config.file_mb * _MIB,
            rlimits=(
                ("DATA", memory),
                ("CPU", config.cpu_s),
                ("NPROC", config.processes),
                ("NOFILE", config.open_files),
                ("FSIZE", config.file_mb * _MIB),
                ("CORE", 0),
            ),
            memory=memory,
            files=config.files,
            explain=bubblewrap.EXPLAIN,
        )


def _in_memory(data: bytes, stack: contextlib.ExitStack) -> int:
    """A descriptor to read `data` from; bubblewrap takes no other way than descriptors. Raises
    `SandboxError` when there is none left."""
    try:
        fd = os.memfd_create("miles-box")
        stack.callback(os.close, fd)
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError as error:
        raise SandboxError(f"{_TITLE}: cannot start a box: {error}") from error
    return fd
