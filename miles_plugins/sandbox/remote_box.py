"""One box at a provider: the same semantics for every provider, made of three things they all have:
run a command, read a file, write a file.

Each command goes through `run_in_box.sh` inside the box, which caps output, keeps time, and kills
all that a command started; so none of this depends on what a vendor's API promises. How boxes come
to be is `remote_sandbox`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import logging
import posixpath
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from miles import ExecResult, SandboxError
from miles_plugins.sandbox.provider import Machine, Provider, RemoteConfig, ask, judged

__all__ = ["RemoteBox"]

T = TypeVar("T")

_log = logging.getLogger("miles.sandbox")

_SCRIPT = re.sub(r"(?m)^ *(#.*)?\n", "", Path(__file__).with_name("run_in_box.sh").read_text())

_GRACE_S = 30.0
"""Seconds beyond a command's own limit after which the box itself counts as stuck."""

_KILL_S = 10.0
"""Seconds that ending a cancelled command may take."""

_LONGEST_LINE = 48_000
"""Characters of a command line; vendors take 64 kB, longer ones travel as a file."""

_NEEDS = "base64 cat grep head ls mkdir mkfifo mktemp rm sleep tail tee wc"

_PREPARE = """
for tool in $2; do command -v "$tool" >/dev/null 2>&1 || lacks="$lacks $tool"; done
[ -r /proc/self/environ ] || lacks="$lacks /proc"
[ -z "$lacks" ] || { echo "lacks:$lacks"; exit 0; }
[ -z "$1" ] || { mkdir -p "$1" && cd "$1"; } || { echo "lacks: the directory $1"; exit 0; }
scratch=$(mktemp -d "${TMPDIR:-/tmp}/miles-XXXXXX") || { echo "lacks: a place for files"; exit 0; }
printf 'home:%s\\nscratch:%s\\n' "$(pwd -P)" "$scratch"
"""


