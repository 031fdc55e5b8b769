"""One command inside a box: what it is given, what it becomes, and what it says.

When to start or kill it is the supervisor's business.
"""

import _signal
import errno
import gc
import io
import os
import sys

from miles_plugins.sandbox.inside.processes import adopt_orphans, end_process, set_dumpable

__all__ = ["Job", "Stream", "become", "run_snippet", "snippet_of"]

CHUNK = 65536


class Stream:
    """What a command says on one descriptor: beginning and end, and how much it was in all."""

    def __init__(self, fd, cap):
        self.fd, self.half, self.total = fd, cap // 2, 0
        self.head, self.tail = bytearray(), bytearray()
        self.over = False  # the command ended; what it left behind may write on, unheard
        os.set_blocking(fd, False)

    def take(self):
        """Read what there is; False at the end of the stream."""
        while True:
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            if not self.over:
                self._keep(data)
            if len(data) < CHUNK:
                return True

    def _keep(self, data):
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > self.half + CHUNK:
            del self.tail[: len(self.tail) - self.half]

    def end(self):
        """What was kept, at most twice `half`; forgets it."""
        del self.tail[: max(0, len(self.tail) - self.half)]
        kept = bytes(self.head + self.tail)
        self.over, self.head, self.tail = True, bytearray(), bytearray()
        return kept


class Job:
    """A command that runs."""

    def __init__(self, number, pid, out, err, stdin, deadline):
        self.number, self.pid, self.deadline = number, pid, deadline
        self.out, self.err = out, err
        self.stdin, self.input = stdin
        self.flags = 0

    def feed(self):
        """Write what fits into its standard input; False when there is no more to write."""
        try:
            self.input = self.input[os.write(self.stdin, self.input[:CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False  # it does not read on
        return bool(self.input)


def snippet_of(argv, env):
    """The source in `python3 -c source ...` where this very interpreter, already loaded, runs it as
    a fresh one would; else None."""
    if len(argv) < 3 or argv[1] != b"-c" or not sys.executable:
        return None
    if any(name.startswith(b"PYTHON") for name in env):
        return None
    path, ours = _which(argv[0], env), os.fsencode(sys.executable)
    try:
        same = path is not None and os.path.samefile(path, ours)
        if not same or not os.path.samefile(os.path.dirname(path), os.path.dirname(ours)):
            return None
        if os.path.lexists(os.path.join(env.get(b"HOME", b""), b".local")):
            return None  # packages of the user's own are found at an interpreter's start only
        return argv[2].decode()
    except (OSError, ValueError):
        return None


def become(argv, *, standard, folder, env, rlimits, snippet):
    """In a forked child: shed what is the supervisor's and become the command. Returns only for a
    snippet, with everything ready to run it."""
    try:
        _signal.set_wakeup_fd(-1)
        for own in (_signal.SIGCHLD, _signal.SIGTERM):
            _signal.signal(own, _signal.SIG_DFL)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        os.setsid()
        for to, fd in enumerate(standard):
            os.dup2(fd, to)
        os.closerange(3, 65536)
        adopt_orphans()
        for setlimit, which, value in rlimits:
            setlimit(which, (value, value))
        os.chdir(folder)
        if not snippet:
            for ignored in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):
                _signal.signal(ignored, _signal.SIG_DFL)
            path = _which(argv[0], env)
            if path is None:
                raise FileNotFoundError(errno.ENOENT, "command not found")
            os.execve(path, argv, env)
        set_dumpable(1)
        os.environb.clear()
        os.environb.update(env)
    except (OSError, ValueError) as error:
        named, what = argv[0], str(error)
        if isinstance(error, OSError):
            named, what = error.filename or named, error.strerror
        words = f"miles: {os.fsdecode(named)}: {what}\n"
        os.write(2, words.encode(errors="replace"))
        missing = isinstance(error, OSError) and error.errno == errno.ENOENT
        os._exit(127 if missing else 126)


def run_snippet(argv, source):
    """Run source as `python3 -c` does. What it raises is the interpreter's to handle, as usual; an
    ordinary end is made short, because taking the interpreter apart costs more than most snippets.
    """
    for name in [n for n in sys.modules if n.startswith("miles_plugins.sandbox.inside")]:
        del sys.modules[name]
    before, modules = sys.modules["__main__"], set(sys.modules)
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__loader__ = getattr(before, "__loader__", None)
    main.__annotations__ = {}
    sys.argv = ["-c", *(os.fsdecode(word) for word in argv[3:])]
    gc.enable()
    names = id(main.__dict__)

    def told(kind, error, trace):
        while trace is not None and id(trace.tb_frame.f_globals) != names:
            trace = trace.tb_next  # the supervisor's own frames
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    sys.excepthook = told
    code = compile(source, "<string>", "exec", dont_inherit=True)
    if sys.version_info >= (3, 13):
        _show_lines(code, source)
    exec(code, main.__dict__)
    if _ends_simply(set(sys.modules) - modules):
        del main
        _end()


def _show_lines(code, source):
    """Let tracebacks show the snippet's lines, as interpreters from 3.13 on do, instead of those
    that this process was started with."""
    import linecache

    linecache.cache["<string>"] = len(source), None, source.splitlines(True), "<string>"
    register = getattr(linecache, "_register_code", None)
    if register is not None and hasattr(linecache, "_interactive_cache"):
        register(code, source, "<string>")


def _ends_simply(imported):
    """Whether all that is left to do is what `_end` does."""
    import atexit

    library = os.path.dirname(os.__file__) + os.sep
    for name in imported:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or library
        if not str(file).startswith(library) or "site-packages" in str(file):
            return False  # somebody's module, which may hold files open
    return not atexit._ncallbacks() and type(sys.stdout) is type(sys.__stdout__)


def _end():
    """The interpreter's own order: threads, `__main__`, streams, then the C library. Returns when a
    stream cannot be written, which the interpreter then reports."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    for each in gc.get_objects():  # in a cycle, a file may be closed before what it buffers
        if isinstance(each, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            _flush(each)
    del sys.modules["__main__"]
    gc.collect()  # what was there before the snippet is frozen, and not looked at
    if all(map(_flush, (sys.stdout, sys.__stdout__, sys.stderr))):
        end_process()


def _flush(stream):
    """False when that fails."""
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _which(name, env):
    """Where a command is found, as a shell would; None when nowhere."""
    if b"/" in name:
        return name
    for folder in env.get(b"PATH", os.defpath.encode()).split(b":"):
        path = os.path.join(folder or b".", name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None
