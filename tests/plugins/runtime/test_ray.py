"""Workers on a Ray cluster: the contract, places, deaths, and the numbers of a local run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles import ConfigError, Context, Settings, Spec, WorkerError
from miles.plugins import Registry
from miles.testing import contract
from miles_plugins.runtime.ray import Ray

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

PLUGIN = '''
"""Components that only say where they are."""
import os, time
from dataclasses import dataclass


class Where:
    def __init__(self, config, context):
        self.context = context

    def where(self):
        devices = os.environ["CUDA_VISIBLE_DEVICES"]
        return [devices, self.context.rank, self.context.master]


class Trainer(Where):
    """Trains nothing."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        workers: int = 1
        """Ranks."""

    version = 0

    def meet(self):
        from miles_plugins.trainer.fsdp.ranks import join
        ranks = join(self.context, "cpu")
        import torch
        return ranks.add(torch.ones(1)).item()

    def step(self, batch): raise NotImplementedError
    def logprobs(self, tokens, source): raise NotImplementedError
    def export(self): raise NotImplementedError
    def save(self, directory, *, weights_only=False): raise NotImplementedError
    def load(self, directory, *, weights_only=False): raise NotImplementedError
    def sleep(self): raise NotImplementedError
    def wake(self): raise NotImplementedError
    def bug(self): return {}["missing"]
    def hang(self): time.sleep(1000)


class Engine(Where):
    """Samples nothing."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        workers: int = 1
        """Engines."""

    samples = True

    async def generate(self, request): raise NotImplementedError
    async def score(self, tokens): raise NotImplementedError
    async def abort(self, keys=None): raise NotImplementedError
    async def pause(self): raise NotImplementedError
    async def resume(self): raise NotImplementedError
    async def load(self, version, weights): raise NotImplementedError
    async def version(self): return 0
    async def health(self): raise NotImplementedError
    async def sleep(self): raise NotImplementedError
    async def wake(self): raise NotImplementedError


class Transport(Where):
    """Moves nothing."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing."""

    def sender(self, trainer): return self
    def receiver(self, engine): return self
    async def publish(self, version, *, trainer, engines): raise NotImplementedError


