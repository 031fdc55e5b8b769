"""What a box of the `process` sandbox holds back. Every test here is an attempt to get out, or to
take more than is given."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from miles import Context, SandboxError, Task, process_alive
from miles_plugins.sandbox.labels import running
from miles_plugins.sandbox.process import Process
from miles_plugins.sandbox.process.bubblewrap import faults

pytestmark = pytest.mark.skipif(bool(faults()), reason="; ".join(faults()))

TASK = Task(id="escape", prompt="")


@asynccontextmanager
async def boxes(tmp_path: Path, number: int = 1, **config):
    sandbox = Process(Process.Config(**config), Context(directory=tmp_path))
    opened = await asyncio.gather(*(sandbox.open(TASK) for _ in range(number)))
    try:
        yield opened if number > 1 else opened[0]
    finally:
        await asyncio.gather(*(box.close() for box in opened))
        await sandbox.close()


def says(tmp_path: Path, *commands, timeout=20.0, **config):
    """Results of commands, run in order in one box."""

    async def run():
        async with boxes(tmp_path, **config) as box:
            return [await box.exec(each, timeout=timeout) for each in commands]

    return asyncio.run(run())


# ---------------------------------------------------------------- reading what is the host's


def test_box_reads_no_host_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    secret.chmod(0o644)
    paths = [secret, tmp_path, "/root", "/home", "/etc/shadow", "/var", "/run", "/boot", "/sys"]
    results = says(tmp_path, *(["ls", str(path)] for path in paths), f"cat {secret}", "ls /tmp")
    for path, result in zip([*paths, secret], results[:-1], strict=True):
        assert result.exit_code != 0, f"{path}: {result.stdout}"
        assert "No such file" in result.stderr
    assert results[-1].stdout == ""


def test_box_sees_another_box_neither_in_files_nor_processes(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path, 2) as (one, two):
            await one.write("/tmp/secret", b"1")
            await one.write("secret", b"1")
            sleeping = asyncio.create_task(one.exec("sleep 4242", timeout=0.4))
            await asyncio.sleep(0.1)
            found = await two.exec("cat /tmp/secret secret; cat /proc/*/cmdline | tr '\\0' ' '")
            await sleeping
            return found

    found = asyncio.run(run())
    assert found.stderr.count("No such file") == 2
    assert "4242" not in found.stdout


def test_box_has_the_rights_of_nobody_and_gains_none(tmp_path: Path) -> None:
    status, raised, name = says(
        tmp_path,
        "grep -E 'Uid|CapEff|CapBnd|NoNewPrivs' /proc/self/status",
        "setpriv --reuid 0 id",
        "whoami",
    )
    assert "Uid:\t65534\t65534\t65534\t65534" in status.stdout
    assert "CapEff:\t0000000000000000" in status.stdout
    assert "NoNewPrivs:\t1" in status.stdout
    assert raised.exit_code != 0
    assert name.stdout == "nobody\n"


def test_box_system_is_read_only(tmp_path: Path) -> None:
    places = "/usr /usr/bin /usr/lib /bin /lib /etc /dev /proc/sys/kernel"
    results = says(
        tmp_path,
        *(f"echo x > {place}/miles-escape" for place in places.split()),
        "mv /etc /etc2 || mv /bin /bin2 || rm /etc/passwd",
        "echo x > /etc/ld.so.preload || echo 1 > /proc/sys/kernel/hostname",
        "mount -t tmpfs none /usr || umount /usr || unshare -rm true",
    )
    assert all(result.exit_code != 0 for result in results), results


def test_box_environment_holds_no_keys_of_the_host(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-host")
    command = "env; cat /proc/*/environ | tr '\\0' '\\n'"
    seen, python = says(
        tmp_path,
        command,
        ["python3", "-c", "import os; print(dict(os.environ))"],
        env={"GIVEN": "yes"},
    )
    for result in (seen, python):
        assert "sk-of-the-host" not in result.stdout
        assert "GIVEN" in result.stdout
    names = {line.split("=")[0] for line in seen.stdout.splitlines()}
    assert names == {"PATH", "HOME", "LANG", "USER", "GIVEN", "PWD", "OLDPWD"} - {"OLDPWD"}


# ---------------------------------------------------------------- the network


def test_box_has_no_network_but_its_own_loopback(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
def attempt(what):
    try:
        what()
        return "reached"
    except OSError as error:
        return type(error).__name__
def dial(where):
    socket.create_connection(where, timeout=2).close()
own = socket.create_server(("127.0.0.1", 0))
print(attempt(lambda: dial(("127.0.0.1", {port}))))
print(attempt(lambda: dial(("1.1.1.1", 53))))
print(attempt(lambda: socket.getaddrinfo("example.com", 443)))
print(attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)))
print(attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)))
print(attempt(lambda: dial(own.getsockname())))
"""
        (result,) = says(tmp_path, ["python3", "-c", code])
    assert result.stderr == ""
    assert result.stdout.split() == [
        "ConnectionRefusedError",
        "OSError",
        "gaierror",
        "OSError",
        "OSError",
        "reached",
    ]