class RemoteBox:
    """A box that answers over a network. Commands may run side by side."""

    def __init__(self, provider: Provider, machine: Machine, config: RemoteConfig) -> None:
        self.id = machine.id
        self._provider = provider
        self._machine = machine
        self._config = config
        self._home = self._scratch = ""
        self._jobs = itertools.count(1)
        self._token = secrets.token_hex(6)
        self._closed = False

    async def prepare(self) -> None:
        """See that the box answers and has what commands need. Raises `SandboxError`."""
        line = ["sh", "-c", _PREPARE, "miles", self._config.workdir, _NEEDS]
        limit = self._config.request_timeout_s
        what = f"prepare box {self.id}"
        _, out = await self._ask(what, lambda: self._machine.run(line, timeout_s=limit), limit)
        said = dict(
            part.split(":", 1) for part in out.decode(errors="replace").splitlines() if ":" in part
        )
        if "lacks" in said:
            raise SandboxError(
                f"{self._provider.title}: the image lacks{said['lacks']}; commands in it need "
                f"/proc, a POSIX sh and {_NEEDS}"
            )
        self._home, self._scratch = said.get("home", ""), said.get("scratch", "")
        if not self._home.startswith("/") or not self._scratch.startswith("/"):
            raise SandboxError(f"{self._provider.title}: cannot {what}: it answers {out[:200]!r}")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | None = None,
    ) -> ExecResult:
        """Run argv, or a line in `sh`. A timeout, and cancelling, kill whatever it started, except
        what it raised to another user (sudo); that ends with the box. Raises `SandboxError` when
        the box fails.
        """
        self._must_be_open()
        env = {**self._config.env, **(env or {})}
        argv = _argv(command, env)
        if any("\0" in part for part in (*argv, cwd or "")):
            return ExecResult(
                stdout="", stderr="a command cannot hold a NUL character", exit_code=126
            )
        number = next(self._jobs)
        job, mark = f"{self._scratch}/{number}", f"{self._token}.{number}"
        feed = "/dev/null"
        if stdin:
            feed = f"{job}.in"
            await self._put(feed, _bytes(stdin))
        if isinstance(command, str) and len(command) > _LONGEST_LINE // 2:
            await self._put(f"{job}.command", _bytes(command))
            argv = _argv(["sh", f"{job}.command"], env)
        seconds = self._config.timeout_s if timeout is None else max(timeout, 0.001)
        cap = str(self._config.output_kb << 10)
        around = [job, mark, f"{seconds:.3f}", cap, self._at(cwd or "."), feed]
        line = ["sh", "-c", _SCRIPT, "miles", "run", *around, *argv]
        if sum(map(len, line)) > _LONGEST_LINE:
            text = f"set -- {shlex.join(['run', *around, *argv])}\n{_SCRIPT}"
            await self._put(f"{job}.run", _bytes(text))
            line = ["sh", f"{job}.run"]
        return self._result(mark, *await self._run(line, job=job, mark=mark, seconds=seconds))

    async def read(self, path: str) -> bytes:
        """A file's content; relative paths start at the working directory. Raises `SandboxError`,
        also when there is no such file."""
        self._must_be_open()
        where = self._at(path)
        limit, most = self._config.request_timeout_s, self._config.file_mb << 20
        read = partial(self._machine.read, where, most=most)
        return await self._ask(f"read {path!r}", read, limit)

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and the folders above it. Raises `SandboxError`."""
        self._must_be_open()
        if len(data) > self._config.file_mb << 20:
            raise SandboxError(
                f"{self._provider.title}: {len(data)} bytes for {path!r} are more than the "
                f"{self._config.file_mb} MiB that may be written at once (file_mb)"
            )
        await self._put(self._at(path), data)

    async def close(self) -> None:
        """Delete the box; safe to call twice. When that fails for good it is said in the log, with
        the command that removes it later, and the box's lifetime ends it."""
        if self._closed:
            return
        self._closed = True
        what = f"delete box {self.id}"
        limit = self._config.request_timeout_s
        try:
            await self._ask(what, lambda: self._provider.delete(self.id), limit)
        except SandboxError as error:
            _log.warning(
                "%s; it ends by itself %d s after it began, or with `miles sandboxes clean`",
                error,
                self._config.lifetime_s,
            )

    async def _put(self, where: str, data: bytes) -> None:
        limit = self._config.request_timeout_s
        what = f"write {len(data)} bytes to {where!r}"
        await self._ask(what, lambda: self._machine.write(where, data), limit)

    async def _run(
        self, line: Sequence[str], *, job: str, mark: str, seconds: float
    ) -> tuple[int, bytes]:
        """Run a line once: a command is only repeated when the provider turned it away."""
        limit = seconds + _GRACE_S
        try:
            return await self._ask(
                "run a command",
                lambda: self._machine.run(line, timeout_s=limit),
                limit + _GRACE_S,
                only_refused=True,
            )
        except asyncio.CancelledError:
            await asyncio.shield(self._end(job, mark))
            raise
        except SandboxError as error:
            cause = error.__cause__
            fault = judged(self._provider, cause) if cause is not None else None
            if fault is not None and fault.retryable and not fault.refused:
                await self._end(
                    job, mark
                )  # nobody knows whether it runs; nobody will read its answer
            raise

    async def _end(self, job: str, mark: str) -> None:
        """End a command that nobody waits for any more, if the box still answers."""
        line = ["sh", "-c", _SCRIPT, "miles", "kill", job, mark]
        try:
            async with asyncio.timeout(_KILL_S):
                await self._machine.run(line, timeout_s=_KILL_S)
        except Exception as error:  # noqa: BLE001 - whatever the SDK raises, the box is at fault, not we
            _log.warning(
                "%s: cannot end a command in box %s: %s", self._provider.title, self.id, error
            )

    async def _ask(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        limit_s: float,
        *,
        only_refused: bool = False,
    ) -> T:
        try:
            return await ask(
                self._provider,
                what,
                call,
                limit_s=limit_s,
                attempts=self._config.attempts,
                only_refused=only_refused,
            )
        except SandboxError as error:
            if error.__cause__ is not None and judged(self._provider, error.__cause__).gone:
                error.add_note(f"box {self.id} is gone: deleted, or past its lifetime")
            raise

    def _result(self, mark: str, code: int, out: bytes) -> ExecResult:
        head, found, rest = out.partition(f"miles:{mark} ".encode())
        try:
            first, *lines = rest.split(b"\n")
            exit_code, late = map(int, first.split())
            stdout, more_out, stderr, more_err = _blocks(lines)
        except (ValueError, binascii.Error) as error:
            said = (out if found else head)[-300:]
            raise SandboxError(
                f"{self._provider.title}: box {self.id} gave no result of a command (exit code "
                f"{code}, output {said!r}): its disk may be full, or the command killed its shell"
            ) from error
        return ExecResult(
            stdout=_text(stdout, more_out),
            stderr=_text(stderr, more_err),
            exit_code=exit_code,
            timed_out=bool(late),
        )

    def _at(self, path: str) -> str:
        if "\0" in path or not path:
            raise SandboxError(f"{self._provider.title}: {path!r} is no path")
        return posixpath.join(self._home, path)

    def _must_be_open(self) -> None:
        if self._closed:
            raise SandboxError(f"{self._provider.title}: box {self.id} is closed")


def _argv(command: str | Sequence[str], env: Mapping[str, str] | None) -> list[str]:
    argv = list(map(_plain, ["sh", "-c", command] if isinstance(command, str) else command))
    if not argv:
        raise ValueError("a command needs at least one word")
    if not env:
        return argv
    for name in env:
        if not name or "=" in name:
            raise ValueError(f"{name!r} cannot be the name of an environment variable")
    # `env` takes a first word with = in it for another variable, so a shell stands between
    return [
        "env",
        *(_plain(f"{k}={v}") for k, v in env.items()),
        "sh",
        "-c",
        'exec "$@"',
        "sh",
        *argv,
    ]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")  # a model may write lone surrogates


def _plain(text: str) -> str:
    return _bytes(text).decode()


def _blocks(lines: Sequence[bytes]) -> list[bytes]:
    """What stands before each dot, decoded; raises `ValueError` when one is not there to its
    end."""
    blocks, begin = [], 0
    for end in [at for at, line in enumerate(lines) if line == b"."]:
        blocks.append(base64.b64decode(b"".join(lines[begin:end]), validate=True))
        begin = end + 1
    return blocks


def _text(data: bytes, end: bytes) -> str:
    """A stream as text; when it was cut, its beginning and its end, with words between."""
    text = data.decode("utf-8", errors="replace")
    if not end:
        return text
    last = end.decode("utf-8", errors="replace")
    return f"{text}\n[output cut after {len(data)} bytes; it ends so:]\n{last}"
