"""Every transport against the embedded engine: all bits arrive, faults half way leave one version,
what is wrong is named, and an engine that was started again is brought up and compared."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miles import Context, Request, Sampling, TrainerError, WeightSyncError
from miles.learn.digest import contents
from miles.testing import FakeHandle
from miles_plugins.engine.torch import Torch
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.transport.disk import Disk
from miles_plugins.transport.disk_delta import DiskDelta
from miles_plugins.transport.ipc import Ipc
from miles_plugins.transport.memory import Memory
from miles_plugins.transport.nccl import Nccl
from miles_plugins.transport.rdma import Rdma

SMALL = 9000  # bytes of a bucket: a dozen of them for the model below
TRANSPORTS = {
    "memory": (Memory, {"bucket_bytes": SMALL}),
    "disk": (Disk, {"file_bytes": SMALL}),
    "disk_delta": (DiskDelta, {"file_bytes": SMALL}),
    "ipc": (Ipc, {"bucket_bytes": SMALL}),
    "nccl": (Nccl, {"bucket_bytes": SMALL, "backend": "gloo", "timeout_s": 10.0}),
    "rdma": (Rdma, {"bucket_bytes": 40_000, "protocol": "tcp"}),
}
every = pytest.mark.parametrize(  # Mooncake's engine takes a second to start
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "rdma" else ()) for n in TRANSPORTS]
)
late = pytest.mark.parametrize(  # of NCCL's group the others are waited for
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in ("nccl", "rdma") else ()) for n in TRANSPORTS],
)
SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 48}


def _mooncake() -> bool:
    try:
        import mooncake.engine  # noqa: F401 - whether it is there
    except ImportError:
        return False
    return True


class Trainer:
    """Exports bfloat16 weights of a version; may break in the middle."""

    def __init__(self, model):
        from miles_plugins.model.build import causal_lm

        self.module = causal_lm(model.hf_config(), None)
        self.version = 0
        self.broken = False

    def weights(self):
        generator = torch.Generator().manual_seed(self.version)
        for name, parameter in self.module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            yield name, (parameter.detach() + noise).to(torch.bfloat16)

    def export(self):
        for index, pair in enumerate(self.weights()):
            if self.broken and index == 12:
                raise TrainerError("the export broke")
            yield pair


class Sides:
    """The driver's half, a trainer, and embedded engines, over the wire format in one process."""

    def __init__(self, name, directory: Path, engines: int = 2, **config):
        if name == "rdma" and not _mooncake():
            pytest.skip("Mooncake's transfer engine (or libibverbs) is not installed")
        self.kind, settings = TRANSPORTS[name]
        self.config = {**settings, **config}
        self.context = Context(directory=directory, precision=Bf16(Bf16.Config(), None))
        model = Qwen3(Qwen3.Config(**SHAPE), self.context)
        self.context = replace(self.context, model=model)
        torch.manual_seed(0)
        self.source = Trainer(model)
        self.sent_by = self.half().sender(self.source)
        self.trainer = FakeHandle("trainer", {"sender": self.sent_by})
        self.driver = self.half()
        self.handles = [self.engine(f"engine-{i}") for i in range(engines)]

    def half(self):
        return self.kind(self.kind.Config(**self.config), self.context)

    def engine(self, name):
        engine = Torch(Torch.Config(rows=8, max_len=32), self.context)
        return FakeHandle(name, {"engine": engine, "receiver": self.half().receiver(engine)})

    @property
    def engines(self):
        return [handle.ranks[0]["engine"] for handle in self.handles]

    async def publish(self, version):
        self.source.version = version
        async with asyncio.timeout(60):
            return await self.driver.publish(version, trainer=self.trainer, engines=self.handles)

    def wanted(self):
        return {name: contents([tensor])[0] for name, tensor in self.source.weights()}

    async def serve(self, version):
        """Assert that all engines serve exactly this version, and sample by it."""
        self.source.version = version
        for engine in self.engines:
            assert await engine.version() == version
            assert await engine.digests() == self.wanted()
            async with asyncio.timeout(20):
                completion = await engine.generate(_request())
            assert [span.version for span in completion.spans] == [version]


def _request():
    tokens = np.arange(6, dtype=np.int32)
    sampling = Sampling(max_new_tokens=2)
    return Request(id="r", key="k", tokens=tokens, sampling=sampling, seed=0)


@every
def test_publish_brings_every_bit_to_every_engine(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path)
        receipts = []
        for version in (0, 1, 2):
            receipts.append(await sides.publish(version))
            await sides.serve(version)
        size = sum(t.nbytes for _, t in sides.source.weights())
        assert [r.version for r in receipts] == [0, 1, 2]
        assert {r.bytes for r in receipts} == {size}
        assert len({r.digest for r in receipts}) == 3

    asyncio.run(play())


