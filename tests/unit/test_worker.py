"""Worker processes: one registry builds them, errors come back, none outlives its driver."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles import ConfigError, Context, PluginVersionError, Settings, Spec, WorkerError
from miles.identity import process_identity
from miles.plugins import Registry

PLUGIN = '''
"""A precision and a selector with odd methods, to look at workers with."""
import asyncio, os, time, weakref
from dataclasses import dataclass
import numpy as np
from miles import Budget, ConfigError


living = weakref.WeakSet()


class Odd:
    """Answers calls in all the ways there are, and holds on to itself."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        size: int = 3
        """How long an array."""

    @classmethod
    def variables(cls, config):
        return {"ODD_SIZE": str(config.size)}

    def __init__(self, config, context):
        self.config, self.context = config, context
        self.size_said = os.environ["ODD_SIZE"]
        self.itself = self
        living.add(self)
        self.master = self.compute = self.engine = self.export = "float32"
        self.residual = self.logits = "float32"
        self.budget = Budget(max=1.0, mean=1.0)
        self.scaling = None

    async def stubborn(self):
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)
            raise

    def fingerprint(self): return "odd"
    def living(self): return len(living)
    def said(self): return self.size_said
    def array(self, x): return np.full(self.config.size, x, np.int32)
    def master_of(self): return self.context.master
    def where(self): return [os.getpid(), self.context.rank, self.context.world]
    def config_error(self): raise ConfigError("odd.size: 3 is odd")
    def bug(self): return {}["missing"]
    def sleep(self, s): time.sleep(s)
    def die(self): os._exit(3)
    async def wait(self, s): await asyncio.sleep(s); return s