miles_components = {
    "trainer": {"odd": Trainer}, "engine": {"odd": Engine}, "transport": {"odd": Transport},
}
'''


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Registry, Context]:
    """A registry with components that say where they are, and a context."""
    plugin = tmp_path / "odd_plugin.py"
    plugin.write_text(PLUGIN)
    registry = Registry.load(files=[plugin])
    plugins = {"selection": registry.selection, "provenance": registry.provenance()}
    return registry, Context(directory=tmp_path, settings=Settings(), plugins=plugins)


def play(odd: tuple[Registry, Context], address: str, body: Any, **config: Any) -> Any:
    """Run `body(runtime, context)` with a runtime on the cluster."""
    registry, context = odd
    spec = Spec(kind="runtime", name="ray", config={"address": address, **config})
    runtime = registry.build(spec, context)

    async def main() -> Any:
        try:
            return await body(runtime, context)
        finally:
            await runtime.stop()

    return asyncio.run(main())


def parts(*kinds: str, **config: Any) -> list[Spec]:
    return [Spec(kind=kind, name="odd", config=config) for kind in kinds]


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("check", contract.checks("runtime"), ids=lambda check: check.name)
def test_ray_keeps_the_contract(
    check: Any, ray_cluster: str, miles_registry: Any, miles_context: Context
) -> None:
    config = {"address": ray_cluster}
    contract.run(check, "runtime", "ray", miles_registry, config=config, context=miles_context)


# ---------------------------------------------------------------- places


def test_ranks_and_engines_get_their_places_and_devices(odd: Any, ray_cluster: str) -> None:
    """Two ranks on each of two nodes would need four GPUs; two are there, one a rank."""

    async def body(runtime: Any, context: Context) -> None:
        trainer = await runtime.start("trainer", parts("trainer"), context, world=2)
        assert sorted(trainer.ranks[rank].bind for rank in (0, 1)) == ["127.0.0.1", "127.0.0.2"]
        assert await trainer.call_all("trainer.meet") == [2.0, 2.0]  # over both addresses
        first, second = await trainer.call_all("trainer.where")
        assert first[2].startswith(f"{trainer.bind}:") and "?listen_fd=" in first[2]
        assert second[2] == first[2].partition("?")[0] and [first[1], second[1]] == [0, 1]
        assert first[0] and second[0]
        names = ("engine-0", "engine-1")
        engines = [await runtime.start(n, parts("engine", "transport"), context) for n in names]
        assert sorted(engine.bind for engine in engines) == ["127.0.0.1", "127.0.0.2"]
        reserved = [(await engine.call("engine.where"))[0] for engine in engines]
        assert all(len(devices) == 1 for devices in reserved)
        with pytest.raises(
            WorkerError, match=r"no room for engine-2 \(1 x 1 CPUs, 1 GPUs\) within"
        ):
            await runtime.start("engine-2", parts("engine", "transport"), context)
        # what is started again finds its place free
        await runtime.end(engines[0])
        again = await runtime.start(names[0], parts("engine", "transport"), context)
        assert again.bind == engines[0].bind

    share = {"per_node": 1, "gpus": 1}
    play(odd, ray_cluster, body, trainer=share, engine=share, place_timeout_s=2.0)


def test_colocated_engines_see_the_devices_of_the_ranks(odd: Any, ray_cluster: str) -> None:
    async def body(runtime: Any, context: Context) -> None:
        shared = replace(context, settings=Settings(placement="colocated"))
        names = ("engine-0", "engine-1")
        started = [runtime.start(n, parts("engine", "transport"), shared) for n in names]
        trainer = runtime.start("trainer", parts("trainer"), shared, world=2)
        *engines, ranks = await asyncio.gather(*started, trainer)  # engines wait for the ranks
        theirs = [devices for devices, *_ in await ranks.call_all("trainer.where")]
        seen = [(await engine.call("engine.where"))[0] for engine in engines]
        assert seen == theirs
        assert [e.ranks[0].node.id for e in engines] == [r.node.id for r in ranks.ranks]
        with pytest.raises(ConfigError, match="engine-2 needs 1 GPUs of one host, and placement="):
            await runtime.start("engine-2", parts("engine", "transport"), shared)

    play(odd, ray_cluster, body)


def test_larger_than_the_cluster_is_refused_at_once(odd: Any, ray_cluster: str) -> None:
    async def body(runtime: Any, context: Context) -> None:
        with pytest.raises(ConfigError, match="needs 6 GPUs \\(3 trainer x 2\\), and the cluster"):
            await runtime.start("trainer", parts("trainer"), context, world=3)

    play(odd, ray_cluster, body, trainer={"gpus": 2})


def test_check_asks_a_running_cluster(ray_cluster: str) -> None:
    stage = SimpleNamespace(
        specs={
            "trainer": Spec(kind="trainer", name="odd", config={"workers": 8}),
            "engine": Spec(kind="engine", name="odd"),
            "evaluator": None,
        },
        settings=Settings(),
        samples=True,
    )
    faults = Ray.check(Ray.Config(address=ray_cluster), stage)
    assert faults[0].startswith("the layout needs 10 CPUs (8 trainer x 1, 1 engine x 1, 1 rollout")
    assert f"the cluster {ray_cluster} has 8" in faults[0]
    assert "the layout needs 9 GPUs (8 trainer x 1, 1 engine x 1)" in faults[1]


# ---------------------------------------------------------------- deaths


def test_errors_name_rank_and_host(odd: Any, ray_cluster: str) -> None:
    async def body(runtime: Any, context: Context) -> None:
        trainer = await runtime.start("trainer", parts("trainer"), context, world=2)
        with pytest.raises(
            WorkerError,
            match=r"trainer-1 \(rank 1 of 2\) on .* \(127\.0\.0\..\): KeyError: 'missing'",
        ):
            await trainer.call("trainer.bug", rank=1)
        number = int((await trainer.call("worker.identity", rank=1)).split(".")[-2])
        actor = parent_of(number)
        os.kill(number, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"the worker process .* \(exit code -9\)") as caught:
            await trainer.call("trainer.where", rank=1)
        assert "--- trainer-1 (rank 1 of 2), node" in caught.value.detail  # its log
        first = int((await trainer.call("worker.identity", rank=0)).split(".")[-2])
        os.kill(parent_of(first), signal.SIGKILL)
        async with asyncio.timeout(20):
            while alive(first):  # it goes with its actor, and answers until then
                await asyncio.sleep(0.02)
        with pytest.raises(WorkerError, match=r"trainer-0 .*its actor is gone: The actor died"):
            await trainer.call("trainer.where", rank=0)
        assert alive(actor)

    play(odd, ray_cluster, body)


def test_rank_that_hangs_is_asked_by_its_actor_what_it_is_at(odd: Any, ray_cluster: str) -> None:
    async def body(runtime: Any, context: Context) -> None:
        trainer = await runtime.start("trainer", parts("trainer"), context, world=2)
        at = r"at \S+/odd_plugin\.py:\d+ hang"
        late = rf"trainer\.hang did not answer within 0\.2 s, {at}; see .*/trainer-\d\.log\n"
        with pytest.raises(
            WorkerError, match=r"trainer-\d \(rank . of 2\) on .*: " + late
        ) as found:
            await trainer.call_all("trainer.hang", timeout=0.2)
        (note,) = found.value.__notes__
        assert re.fullmatch(f"what its ranks are at: trainer-0, trainer-1: {at}", note), note
        first = int((await trainer.call("worker.identity", rank=0)).split(".")[-2])
        os.kill(parent_of(first), signal.SIGUSR1)  # the actor
        assert await trainer.ranks[0].where() == note.partition("trainer-1: ")[2]

    play(odd, ray_cluster, body)


def parent_of(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


# ---------------------------------------------------------------- runs

TINY = (
    "stages.sft.steps=2",
    "stages.sft.groups_per_step=4",
    "stages.grpo.groups_per_step=4",
    "stages.grpo.samples_per_group=4",
    "stages.grpo.selector.admit=[none]",
    "evaluator=null",
    "engine.max_len=64",
    "engine.rows=16",
    "engine.workers=2",
    "trainer.workers=2",
    "tracker=[jsonl]",
    "run.name=run",
)


def start(*overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "miles", "run", *TINY, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(run: subprocess.Popen[str], code: int = 0) -> str:
    try:
        output, _ = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == code, output
    return output


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row for row in rows if row["moment"] == "step_finished"}


def until_step(folder: Path, step: int, run: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 150
    while not any(at >= step for at in steps(folder)):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until, f"step {step} did not come"
        time.sleep(0.05)


def actor_of(folder: Path, name: str) -> int:
    """The process of the actor whose worker writes this log."""
    log = str(folder / "run" / "logs" / f"{name}.log")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "fd" / "1") == log:
                return parent_of(int(entry.name))
        except OSError:
            continue
    raise AssertionError(f"nobody writes {log}")


def learned(folder: Path) -> list[dict[str, float]]:
    kept = ("loss/", "reward/", "grad_norm", "mismatch/", "tokens/trained")
    rows = [row for _, row in sorted(steps(folder).items())]
    return [{k: v for k, v in row.items() if k.startswith(kept)} for row in rows]


def test_run_is_the_one_of_the_local_runtime(ray_cluster: str, tmp_path: Path) -> None:
    """The same experiment, twice the same numbers, bit for bit."""
    folders = [tmp_path / name for name in ("local", "ray")]
    how = ["runtime=local"], ["runtime=ray", f"runtime.address={ray_cluster}"]
    for folder, words in zip(folders, how, strict=True):
        finish(start(f"run.dir={folder}", "stages.grpo.steps=3", *words))
    local, ray = map(learned, folders)
    assert len(local) == 5 and local == ray
    assert any(row["reward/std"] > 0 for row in ray)


def test_run_outlives_an_engine_and_resumes_after_a_rank(ray_cluster: str, tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}", "stages.grpo.steps=40", "checkpoint_every=4"]
    words += ["runtime=ray", f"runtime.address={ray_cluster}"]
    run = start(*words)
    try:
        until_step(tmp_path, 4, run)
        os.kill(actor_of(tmp_path, "engine-0"), signal.SIGKILL)
        until_step(tmp_path, max(steps(tmp_path)) + 4, run)
        os.kill(actor_of(tmp_path, "trainer-1"), signal.SIGKILL)
        output = finish(run, code=1)
    finally:
        run.kill()
    assert "engine-0 is started again: engine-0 on" in output
    assert "miles: trainer-1 (rank 1 of 2) on" in output, output
    assert "its actor is gone" in output
    resumed = subprocess.run(
        [sys.executable, "-m", "miles", "run", f"resume={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert sorted(steps(tmp_path)) == list(range(1, 43))


def test_nothing_outlives_a_killed_driver(tmp_path: Path) -> None:
    """Not even the cluster that it started."""
    words = ["runtime=ray", "runtime.cpus=8", "trainer.workers=1", "engine.workers=1"]
    run = start(f"run.dir={tmp_path}", "stages.grpo.steps=1000", *words)
    try:
        until_step(tmp_path, 3, run)
        started = below(run.pid)
        names = {Path(f"/proc/{n}/comm").read_text().strip() for n in started}
        assert len(started) >= 8 and {"gcs_server", "raylet"} <= names
        assert not [line for line in listening() if line[0] != "127.0.0.1" and line[1] in started]
    finally:
        run.kill()
        run.wait()
    until = time.monotonic() + 90  # Ray's own agents first look for their head for a minute
    while left := [number for number in started if alive(number)]:
        assert time.monotonic() < until, f"{left} outlived their driver"
        time.sleep(0.1)


def below(number: int) -> set[int]:
    found = {number}
    while True:
        more = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if parent_of(int(entry.name)) in found:
                    more.add(int(entry.name))
            except OSError:
                continue
        if more <= found:
            return found - {number}
        found |= more


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening() -> list[tuple[str, int]]:
    """(address, process) of every listening TCP socket of this machine, for IPv4 and IPv6."""
    where = {}
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # listening
                words = bytes.fromhex(fields[1].partition(":")[0])[-4:]
                where[fields[9]] = ".".join(str(byte) for byte in reversed(words))
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
        except OSError:
            continue
        sockets = [link[8:-1] for link in links if link.startswith("socket:[")]
        found += [(where[inode], int(entry.name)) for inode in sockets if inode in where]
    return found