def test_box_does_not_reach_abstract_sockets_of_the_host(tmp_path: Path) -> None:
    name = f"\0miles-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        (result,) = says(tmp_path, ["python3", "-c", code])
    assert "ConnectionRefusedError" in result.stderr


# ---------------------------------------------------------------- taking too much


FORK = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
FORK_AWAY = FORK.replace("os.fork()", "os.fork() or os.setsid()")
FORK_AND_COUNT = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(9)
        made += 1
except OSError:
    print(made)
"""


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param("f() { f | f & }; f; sleep 30", id="shell", marks=pytest.mark.slow),
        pytest.param(["python3", "-c", FORK], id="python", marks=pytest.mark.slow),
        pytest.param(["python3", "-c", FORK_AWAY], id="sessions"),
    ],
)
def test_box_survives_a_fork_bomb(tmp_path: Path, bomb) -> None:
    async def run():
        async with boxes(tmp_path, processes=40) as box:
            result = await box.exec(bomb, timeout=0.7)
            return result, await box.exec("ls /proc | grep -c '^[0-9]'", timeout=20)

    result, after = asyncio.run(run())
    assert result.timed_out
    assert int(after.stdout) <= 5, f"processes of the bomb are left: {after}"


@pytest.mark.slow
def test_box_counts_its_processes_for_itself(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path, 2, processes=20) as both:
            counting = (box.exec(["python3", "-c", FORK_AND_COUNT], timeout=9) for box in both)
            return await asyncio.gather(*counting)

    for result in asyncio.run(run()):
        assert 15 <= int(result.stdout or "0") < 20, result


@pytest.mark.slow
def test_box_disk_is_bounded(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path, disk_mb=8, file_mb=4) as box:
            one = await box.exec("dd if=/dev/zero of=big bs=1M count=6")
            many = await box.exec(
                "for i in 1 2 3; do dd if=/dev/zero of=/tmp/f$i bs=1M count=3; done"
            )
            used = await box.exec(
                "du -sm --exclude=/proc / 2>/dev/null | cut -f1; df -m / | tail -1"
            )
            shared = await box.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=40")
            with pytest.raises(SandboxError, match="cannot write 'more': No space left"):
                await box.write("more", b"x" * (4 << 20))
            with pytest.raises(SandboxError, match="are more than the 4194304"):
                await box.write("more", b"x" * (5 << 20))
            await box.exec("rm -f /tmp/f* big more")
            await box.write("fits", b"x" * (4 << 20))
            return one, many, used, shared

    one, many, used, shared = asyncio.run(run())
    assert one.exit_code != 0 and many.exit_code != 0 and shared.exit_code != 0
    assert "No space left" in many.stderr
    assert " 8 " in used.stdout.replace("\t", " ")


def test_box_number_of_files_is_bounded(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path, files=300) as box:
            code = "import itertools\nfor i in itertools.count(): open(f'f{i}', 'w').close()"
            killed = await box.exec(["python3", "-c", code], timeout=20)
            cleared = await box.exec("find . -name 'f*' -delete; ls | wc -l", timeout=20)
            return killed, cleared

    killed, cleared = asyncio.run(run())
    assert killed.exit_code == 137 and not killed.timed_out
    assert "killed: it made more than 300 files" in killed.stderr
    assert cleared.stdout.strip() == "0", cleared


SHARED = """
import mmap
memory = mmap.mmap(-1, 400 << 20)
for _ in range(400):
    memory.write(bytes(1 << 20))
"""
SEVERAL = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = b"1" * (50 << 20)
        time.sleep(9)
time.sleep(9)
"""