@late
def test_trainer_that_breaks_half_way_leaves_the_old_version(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path)
        await sides.publish(1)
        sides.source.broken = True
        with pytest.raises(TrainerError, match="the export broke"):
            await sides.publish(2)
        await sides.serve(1)
        sides.source.broken = False
        await sides.publish(3)
        await sides.serve(3)

    asyncio.run(play())


@late
def test_engine_lost_half_way_is_named_and_brought_up_when_it_is_back(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path)
        await sides.publish(1)
        lost = sides.handles[1]
        honest, calls = lost.call, 0

        async def dying(target, *args, **how):
            nonlocal calls
            calls += target.startswith("receiver.")
            lost.dead = lost.dead or calls > 1  # in the middle of the publish
            return await honest(target, *args, **how)

        lost.call = dying
        with pytest.raises(WeightSyncError, match="engine-1"):
            await sides.publish(2)
        for engine in sides.engines:  # another may have switched; none has both
            sides.source.version = await engine.version()
            assert await engine.digests() == sides.wanted()
        sides.handles[1] = sides.engine("engine-1")  # started again, without weights
        assert await sides.engines[1].version() == -1
        await sides.publish(2)
        await sides.serve(2)

    asyncio.run(play())


@every
def test_engine_that_serves_other_bits_is_stopped_before_the_next_token(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path)
        engine = sides.engines[1]
        honest = engine.load

        async def damaging(version, weights):
            def damaged():
                for title, tensor in weights:
                    bad = title == "model.layers.1.mlp.up_proj.weight"
                    yield title, tensor.clone().fill_(0.5) if bad else tensor

            await honest(version, damaged())

        engine.load = damaging
        with pytest.raises(WeightSyncError) as raised:
            await sides.publish(1)
        for said in ("engine-1", "1 of ", "model.layers.1.mlp.up_proj.weight", "it is stopped"):
            assert said in str(raised.value)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await engine.generate(_request())
        engine.load = honest
        await sides.publish(2)
        await sides.serve(2)

    asyncio.run(play())


@every
def test_contents_are_compared_at_first_then_when_due_and_after_a_restart(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path, engines=1, verify_every=3)
        asked = []

        def watch():
            engine = sides.engines[0]
            honest = engine.digests

            async def counting():
                asked.append(sides.source.version)
                return await honest()

            engine.digests = counting

        watch()
        for version in range(5):
            await sides.publish(version)
        assert asked == [0, 3]
        sides.handles[0] = sides.engine("engine-0")
        watch()
        await sides.publish(5)
        assert asked == [0, 3, 5]

    asyncio.run(play())


@every
def test_requests_go_on_while_weights_are_published(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path, engines=1)
        await sides.publish(0)
        engine = sides.engines[0]
        sampling = Sampling(max_new_tokens=24)
        running = [
            asyncio.create_task(
                engine.generate(replace(_request(), id=str(i), key=str(i), sampling=sampling))
            )
            for i in range(4)
        ]
        while (await engine.health())["tokens"] < 8:
            await asyncio.sleep(0)
        await sides.publish(1)
        for completion in await asyncio.gather(*running):
            assert len(completion.tokens) == 24
            assert [s.version for s in completion.spans] == sorted({0, 1} & {
                s.version for s in completion.spans
            })  # fmt: skip
            assert completion.spans[-1].stop == 24
        await sides.serve(1)

    asyncio.run(play())


def test_difference_is_small_and_falls_back_to_a_whole_snapshot(tmp_path, caplog):
    async def play():
        sides = Sides("disk_delta", tmp_path)
        caplog.set_level(logging.INFO)
        await sides.publish(0)
        await sides.publish(1)
        honest = sides.source.weights

        def nearly():  # one tensor changes a little
            for title, tensor in honest():
                yield title, tensor + 0.5 if title == "model.norm.weight" else tensor

        sides.source.weights = nearly
        caplog.clear()
        receipt = await sides.publish(1)
        (line,) = [r.getMessage() for r in caplog.records if "were written" in r.getMessage()]
        written = int(line.split()[2])
        assert 0 < written < receipt.bytes / 50
        assert not [r for r in caplog.records if r.levelname == "WARNING"]
        sides.source.weights = nearly
        await sides.serve(1)
        sides.handles[1] = sides.engine("engine-1")
        caplog.clear()
        await sides.publish(2)
        assert "engine-1 has not the weights of the last publish; a whole snapshot" in caplog.text
        await sides.serve(2)

    asyncio.run(play())