miles_components = {"precision": {"odd": Odd}}
'''


def run(tmp_path: Path, body: Any, *, silent_after_s: float = 60.0, **config: Any) -> Any:
    """Run `body(handle, runtime)` with one worker that holds an `odd` precision."""
    plugin = tmp_path / "odd_plugin.py"
    plugin.write_text(PLUGIN)
    registry = Registry.load(files=[plugin])
    context = Context(
        directory=tmp_path,
        settings=Settings(silent_after_s=silent_after_s),
        plugins={"selection": registry.selection, "provenance": registry.provenance()},
    )
    runtime = registry.build(Spec(kind="runtime", name="local", config=config), context)

    async def main() -> Any:
        try:
            parts = [Spec(kind="precision", name="odd", config={"size": 5})]
            handle = await runtime.start("odd", parts, context, world=config.pop("world", 1))
            return await body(handle, runtime, context)
        finally:
            await runtime.stop()

    return asyncio.run(main())


def test_worker_answers_and_errors_come_back(tmp_path: Path) -> None:
    async def body(handle: Any, runtime: Any, context: Context) -> None:
        assert (await handle.call("precision.array", 7)).tolist() == [7] * 5
        assert await handle.call("precision.said") == "5"
        slow = asyncio.create_task(handle.call("precision.sleep", 0.5))
        await asyncio.sleep(0)
        ((owed, seconds),) = handle.owed()
        assert owed == "precision.sleep" and 0 <= seconds < 0.4
        began = time.monotonic()
        assert await handle.call("precision.wait", 0.01) == 0.01  # coroutines pass a busy thread
        assert time.monotonic() - began < 0.4
        await slow
        with pytest.raises(ConfigError, match=r"odd\.size: 3 is odd"):
            await handle.call("precision.config_error")
        with pytest.raises(WorkerError, match="odd: KeyError: 'missing'") as caught:
            await handle.call("precision.bug")
        assert "in bug" in caught.value.detail
        with pytest.raises(WorkerError, match="no part 'trainer'"):
            await handle.call("trainer.step")
        with pytest.raises(WorkerError, match=r"precision\.wait did not answer within 0\.05 s"):
            await handle.call("precision.wait", 5, timeout=0.05)
        with pytest.raises(WorkerError, match=r"precision\.stubborn did not answer"):
            await handle.call("precision.stubborn", timeout=0.05)
        parts = [Spec(kind="precision", name="odd", config={"size": 2})]
        await runtime.rebuild(handle, parts, context)
        assert len(await handle.call("precision.array", np.int32(1))) == 2
        assert await handle.call("precision.said") == "2"  # a variable, there when it was built
        assert await handle.call("precision.living") == 1  # or a stage would hold its last one's

    run(tmp_path, body)


def test_ranks_meet_at_a_file_of_their_own_that_ends_with_the_runtime(tmp_path: Path) -> None:
    """A port found free by the driver may be taken before rank 0 listens on it."""
    seen: list[str] = []

    async def body(handle: Any, runtime: Any, context: Context) -> None:
        assert await handle.call("precision.master_of") == ""  # alone, it meets nobody
        parts = [Spec(kind="precision", name="odd")]
        pair = await runtime.start("pair", parts, context, world=2)
        for _ in range(2):
            first, second = await pair.call_all("precision.master_of")
            assert first == second and first.startswith("file:///") and first not in seen
            seen.append(first)
            await runtime.rebuild(pair, parts, context)
        assert Path(first.removeprefix("file://")).parent.is_dir()

    run(tmp_path, body)
    assert not any(Path(master.removeprefix("file://")).parent.exists() for master in seen)


def test_worker_holds_a_port_of_one_address_for_ranks_to_meet(tmp_path: Path) -> None:
    async def body(handle: Any, runtime: Any, context: Context) -> None:
        pid = (await handle.call("precision.where"))[0]
        assert await handle.call("worker.identity") == process_identity(pid)
        port, descriptor = await handle.call("worker.meeting", "127.0.0.1")
        link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        assert link.startswith("socket:[")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):  # nobody listens there yet
            socket.create_connection(("127.0.0.1", port))
        again, _ = await handle.call("worker.meeting", "127.0.0.1")
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))  # the one before is free
        assert again != port

    run(tmp_path, body)


def test_worker_death_fails_open_calls_with_its_name(tmp_path: Path) -> None:
    async def body(handle: Any, runtime: Any, context: Context) -> None:
        waiting = asyncio.create_task(handle.call("precision.wait", 60))
        with pytest.raises(WorkerError, match=r"odd: the worker process ended \(exit code 3\)"):
            await handle.call("precision.die")
        with pytest.raises(WorkerError, match="exit code 3"):
            await waiting
        with pytest.raises(WorkerError, match=r"cannot answer precision\.array"):
            await handle.call("precision.array", 1)

    run(tmp_path, body)


@pytest.mark.slow
def test_worker_hung_is_noticed_by_its_silence(tmp_path: Path) -> None:
    async def body(handle: Any, runtime: Any, context: Context) -> None:
        pid = (await handle.call("precision.where"))[0]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"odd: the worker process sent nothing for"):
            await handle.call("precision.array", 1)

    run(tmp_path, body, silent_after_s=5.0, stop_timeout_s=0.5)


def test_worker_refuses_other_plugins_than_the_drivers(tmp_path: Path) -> None:
    async def body(handle: Any, runtime: Any, context: Context) -> None:
        (tmp_path / "odd_plugin.py").write_text(PLUGIN + "\n# changed\n")
        with pytest.raises(
            PluginVersionError, match="other: plugins differ from the driver's"
        ) as e:
            await runtime.start("other", [], context)
        assert "odd_plugin" in str(e.value)

    run(tmp_path, body)


def test_worker_processes_end_with_a_killed_driver(tmp_path: Path) -> None:
    """SIGKILL gives the driver no chance to stop anything."""
    plugin = tmp_path / "odd_plugin.py"
    plugin.write_text(PLUGIN)
    script = f"""
import asyncio
from pathlib import Path
from miles import Context, Spec
from miles.plugins import Registry
registry = Registry.load(files=[{str(plugin)!r}])
context = Context(directory=Path({str(tmp_path)!r}), plugins={{"selection": registry.selection}})
async def main():
    runtime = registry.build(Spec(kind="runtime", name="local"), context)
    handle = await runtime.start("odd", [Spec(kind="precision", name="odd")], context, world=2)
    print(*[(await handle.call("precision.where", rank=r))[0] for r in (0, 1)], flush=True)
    await handle.call("precision.sleep", 60)
asyncio.run(main())
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(p) for p in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 5
    while any(_alive(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(p) for p in pids)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