@pytest.mark.parametrize(
    ("code", "says_so"),
    [
        ("x = bytearray(400 << 20)", "MemoryError"),
        (SHARED, "killed: its processes held more than 100 MiB"),
        (SEVERAL, "killed: its processes held more than 100 MiB"),
        ("import os; os.memfd_create('x')", "Operation not permitted"),
    ],
    ids=["one process", "shared", "several processes", "unaccounted"],
)
def test_box_memory_is_bounded(tmp_path: Path, code: str, says_so: str) -> None:
    result, after = says(tmp_path, ["python3", "-c", code], "echo alive", memory_mb=100)
    assert result.exit_code != 0 and not result.timed_out
    assert says_so in result.stderr
    assert after.stdout == "alive\n"


@pytest.mark.slow
def test_box_computing_time_is_bounded(tmp_path: Path) -> None:
    began = time.monotonic()
    (result,) = says(tmp_path, "while :; do :; done", cpu_s=1)
    assert result.exit_code in (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
    assert not result.timed_out and time.monotonic() - began < 15


# ---------------------------------------------------------------- the supervisor


def test_box_cannot_kill_stop_or_read_its_supervisor(tmp_path: Path) -> None:
    peek = """
import os
for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd", "/proc/1/maps", "/proc/1/cwd/x"):
    try:
        open(path, "rb").read(1) if path[-2:] != "fd" else os.listdir(path)
        print("read", path)
    except OSError as error:
        print(type(error).__name__)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, 0, 0), libc.prctl(36, 0, 0, 0, 0))
"""
    results = says(
        tmp_path,
        "kill -9 1; kill -STOP 1; kill -INT 1; kill -TERM 1; kill -CHLD 1; kill -HUP 1; echo still",
        "kill -9 -1; echo never mind",
        ["python3", "-c", peek],
        "echo alive",
    )
    assert results[0].stdout == "still\n"
    assert results[2].stderr == "" and "read" not in results[2].stdout
    assert results[2].stdout.endswith("-1 -1\n")
    assert results[3].stdout == "alive\n"


@pytest.mark.parametrize(
    "command",
    [
        "ls /proc/self/fd | wc -w",
        ["python3", "-c", "import os; print(len(os.listdir('/proc/self/fd')))"],
    ],
)
def test_command_inherits_three_descriptors(tmp_path: Path, command) -> None:
    (result,) = says(tmp_path, command)
    assert int(result.stdout) == 4  # and the one that lists them


def test_command_that_shuts_out_its_parent_is_killed_with_its_time(tmp_path: Path) -> None:
    code = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            for fd in range(3):
                os.close(fd)
            while True:
                with open("/work/ticks", "a") as file:
                    file.write("x")
                time.sleep(0.02)
        os._exit(0)
time.sleep(60)
"""

    async def run():
        async with boxes(tmp_path) as box:
            result = await box.exec(["python3", "-c", code], timeout=0.5)
            await asyncio.sleep(0.1)
            one = await box.read("ticks")
            await asyncio.sleep(0.2)
            return result, one, await box.read("ticks")

    result, one, two = asyncio.run(run())
    assert result.timed_out and one and one == two


@pytest.mark.slow
def test_background_process_lives_on_and_can_write(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path) as box:
            line = "(while :; do echo noise; echo x >> ticks; sleep 0.02; done) & echo started"
            result = await box.exec(line, timeout=5.0)
            await asyncio.sleep(0.2)
            one = len(await box.read("ticks"))
            await asyncio.sleep(0.2)
            two = len(await box.read("ticks"))
            again = await box.exec("sleep 30", timeout=0.1)  # kills its own tree alone
            await asyncio.sleep(0.2)
            return result, one, two, again, len(await box.read("ticks"))

    result, one, two, again, three = asyncio.run(run())
    assert result.stdout.startswith("started") or "started\n" in result.stdout
    assert not result.timed_out and again.timed_out
    assert 0 < one < two < three


def test_halt_ends_what_was_left_behind_and_keeps_files(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path) as box:
            line = "(setsid sh -c 'while :; do echo x >> ticks; sleep 0.02; done' &) ; sleep 0.1"
            await box.exec(line)
            busy = asyncio.create_task(box.exec("sleep 30"))
            await asyncio.sleep(0.1)
            await box.halt()
            one = await box.read("ticks")
            await asyncio.sleep(0.2)
            left = await box.exec("ls /proc | grep -c '^[0-9]'")
            return await busy, one, await box.read("ticks"), left

    busy, one, two, left = asyncio.run(run())
    assert busy.exit_code == 137 and not busy.timed_out
    assert one and one == two
    assert int(left.stdout) <= 4


def test_halt_of_a_box_in_which_nothing_runs_is_no_failure(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path) as box:
            await box.halt()
            await box.exec("true")
            await box.halt()
            return await box.exec("echo alive")

    assert asyncio.run(run()).stdout == "alive\n"


_LIMITING = """
import os, resource
for name in ("NOFILE", "AS", "CPU", "FSIZE", "NPROC"):
    try:
        resource.prlimit(1, getattr(resource, "RLIMIT_" + name), (1, 1))
        print(name, "was set")
    except PermissionError:
        pass
for what in (lambda: os.sched_setaffinity(1, {0}),
             lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))):
    try:
        what()
        print("it was scheduled")
    except PermissionError:
        pass
resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))
"""


def test_escape_by_limits_on_the_supervisor(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path) as box:
            tried = await box.exec(["python3", "-c", _LIMITING])
            await box.write("x", b"kept")
            return tried, await box.read("x")

    tried, kept = asyncio.run(run())
    assert (tried.stdout, tried.stderr, tried.exit_code) == ("", "", 0) and kept == b"kept"


def test_old_kernel_is_warned_about(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.4.0-1-generic")
    Process(Process.Config(processes=9), Context(directory=tmp_path))
    assert "sandbox.processes=9 holds for all of them at once" in caplog.text


# ---------------------------------------------------------------- paths


def test_read_and_write_see_what_the_box_sees(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("of the host")
    own_passwd = Path("/etc/passwd").read_bytes()

    async def run():
        async with boxes(tmp_path) as box:
            await box.exec(
                f"ln -s /etc/shadow shadow; ln -s {victim} victim; ln -s / root; mkfifo fifo; "
                f"ln -s /proc/1/environ environ; ln -s /etc/passwd passwd; mkdir -p {tmp_path}"
            )
            refused = (
                "shadow", "victim", "root", "root/root/.ssh", "../../root/x", "fifo", "environ",
                "/dev/zero", "/dev/stdin", "/proc/self/mem", "/proc/1/mem", "", ".", "no\0body",
                f"../../../../..{victim}", "victim/x",
            )  # fmt: skip
            for path in refused:
                with pytest.raises(SandboxError, match="cannot read"):
                    print(path, await box.read(path))
            passwd = await box.read("../../../etc/passwd")
            assert passwd == await box.read("passwd")
            assert passwd != own_passwd
            for path in ("root/usr/x", "/etc/passwd", "passwd", "fifo", "/dev/null", "/proc/x"):
                with pytest.raises(SandboxError, match="cannot write"):
                    await box.write(path, b"x")
            await box.write("victim", b"of the box")  # the link leads to the box's own folder
            assert await box.read(str(victim)) == b"of the box"

    asyncio.run(run())
    assert victim.read_text() == "of the host"


# ---------------------------------------------------------------- ends


def of_run(name: str):
    return [(pid, info) for pid, info in running("process") if info.run == name]


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    async def run():
        async with boxes(tmp_path, 3) as opened:
            await asyncio.gather(*(box.exec("setsid sleep 4343 & sleep 0.1") for box in opened))
            assert len(of_run(tmp_path.name)) == 3

    asyncio.run(run())
    assert not of_run(tmp_path.name)
    assert "sleep\x004343" not in everybody()


def everybody() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


RUN = """
import asyncio, sys
from pathlib import Path
from miles import Context, Task
from miles_plugins.sandbox.{module} import {name}
async def main():
    sandbox = {name}({name}.Config({more}), Context(directory=Path(sys.argv[1])))
    boxes = [await sandbox.open(Task(id="t", prompt="")) for _ in range(2)]
    for box in boxes:
        await box.exec("setsid sleep 4444 & sleep 0.1")
    print("open", flush=True)
    await boxes[0].exec("sleep 4444")
