"""A box on this machine, seen from outside: a supervisor process inside it, and a channel to that.

How much the box isolates is decided by the command that starts it. What comes over the channel is
checked as if the box had written it: whatever is wrong with it ends the box in a `SandboxError`.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from miles import ExecResult, SandboxError
from miles_plugins.sandbox.channel import ERROR, Channel, Reply

__all__ = ["Launch", "SupervisedBox", "launch", "value_faults"]

_log = logging.getLogger("miles.sandbox")

_TIMED_OUT, _TOO_MUCH_MEMORY, _TOO_MANY_FILES = 1, 2, 4
_GRACE_S = 15.0  # beyond a command's own limit, for an answer from a busy machine
_FILE_S = 60.0  # for reading or writing a file
_CLOSE_S = 10.0  # for a box to end by itself
_CODING = 2  # a version of marshal that every Python 3 reads

_BOOT = """
import os,marshal,sys
def g(n):
 b=b''
 while len(b)<n:
  c=os.read(0,n-len(b))
  if not c:os._exit(0)
  b+=c
 return b
def r():return marshal.loads(g(int.from_bytes(g(4),'big')))
for n,c in r():
 m=sys.modules[n]=type(sys)(n);exec(c,m.__dict__)
s=m.start(r())
sys.modules['miles_plugins.sandbox.inside.commands'].run_snippet(*s)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a box is started."""

    title: str
    """The sandbox, as messages begin."""
    around: Sequence[str]
    """Words before the interpreter's: what isolates it."""
    python: str
    """The interpreter inside."""
    label: str = ""
    """A last word for its command line, to find it by."""
    code: bytes
    """The supervisor, compiled by that interpreter (`code.compiled`)."""
    home: str
    """Working directory, as the box sees it."""
    environment: Mapping[str, str]
    """Of every command."""
    isolated: bool
    """It is alone in its pid namespace: everything else there is the box's."""
    timeout_s: float
    """Seconds a command may run when it is not given a time of its own."""
    open_timeout_s: float
    """Seconds that starting may take."""
    output_bytes: int
    """Kept of each stream of a command."""
    file_bytes: int
    """Largest file that `read` gives and `write` takes."""
    rlimits: Sequence[tuple[str, int]] = ()
    """Limits of each process, by the names of `setrlimit`."""
    memory: int = 0
    """Bytes that all processes of an isolated box may hold together."""
    files: int = 0
    """Files and folders that an isolated box may hold."""
    folder: str = ""
    """Deleted when the box is closed, in case its supervisor did not come to do so."""
    explain: Mapping[str, str] = field(default_factory=dict)
    """What to say when the starting command's error holds a text."""


async def launch(how: Launch, *, id: str, pass_fds: Sequence[int] = ()) -> SupervisedBox:
    """Start a box and wait until its supervisor answers. Raises `SandboxError`.

    The box dies with the calling thread, so call this from one that lasts as long as the run.
    """
    process, ours = _started(how, pass_fds)
    box = SupervisedBox(how, id, process)
    channel = box.channel
    try:
        async with asyncio.timeout(how.open_timeout_s):
            await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
            channel.send(how.code)
            setup = {
                "isolated": how.isolated,
                "home": how.home.encode(),
                "environment": {k.encode(): v.encode() for k, v in how.environment.items()},
                "rlimits": [tuple(each) for each in how.rlimits],
                "cap": how.output_bytes,
                "memory": how.memory,
                "files": how.files,
            }
            hello = channel.expect(0)
            channel.send(marshal.dumps(setup, _CODING))
            reply = await hello
    except TimeoutError:
        await box.close()
        what = f"{how.title}: box {id} did not start within {how.open_timeout_s:g} s"
        raise SandboxError(what, retryable=True) from None
    except BaseException:
        await box.close()
        raise
    if how.isolated and not reply.flags:
        await box.close()
        raise SandboxError(
            f"{how.title}: {how.python} has no _ctypes, so a supervisor in it cannot shut itself "
            "off from what runs beside it; choose another interpreter with sandbox.python"
        )
    return box


