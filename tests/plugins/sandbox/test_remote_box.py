"""What a remote box makes of a provider that runs commands and moves files, with no provider at
all: the same script that runs in real boxes, on this machine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import ConfigError, Context, SandboxError, Task, process_identity
from miles_plugins.sandbox.provider import Fault, FileTooLarge, Found, RemoteConfig, ask, pause
from miles_plugins.sandbox.remote_box import RemoteBox
from miles_plugins.sandbox.remote_sandbox import RemoteSandbox


class Here:
    """A machine that is this one, in a folder."""

    def __init__(self, folder: Path, shell: Sequence[str] = ("sh",)) -> None:
        self.id = "here"
        self.folder = folder
        self.shell = shell
        self.lines: list[Sequence[str]] = []
        self.path = os.environ["PATH"]

    async def run(self, argv, *, timeout_s):
        self.lines.append(argv)
        process = await asyncio.create_subprocess_exec(
            *self.shell,
            *argv[1:],
            cwd=self.folder,
            env={"PATH": self.path, "TMPDIR": str(self.folder), "OWN": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(timeout_s):
            out, _ = await process.communicate()
        return process.returncode, out

    async def read(self, path, *, most):
        data = self.file(path).read_bytes()
        if len(data) > most:
            raise FileTooLarge(most)
        return data

    async def write(self, path, data):
        self.file(path).write_bytes(data)

    def file(self, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path)


class Nowhere:
    """A provider whose errors mean what they say."""

    title = "sandbox nowhere"

    def __init__(self) -> None:
        self.deleted: list[str] = []

    async def create(self, labels):
        raise NotImplementedError

    async def find(self, labels):
        return []

    async def delete(self, id):
        self.deleted.append(id)

    def explain(self, error):
        return error.args[0] if error.args and isinstance(error.args[0], Fault) else Fault()

    async def close(self):
        pass


def in_box(folder: Path, script, *, shell: Sequence[str] = ("sh",), **config):
    """Run `await script(box)` in a box that is a folder."""

    async def run():
        machine = Here(folder, shell)
        box = RemoteBox(Nowhere(), machine, RemoteConfig(**config))
        await box.prepare()
        try:
            return await script(box)
        finally:
            await box.close()

    return asyncio.run(run())


def shells() -> list[object]:
    found = [("dash",), ("bash", "--posix"), ("busybox", "sh"), ("mksh",), ("ksh",)]
    return [
        pytest.param(
            shell,
            id=shell[0],
            marks=pytest.mark.skipif(not shutil.which(shell[0]), reason=f"no {shell[0]} here"),
        )
        for shell in found
    ]


def processes(word: str) -> list[int]:
    """Living processes of this machine with the word in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def ended(word: str) -> bool:
    """Whether no such process lives; one that was just killed is given a moment to be gone."""
    until = time.monotonic() + 5
    while found := processes(word):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return not found


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("shell", shells())
def test_command_in_any_shell(shell, tmp_path) -> None:
    async def script(box):
        result = await box.exec("echo out; echo err >&2; exit 3", env={"A": "b c"}, stdin="x")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
        result = await box.exec("cat; echo $A; pwd", env={"A": "b  c"}, stdin="in\n", cwd="/")
        assert result.stdout == "in\nb c\n/\n"
        for _ in range(30):  # a clock may be ended while it is being started
            assert (await box.exec("true", timeout=777)).exit_code == 0
        result = await box.exec("sleep 60", timeout=0.3)
        assert (result.exit_code, result.timed_out) == (137, True)
        result = await box.exec("yes | head -c 3000000")
        assert "[output cut after 51200 bytes; it ends so:]" in result.stdout
        assert len(result.stdout) < 103_000

    in_box(tmp_path, script, shell=shell, output_kb=100)
    assert [p.name for p in tmp_path.glob("miles-*/*")] == []
    assert ended("777.000"), "the clock of a command outlived it"


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=12, deadline=None)
@given(argv=st.lists(words, max_size=4), value=words, stdin=words)
def test_words_arrive_as_they_are(tmp_path_factory, argv, value, stdin) -> None:
    async def script(box):
        printed = ["printf", "%s|", *argv] if argv else ["true"]
        result = await box.exec(printed)
        assert result.stdout == "".join(f"{word}|" for word in argv)
        result = await box.exec(["sh", "-c", 'printf %s "$V"; cat'], env={"V": value}, stdin=stdin)
        assert result.stdout == value + stdin

    in_box(tmp_path_factory.mktemp("box"), script)


def test_long_commands_travel_as_files(tmp_path) -> None:
    async def script(box):
        line = "printf %s " + "x" * 300_000 + " | wc -c"
        assert (await box.exec(line)).stdout.strip() == "300000"
        result = await box.exec(["sh", "-c", 'printf %s "$@" | wc -c', "sh", *["y" * 9000] * 9])
        assert result.stdout.strip() == "81000"
        longest = max(sum(map(len, argv)) for argv in box._machine.lines)
        assert longest < 60_000, "vendors take no longer command lines"

    in_box(tmp_path, script)
    assert [p.name for p in tmp_path.glob("miles-*/*")] == []


