"""The box's end of the channel: obeys the host, and answers for commands that ended.

In come frames of a length (4 bytes) and a marshalled tuple; out go frames of `REPLY` and bytes. The
host is trusted; what runs in here is not: no command inherits the channel, and the process that
holds it can neither be traced nor have its memory read. It ends, and everything in the box with it,
when the host hangs up.
"""

import _signal
import gc
import marshal
import os
import select
import stat
import struct
import time

from miles_plugins.sandbox.inside.commands import CHUNK, Job, Stream, become, snippet_of
from miles_plugins.sandbox.inside.processes import (
    adopt_orphans,
    kill_tree,
    memory_at_most,
    memory_in_all,
    set_dumpable,
)

__all__ = ["start"]

REPLY = struct.Struct("!IIBBiQQI")  # length of what follows, id, kind, flags, code, totals, split
HELLO, RESULT, DATA, DONE, ERROR = range(5)
TIMED_OUT, TOO_MUCH_MEMORY, TOO_MANY_FILES = 1, 2, 4
WATCH_S = 0.1  # between looks at memory and files while anything runs
KEPT = 64  # streams of commands that ended, still drained so that what they left behind can write


def start(setup):
    """Take over the process. Returns only in a forked child, with the snippet that it is to run."""
    os.closerange(3, 65536)  # what the host's side had open on the way here
    guarded = adopt_orphans() and set_dumpable(0)
    os.umask(0o022)
    os.chdir(setup["home"])
    supervisor = Supervisor(setup)
    gc.disable()
    gc.freeze()  # forked children share these pages for longer
    supervisor.reply(0, HELLO, flags=int(guarded))
    return supervisor.serve()