def _started(how: Launch, pass_fds: Sequence[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process of a box, and our end of its channel."""
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        _delete(how)
        raise SandboxError(f"{how.title}: cannot start a box: {error}") from error
    ours.setblocking(False)
    try:
        process = subprocess.Popen(
            [*how.around, how.python, "-c", _BOOT, *([how.label] if how.label else [])],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            env={k: v for k, v in how.environment.items() if k in ("PATH", "HOME", "LANG")},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        _delete(how)
        raise SandboxError(f"{how.title}: cannot start a box: {error}") from error
    finally:
        theirs.close()
    return process, ours


class SupervisedBox:
    """One open box. Commands may run side by side."""

    def __init__(self, how: Launch, id: str, process: subprocess.Popen[bytes]) -> None:
        self.id = id
        self._how, self._process = how, process
        self._numbers = 0
        self._closing: asyncio.Task[None] | None = None
        largest = max(how.file_bytes, 2 * how.output_bytes) + 4096
        self.channel = Channel(self.failure, largest)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | None = None,
    ) -> ExecResult:
        """Run argv, or a line in `sh`. What it leaves in the background goes on until the box
        closes; a timeout, and cancelling, kill all that it started.

        Raises `ValueError` without a word to run, `SandboxError` when the box fails.
        """
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("a command needs at least one word")
        seconds = self._how.timeout_s if timeout is None else max(timeout, 0.001)
        rest = (
            [_bytes(word) for word in argv],
            _bytes(cwd or ""),
            {_bytes(k): _bytes(v) for k, v in (env or {}).items()},
            float(seconds),
            _bytes(stdin or ""),
        )
        reply = await self._ask("exec", rest, seconds + _GRACE_S)
        cut = reply.body[: reply.split], reply.body[reply.split :]
        stderr = _text(cut[1], reply.err_total)
        return ExecResult(
            stdout=_text(cut[0], reply.out_total),
            stderr=stderr + self._note(reply.flags),
            exit_code=reply.code,
            timed_out=bool(reply.flags & _TIMED_OUT),
        )

    def _note(self, flags: int) -> str:
        """What killed a command, for whoever reads its errors."""
        words = ""
        if flags & _TOO_MUCH_MEMORY:
            words = f"killed: its processes held more than {self._how.memory >> 20} MiB\n"
        if flags & _TOO_MANY_FILES:
            words += f"killed: it made more than {self._how.files} files\n"
        return words

    async def read(self, path: str) -> bytes:
        """A file's content as the box sees it; relative paths start at the working directory.
        Raises `SandboxError`, also for what is no regular file, or larger than may be read."""
        rest = (_bytes(path), self._how.file_bytes)
        return (await self._ask("read", rest, _FILE_S, f"read {path!r}")).body

    async def write(self, path: str, data: bytes) -> None:
        """Create a file, or replace its content, and make the folders above it; relative paths
        start at the working directory. Raises `SandboxError`."""
        data = bytes(data)
        if len(data) > self._how.file_bytes:
            raise SandboxError(
                f"{self._how.title}: cannot write {path!r}: {len(data)} bytes are more than the "
                f"{self._how.file_bytes} that may be written"
            )
        await self._ask("write", (_bytes(path), data), _FILE_S, f"write {path!r}")

    async def halt(self) -> None:
        """Kill everything that runs in the box; its files stay. What a command left in the
        background can then not meddle with the next one, such as one that grades."""
        await self._ask("halt", (), _FILE_S, "stop what runs")

    async def close(self) -> None:
        """Stop everything inside and leave nothing behind; safe to call twice."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    def failure(self, why: str) -> SandboxError:
        """The error of a box that ended, with what its starting command said."""
        if self._closing is not None:
            return SandboxError(f"{self._how.title}: box {self.id} is closed")
        said = b""
        stderr = self._process.stderr
        if stderr is not None and not stderr.closed:
            os.set_blocking(stderr.fileno(), False)
            said = stderr.read(4096) or b""
        words = said.decode(errors="replace").strip()
        error = SandboxError(
            f"{self._how.title}: box {self.id} failed: {why}{': ' if words else ''}{words}"
        )
        for text, hint in self._how.explain.items():
            if text in words:
                error.add_note(hint)
        return error

    async def _ask(
        self, order: str, rest: tuple[Any, ...], limit_s: float, what: str = ""
    ) -> Reply:
        if self._closing is not None:
            raise SandboxError(f"{self._how.title}: box {self.id} is closed")
        self._numbers += 1
        number, channel = self._numbers, self.channel
        answer = channel.expect(number)
        channel.send(marshal.dumps((order, number, rest), _CODING))
        try:
            async with asyncio.timeout(limit_s):
                reply = await answer
        except TimeoutError:
            channel.fail(f"its supervisor did not answer within {limit_s:g} s")
            await self.close()
            raise channel.lost or self.failure("it hangs") from None
        except asyncio.CancelledError:
            channel.forget(number)
            if order == "exec" and channel.lost is None:
                channel.send(marshal.dumps(("cancel", number, ()), _CODING))
            raise
        if reply.kind == ERROR:
            words = reply.body.decode(errors="replace")
            raise SandboxError(f"{self._how.title}: cannot {what or 'start a command'}: {words}")
        return reply

    async def _close(self) -> None:
        self.channel.hang_up()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await _ended(self._process)
        except TimeoutError:
            _log.warning("%s: box %s did not end by itself; it is killed", self._how.title, self.id)
            self._process.kill()
            await _ended(self._process)
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._how.folder:
            await asyncio.to_thread(_delete, self._how)


def _delete(how: Launch) -> None:
    if not how.folder:
        return
    shutil.rmtree(how.folder, ignore_errors=True)
    if os.path.lexists(how.folder):
        _log.warning("%s: what a box left in %s cannot all be deleted", how.title, how.folder)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child without a thread."""
    if process.poll() is not None:
        return
    try:
        fd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # an old kernel or Python, or no descriptor is left
        while process.poll() is None:
            await asyncio.sleep(0.01)
        return
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(fd, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    process.wait()


def value_faults(config: Any) -> list[str]:
    """Numbers of a box's configuration that make no sense, as sentences."""
    faults = []
    for each in fields(config):
        value, least = getattr(config, each.name), 0 if each.name == "pool" else 1e-3
        if isinstance(value, int | float) and value < least:
            faults.append(f"{each.name}: {value} is {'not above' if least else 'below'} 0")
    return faults


def _bytes(text: str) -> bytes:
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="replace")  # a model may write lone surrogates


def _text(kept: bytes, total: int) -> str:
    """A stream as text; when it was cut, its beginning and its end, with words between."""
    if total <= len(kept):
        return kept.decode(errors="replace")
    middle = len(kept) // 2
    head, tail = kept[:middle].decode(errors="replace"), kept[middle:].decode(errors="replace")
    return f"{head}\n[output cut: {total - len(kept)} bytes left out here]\n{tail}"