def test_command_that_cannot_be_is_a_result(tmp_path) -> None:
    async def script(box):
        result = await box.exec("echo \0")
        assert (result.exit_code, result.stderr) == (126, "a command cannot hold a NUL character")
        assert (await box.exec("printf '\ud800'")).exit_code == 0
        assert (await box.exec("pwd", cwd="no/such")).exit_code != 0
        with pytest.raises(ValueError, match="at least one word"):
            await box.exec([])
        with pytest.raises(ValueError, match="'A=B' cannot be the name"):
            await box.exec("true", env={"A=B": "c"})
        assert (await box.exec(["a=b"], env={"C": "d"})).exit_code == 127

    in_box(tmp_path, script)


@pytest.mark.parametrize("shell", shells())
def test_streams_are_whole_up_to_a_size_and_cut_beyond(shell, tmp_path) -> None:
    """Numbered lines, so that a byte lost, doubled or moved shows."""

    async def script(box):
        for lines in (100, 409, 410, 500, 3000, 60_000):
            whole = "".join(f"{i:04d}\n" for i in range(lines))
            await box.write("lines", whole.encode())
            result = await box.exec("cat lines; cat lines >&2")
            for text in (result.stdout, result.stderr):
                if len(whole) <= 2048:
                    assert text == whole
                    continue
                begin, cut, end = text.partition("\n[output cut after 1024 bytes; it ends so:]\n")
                assert cut and begin == whole[:1024] and end == whole[-1024:]

    in_box(tmp_path, script, shell=shell, output_kb=2)


def test_file_that_is_too_large_is_refused(tmp_path) -> None:
    async def script(box):
        await box.exec("head -c 1048577 /dev/zero > large; head -c 1048576 /dev/zero > fits")
        assert len(await box.read("fits")) == 1 << 20
        with pytest.raises(SandboxError, match=r"'large': .*larger than the 1 MiB .* \(file_mb\)"):
            await box.read("large")
        with pytest.raises(SandboxError, match="1048577 bytes for 'x' are more than the 1 MiB"):
            await box.write("x", bytes(1048577))

    in_box(tmp_path, script, file_mb=1)


def test_configured_environment_reaches_commands_and_gives_way(tmp_path) -> None:
    async def script(box):
        result = await box.exec("echo $A $B", env={"B": "own"})
        assert result.stdout == "a own\n"

    in_box(tmp_path, script, env={"A": "a", "B": "b"})


@pytest.mark.parametrize("shell", shells())
def test_timeout_kills_whatever_tries_to_get_away(shell, tmp_path) -> None:
    away = "(env -i setsid sleep 4711 &); setsid nohup sleep 4711 & env -i sleep 4711"

    async def script(box):
        began = time.monotonic()
        result = await box.exec(f"echo early; {away}", timeout=0.5)
        assert result.timed_out and result.stdout == "early\n" and time.monotonic() - began < 5

    in_box(tmp_path, script, shell=shell)
    assert ended("4711")


@pytest.mark.slow
def test_background_process_goes_on_after_its_command(tmp_path) -> None:
    async def script(box):
        began = time.monotonic()
        result = await box.exec("(sleep 3; echo unheard; echo alive > mark) & echo started")
        assert result.stdout == "started\n" and time.monotonic() - began < 2.5
        async with asyncio.timeout(20):
            while not (tmp_path / "mark").exists():
                await asyncio.sleep(0.1)

    in_box(tmp_path, script)


def test_cancelled_command_is_killed(tmp_path) -> None:
    async def script(box):
        task = asyncio.create_task(box.exec("sleep 4712 & sleep 4712"))
        async with asyncio.timeout(5):
            while len(processes("4712")) < 2:
                await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended("4712")

    in_box(tmp_path, script)


def test_command_that_ruins_its_own_place_is_an_error(tmp_path) -> None:
    async def script(box):
        with pytest.raises(SandboxError, match="gave no result of a command") as caught:
            await box.exec("rm -rf $TMPDIR/miles-*; kill -9 $PPID")
        assert not caught.value.retryable

    in_box(tmp_path, script)