class Supervisor:
    """All that runs in a box."""

    def __init__(self, setup):
        self.isolated = setup["isolated"]  # everything else in this pid namespace is the box's
        self.home, self.environment = setup["home"], setup["environment"]
        self.cap, self.memory, self.files = setup["cap"], setup["memory"], setup["files"]
        self.rlimits = []
        if setup["rlimits"]:
            import resource

            for name, value in setup["rlimits"]:
                limit = getattr(resource, "RLIMIT_" + name)
                hard = resource.getrlimit(limit)[1]
                if hard != resource.RLIM_INFINITY:
                    value = min(value, hard)
                self.rlimits.append((resource.setrlimit, limit, value))
        self.channel = os.dup(0)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        self.woken, wake = os.pipe()
        for fd in (self.channel, self.woken, wake):
            os.set_blocking(fd, False)
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        self.told_to_end = False
        if not self.isolated:  # there, it would be for anything in the box to send
            _signal.signal(_signal.SIGTERM, self._end)
        _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.jobs, self.streams, self.inputs = {}, {}, {}  # by pid, descriptor, descriptor
        self.received, self.sending = bytearray(), bytearray()
        self.poll = select.poll()
        self.poll.register(self.channel, select.POLLIN)
        self.poll.register(self.woken, select.POLLIN)
        self.watched_at, self.used_files, self.empty = 0.0, 0, True

    def serve(self):
        """The loop. Returns only in a forked child that is to run a snippet."""
        while True:
            for fd, event in self.poll.poll(self._patience()):
                if fd == self.channel:
                    snippet = self._talk(event)
                    if snippet is not None:
                        return snippet
                elif fd == self.woken:
                    os.read(self.woken, CHUNK)
                elif fd in self.inputs:
                    if not self.inputs[fd].feed():
                        self._forget(fd)
                elif fd in self.streams and not self.streams[fd].take():
                    self._forget(fd)
            if self.told_to_end:
                self._leave()
            self._collect()
            self._expire()
            self._watch()

    def _patience(self):
        """Milliseconds until something is due; None when nothing is."""
        if self.empty:
            return None
        due = [job.deadline for job in self.jobs.values()]
        if self.memory or self.files:
            due.append(self.watched_at + WATCH_S)
        soon = min(due, default=float("inf")) - time.monotonic()
        return None if soon == float("inf") else min(max(0.0, soon), 3600) * 1000 + 1

    # ---- the channel

    def _talk(self, event):
        if event & select.POLLOUT:
            self._flush()
        if not event & ~select.POLLOUT:
            return None
        try:
            data = os.read(self.channel, 16 * CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._leave()
        self.received += data
        while len(self.received) >= 4:
            end = 4 + int.from_bytes(self.received[:4], "big")
            if len(self.received) < end:
                break
            name, number, rest = marshal.loads(self.received[4:end])
            del self.received[:end]
            try:
                snippet = getattr(self, "do_" + name)(number, *rest)
            except (OSError, ValueError) as error:
                words = getattr(error, "strerror", None) or str(error)
                self.reply(number, ERROR, words.encode())
                continue
            if snippet is not None:
                return snippet
        return None

    def reply(self, number, kind, body=b"", flags=0, code=0, totals=(0, 0), split=0):
        """Answer order `number`."""
        size = REPLY.size - 4 + len(body)
        self.sending += REPLY.pack(size, number, kind, flags, code, *totals, split)
        self.sending += body
        self._flush()

    def _flush(self):
        while self.sending:
            try:
                sent = os.write(self.channel, self.sending[: 4 * CHUNK])
            except BlockingIOError:
                self.poll.modify(self.channel, select.POLLIN | select.POLLOUT)
                return
            except OSError:
                self._leave()
            del self.sending[:sent]
        self.poll.modify(self.channel, select.POLLIN)

    def _end(self, *_):
        self.told_to_end = True

    def _leave(self):
        """The host is gone or done: so is everything in here."""
        if not self.isolated:
            self._clear()
            _remove(self.home)
        os._exit(0)  # as process 1 it takes its namespace along

    # ---- commands

    def do_exec(self, number, argv, cwd, env, timeout, stdin):
        """Start a command; in the child, what `become` leaves to be run."""
        env = {**self.environment, **env}
        source = snippet_of(argv, env)
        ends = [*os.pipe(), *os.pipe()]
        ends += os.pipe() if stdin else (os.open("/dev/null", os.O_RDONLY), -1)
        out, out_child, err, err_child, in_child, into = ends
        try:
            pid = os.fork()
        except OSError:
            for fd in ends:
                if fd >= 0:
                    os.close(fd)
            raise
        if pid == 0:
            become(
                argv,
                standard=(in_child, out_child, err_child),
                folder=os.path.join(self.home, cwd),
                env=env,
                rlimits=self.rlimits,
                snippet=source is not None,
            )
            return argv, source
        for fd in (out_child, err_child, in_child):
            os.close(fd)
        self.empty = False
        self.watched_at = time.monotonic()
        streams = Stream(out, self.cap), Stream(err, self.cap)
        given = into, memoryview(stdin)
        self.jobs[pid] = job = Job(number, pid, *streams, given, time.monotonic() + timeout)
        for stream in streams:
            self.streams[stream.fd] = stream
            self.poll.register(stream.fd, select.POLLIN)
        if into >= 0:
            os.set_blocking(into, False)
            self.inputs[into] = job
            self.poll.register(into, select.POLLOUT)
        return None

    def do_cancel(self, number):
        """Kill a command that nobody waits for any more."""
        for job in list(self.jobs.values()):
            if job.number == number and job.pid in self.jobs:
                self._stop(job, TIMED_OUT)

    def do_halt(self, number):
        """Kill every process but this one, what commands left behind included."""
        if self.isolated:
            _kill_all()
        else:
            self._clear()
        self.reply(number, DONE)

    def _clear(self):
        """Kill all descendants, and reap those that nobody waits for."""
        until = time.monotonic() + 5
        while not self.empty and time.monotonic() < until:
            kill_tree(os.getpid())
            time.sleep(0.005)
            self._collect()

    def _forget(self, fd):
        self.poll.unregister(fd)
        self.streams.pop(fd, None)
        self.inputs.pop(fd, None)
        os.close(fd)

    def _collect(self):
        """Reap what ended, and answer for the commands among it."""
        for pid, status in self._reap():
            if pid in self.jobs:
                self._finish(self.jobs.pop(pid), status)

    def _reap(self):
        ended = []
        while not self.empty:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.empty = True
                break
            if pid == 0:
                break
            ended.append((pid, status))
        return ended

    def _finish(self, job, status):
        if job.stdin in self.inputs:
            self._forget(job.stdin)
        for stream in (job.out, job.err):
            if stream.fd in self.streams and not stream.take():
                self._forget(stream.fd)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        out, err = job.out.end(), job.err.end()
        totals = job.out.total, job.err.total
        self.reply(job.number, RESULT, out + err, job.flags, code, totals, len(out))
        for fd in [fd for fd, stream in self.streams.items() if stream.over][:-KEPT]:
            self._forget(fd)

    def _expire(self):
        now = time.monotonic()
        for job in list(self.jobs.values()):
            if job.deadline <= now and job.pid in self.jobs:  # else it ended with one before it
                self._stop(job, TIMED_OUT)

    def _stop(self, job, flags):
        job.flags |= flags
        job.deadline = float("inf")
        killed, all_of_them = kill_tree(job.pid)
        if not all_of_them and self.isolated:
            _kill_all()  # new ones came faster than they could be stopped
        ended, until = [], time.monotonic() + 2
        while killed and time.monotonic() < until:  # else the next command finds no room
            ended += self._reap()
            killed = {pid for pid in killed if os.path.exists(f"/proc/{pid}")}
            time.sleep(0.001)
        for pid, status in ended:
            if pid in self.jobs:
                self._finish(self.jobs.pop(pid), status)

    def _watch(self):
        """Kill everything when the box's processes together hold too much memory, or while they
        make more files than they may."""
        now = time.monotonic()
        if self.empty or not self.isolated or now < self.watched_at + WATCH_S:
            return
        self.watched_at, flags = now, 0
        if memory_at_most() > self.memory and memory_in_all() > self.memory:
            flags |= TOO_MUCH_MEMORY
        disk = os.statvfs(self.home)
        used, before = disk.f_files - disk.f_ffree, self.used_files
        self.used_files = used
        if used > max(self.files, before):
            flags |= TOO_MANY_FILES
        if flags:
            for job in self.jobs.values():
                job.flags |= flags
            _kill_all()

    # ---- files

    def do_read(self, number, path, limit):
        """A file's content, as anything in the box would see it."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
        fd = os.open(os.path.join(self.home, path), flags)
        with os.fdopen(fd, "rb", buffering=0) as file:
            _only_files(fd)
            body = bytearray()
            while len(body) <= limit:
                data = file.read(min(limit + 1 - len(body), 16 * CHUNK))
                if not data:
                    break
                body += data
        if len(body) > limit:
            raise ValueError(f"it is larger than the {limit} bytes that may be read")
        self.reply(number, DATA, bytes(body))

    def do_write(self, number, path, data):
        """Create or replace a file's content, with the folders on the way."""
        path = os.path.join(self.home, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        with os.fdopen(fd, "wb", buffering=0) as file:
            _only_files(fd)
            os.ftruncate(fd, 0)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        self.reply(number, DONE)


def _kill_all():
    """Kill every process that this one sees, itself left out."""
    try:
        os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
        return  # there is none


def _only_files(fd):
    """A pipe, a device or a folder has no content of its own, and could block."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ValueError("it is not a regular file")


def _remove(folder):
    """Delete a folder of our own, symbolic links in it not followed."""
    places = [folder]
    for path, folders, files in os.walk(folder):
        places += [os.path.join(path, each) for each in folders + files]
    for place in reversed(places):
        try:
            if os.path.isdir(place) and not os.path.islink(place):
                os.rmdir(place)
            else:
                os.unlink(place)
        except OSError:
            continue  # `miles sandboxes list` shows what could not be removed