asyncio.run(main())
"""


@pytest.mark.slow
def test_nothing_is_left_after_the_run_is_killed(tmp_path: Path) -> None:
    code = RUN.format(module="process", name="Process", more="pool=1")
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout.readline() == "open\n"
    opened = of_run(tmp_path.name)
    assert len(opened) >= 2 and all(process_alive(info.owner) for _, info in opened)
    run.kill()
    run.wait()
    until = time.monotonic() + 10
    while of_run(tmp_path.name) or "sleep\x004444" in everybody():
        assert time.monotonic() < until, of_run(tmp_path.name)
        time.sleep(0.05)


def test_box_lives_as_long_as_the_thread_that_opened_it(tmp_path: Path) -> None:
    """Boxes opened by a loop in a thread of its own work like any other."""
    said = []
    thread = threading.Thread(target=lambda: said.extend(says(tmp_path, "echo hi")))
    thread.start()
    thread.join(30)
    assert [result.stdout for result in said] == ["hi\n"]


# ---------------------------------------------------------------- what must be there


def test_without_bubblewrap_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = "needs bubblewrap, which is not installed; install it: apt-get install bubblewrap"
    assert wanted in faults()[0]
    assert any(wanted in fault for fault in Process.check(Process.Config(), None))
    with pytest.raises(SandboxError, match=wanted):
        says(tmp_path, "true")


def test_box_that_cannot_be_started_for_want_of_descriptors_is_an_error(
    tmp_path: Path, no_descriptors
) -> None:
    sandbox = Process(Process.Config(), Context(directory=tmp_path))

    async def run() -> None:
        await (await sandbox.open(TASK)).close()
        with no_descriptors():
            await sandbox.open(TASK)

    with pytest.raises(SandboxError, match=r"cannot start a box: \[Errno 24\] Too many open files"):
        asyncio.run(run())


def test_bubblewrap_that_cannot_be_run_is_a_fault(tmp_path: Path, monkeypatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert faults() == [f"cannot run {broken} --version: [Errno 8] Exec format error: '{broken}'"]


def test_old_bubblewrap_is_refused_with_its_version(tmp_path: Path, monkeypatch) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert faults() == [f"needs bubblewrap 0.8 or later; {old} is 0.6.1"]


def test_kernel_that_forbids_namespaces_is_explained(tmp_path: Path, monkeypatch) -> None:
    real = shutil.which("bwrap")
    deny = tmp_path / "bwrap"
    said = "bwrap: Creating new namespace failed: Operation not permitted"
    deny.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\necho "{said}" >&2\nexit 1\n'
    )
    deny.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # nobody may not look into the folder
    with pytest.raises(SandboxError, match=said) as raised:
        says(tmp_path, "true")
    assert "kernel.apparmor_restrict_unprivileged_userns" in raised.value.detail


def test_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="the interpreter /usr/bin/no-python does not run"):
        says(tmp_path, "true", python="/usr/bin/no-python")


def test_values_that_make_no_sense_are_faults() -> None:
    config = Process.Config(memory_mb=0, pool=-1, read_only=("relative",))
    assert Process.check(config, None)[:3] == [
        "memory_mb: 0 is not above 0",
        "pool: -1 is below 0",
        "read_only: there is no 'relative', or it is no full path",
    ]


def test_read_only_folders_are_shown(tmp_path: Path) -> None:
    shown = Path("/usr/share") if os.geteuid() else Path("/opt")
    result, refused = says(
        tmp_path, ["ls", str(shown)], f"touch {shown}/x", read_only=(str(shown),)
    )
    assert set(result.stdout.split()) == {p.name for p in shown.iterdir() if p.name[0] != "."}
    assert refused.exit_code != 0


def test_pool_gives_each_box_once(tmp_path: Path) -> None:
    async def run():
        sandbox = Process(Process.Config(pool=2), Context(directory=tmp_path))
        opened = [await sandbox.open(TASK) for _ in range(4)]
        assert len({box.id for box in opened}) == 4
        assert len(of_run(tmp_path.name)) >= 4
        await opened[0].write("x", b"")
        with pytest.raises(SandboxError, match="cannot read 'x': No such file"):
            await opened[1].read("x")
        await asyncio.gather(*(box.close() for box in opened))
        await sandbox.close()
        with pytest.raises(SandboxError, match="the sandbox is closed"):
            await sandbox.open(TASK)

    asyncio.run(run())
    assert not of_run(tmp_path.name)


def test_pool_replaces_a_box_that_ended_while_it_waited(tmp_path: Path) -> None:
    async def run():
        sandbox = Process(Process.Config(pool=1), Context(directory=tmp_path))
        first = await sandbox.open(TASK)
        while len(waiting := [i for _, i in of_run(tmp_path.name) if i.id != first.id]) < 1:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        await sandbox.remove(waiting[0].id)
        second = await sandbox.open(TASK)
        result = await second.exec("echo hi")
        await asyncio.gather(first.close(), second.close(), sandbox.close())
        return result

    assert asyncio.run(run()).stdout == "hi\n"