def test_image_without_tools_is_refused(tmp_path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in ("sh", "cat", "mkdir"):
        (bare / tool).symlink_to(shutil.which(tool))

    async def run():
        machine = Here(tmp_path)
        machine.path = str(bare)
        machine.shell = (str(bare / "sh"),)
        await RemoteBox(Nowhere(), machine, RemoteConfig()).prepare()

    with pytest.raises(SandboxError, match=r"the image lacks base64 grep head .*; commands in it"):
        asyncio.run(run())


def test_work_directory_is_made_and_kept_to(tmp_path) -> None:
    async def script(box):
        await box.write("a/b", b"1")
        result = await box.exec("pwd; cat b", cwd="a")
        assert result.stdout == f"{tmp_path}/work/here/a\n1"
        for path in ("", "a\0"):
            with pytest.raises(SandboxError, match="is no path"):
                await box.read(path)

    in_box(tmp_path, script, workdir=f"{tmp_path}/work/here")


def test_script_says_nothing_to_shellcheck() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck here")
    file = Path(__file__).parents[3] / "miles_plugins" / "sandbox" / "run_in_box.sh"
    told = subprocess.run(["shellcheck", "-s", "sh", "-S", "error", file], capture_output=True)
    assert told.returncode == 0, told.stdout.decode()


# ---------------------------------------------------------------- asking again


def asked(faults: list[Exception], **how) -> tuple[str, int]:
    """What `ask` makes of a call that fails so, and then succeeds."""
    left, calls = iter(faults), itertools.count()

    async def call():
        next(calls)
        for fault in left:
            raise fault
        return "done"

    async def run():
        return await ask(Nowhere(), "try", call, **{"limit_s": 5, "attempts": 3, **how})

    try:
        return asyncio.run(run()), next(calls)
    except SandboxError as error:
        return f"{error.retryable} {error}", next(calls)


SOON = Fault(retryable=True, after_s=0.0)
BUSY = Fault(retryable=True, refused=True, after_s=0.0)


def test_asking_again_only_while_it_may_help() -> None:
    assert asked([Exception(SOON)] * 2) == ("done", 3)
    assert asked([Exception(SOON)] * 3)[0].startswith("True sandbox nowhere: cannot try: Exception")
    assert asked([Exception(Fault())])[1] == 1
    assert asked([KeyError("k")])[0] == "False sandbox nowhere: cannot try: KeyError: 'k'"


def test_what_must_not_happen_twice_is_only_repeated_when_refused() -> None:
    assert asked([Exception(SOON)], only_refused=True)[1] == 1
    assert asked([Exception(BUSY)], only_refused=True) == ("done", 2)


def test_time_limit_has_a_name() -> None:
    async def run():
        await ask(Nowhere(), "wait", lambda: asyncio.sleep(9), limit_s=0.05, attempts=1)

    with pytest.raises(SandboxError, match=r"cannot wait: no answer within 0.05 s") as caught:
        asyncio.run(run())
    assert caught.value.retryable


@given(number=st.integers(1, 40), after=st.none() | st.floats(0, 1e6))
def test_pauses_grow_and_are_bounded(number, after) -> None:
    wait = pause(number, Fault(retryable=True, after_s=after))
    if after is None:
        longest = min(0.5 * 2 ** (number - 1), 30.0)
        assert longest / 2 <= wait <= longest
    else:
        assert min(after, 120.0) <= wait <= min(after, 120.0) + 0.5


# ---------------------------------------------------------------- opening


class Elsewhere(RemoteSandbox):
    """A sandbox over `Here`."""

    name, package, extra, boxes = "elsewhere", "json", "elsewhere", "json"
    lost = 0

    @classmethod
    def missing(cls, config):
        return []

    def provider(self):
        return _Folders(self)


class _Folders(Nowhere):
    def __init__(self, owner) -> None:
        super().__init__()
        self.owner = owner
        self.labels: dict[str, dict[str, str]] = {}

    async def create(self, labels):
        machine = Here(self.owner.folder)
        machine.id = f"box-{len(self.labels)}"
        self.labels[machine.id] = dict(labels)
        if self.owner.lost:
            self.owner.lost -= 1
            raise TimeoutError
        return machine

    async def find(self, labels):
        return [
            Found(id=id, labels=own)
            for id, own in self.labels.items()
            if labels.items() <= own.items()
        ]

    async def delete(self, id):
        self.labels.pop(id, None)


def test_boxes_carry_run_owner_and_task(tmp_path) -> None:
    async def run():
        sandbox = Elsewhere(RemoteConfig(), Context(directory=tmp_path / "my run"))
        sandbox.folder, sandbox.lost = tmp_path, 1
        box = await sandbox.open(Task(id="ünïcode/7", prompt=""))
        (listed,) = await sandbox.list()
        assert listed.id == box.id == "box-0" or listed.id == box.id
        assert (listed.run, listed.owner) == ("my-run", process_identity())
        assert listed.task == "-n-code-7" and abs(listed.created - time.time()) < 30
        await box.close()
        assert await sandbox.list() == []

    asyncio.run(run())


def test_box_that_cannot_be_prepared_is_deleted(tmp_path, caplog) -> None:
    async def run():
        sandbox = Elsewhere(RemoteConfig(workdir="/proc/no"), Context(directory=tmp_path))
        sandbox.folder = tmp_path
        with pytest.raises(SandboxError, match="lacks the directory /proc/no"):
            await sandbox.open(Task(id="t", prompt=""))
        assert await sandbox.list() == []

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_refused_values_are_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="sandbox elsewhere: attempts: 0 is not above 0"):
        Elsewhere(RemoteConfig(attempts=0), Context(directory=tmp_path))
