"""Weights through shared memory: real processes, several ranks, small buckets, full disks, damage,
failures."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles import ConfigError, Context, WeightSyncError, WorkerError
from miles.testing import FakeHandle
from miles_plugins.transport.memory import Memory


class Trainer:
    def __init__(self, tensors):
        self.tensors = tensors
        self.exported = []

    def export(self):
        for name, tensor in self.tensors.items():
            self.exported.append(name)
            yield name, tensor


class Engine:
    def __init__(self):
        self.serving, self.tensors, self.refuse = -1, {}, False

    async def load(self, version, weights):
        found = dict(weights)
        if self.refuse:
            raise WeightSyncError("refused on purpose")
        self.serving, self.tensors = version, found


def _tensors(seed=0):
    torch.manual_seed(seed)
    return {
        "a": torch.randn(100, 7),
        "b": torch.randn(33).to(torch.bfloat16),
        "c": torch.randn(50, 40).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "d": torch.randint(0, 9, (11,), dtype=torch.int8),
        "nan": torch.tensor([float("nan"), -0.0]),
    }


class Sides:
    """The driver's half, trainer ranks and engines, over the wire format in one process."""

    def __init__(self, run, tensors, *, ranks=1, engines=1, **config):
        self.trainers = [Trainer(tensors) for _ in range(ranks)]
        self.engines = [Engine() for _ in range(engines)]

        def half(rank=0):
            return Memory(Memory.Config(**config), Context(directory=run, rank=rank))

        self.driver = half()
        parts = [{"sender": half(r).sender(t)} for r, t in enumerate(self.trainers)]
        self.trainer = FakeHandle("trainer", *parts)
        self.handles = [
            FakeHandle(f"engine-{i}", {"receiver": half().receiver(e)})
            for i, e in enumerate(self.engines)
        ]

    def publish(self, version=1):
        work = self.driver.publish(version, trainer=self.trainer, engines=self.handles)
        return asyncio.run(work)


def test_publish_that_is_given_up_does_not_wait_for_a_worker_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("miles_plugins.transport.memory.CLEANUP_S", 0.05)

    class Hung(FakeHandle):
        async def call_all(self, target, *args, timeout=None, **kwargs):
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.Event().wait()
            except TimeoutError:
                raise WorkerError(f"{target} did not answer") from None

    sides = Sides(tmp_path, _tensors())
    hung = Hung("trainer")

    async def main():
        async with asyncio.timeout(0.05):
            await sides.driver.publish(1, trainer=hung, engines=sides.handles)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert time.monotonic() - began < 5


def _assert_same(sent, got):
    assert list(sent) == list(got)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        raw = [
            x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for x in (tensor, got[name])
            if x.numel()
        ]
        assert len(set(raw)) <= 1


def _shared():
    return {p for p in os.listdir("/dev/shm") if p.startswith("miles-")}


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    bucket=st.integers(1, 12_000),
    ranks=st.integers(1, 3),
    engines=st.integers(1, 2),
    again=st.booleans(),
)
def test_publish_moves_every_bit_whatever_the_buckets(tmp_path, bucket, ranks, engines, again):
    tensors = _tensors()
    sides = Sides(tmp_path, tensors, ranks=ranks, engines=engines, bucket_bytes=bucket)
    receipts = [sides.publish(1), sides.publish(2)] if again else [sides.publish(2)]
    for engine in sides.engines:
        assert engine.serving == 2
        _assert_same(tensors, engine.tensors)
    for trainer in sides.trainers:  # every rank takes part in the whole export
        assert trainer.exported == list(tensors) * len(receipts)
    assert len({r.digest for r in receipts}) == 1
    assert receipts[-1].bytes == sum(t.nbytes for t in tensors.values())
    assert not _shared()


def test_digest_does_not_depend_on_buckets_and_sees_everything(tmp_path):
    tensors = _tensors()
    one = Sides(tmp_path, tensors, bucket_bytes=100).publish().digest
    assert one == Sides(tmp_path, tensors).publish().digest
    changed = [
        {**tensors, "a": tensors["a"] + torch.eye(100, 7) * 1e-7},
        {**tensors, "b": tensors["b"].view(torch.float16)},
        {**tensors, "c": tensors["c"].reshape(50, 40)},
        {("z" if n == "d" else n): t for n, t in tensors.items()},
        dict(reversed(tensors.items())),
    ]
    digests = [Sides(tmp_path, t).publish().digest for t in changed]
    assert len({one, *digests}) == 6


def test_tiny_model_takes_three_calls(tmp_path):
    sides = Sides(tmp_path, _tensors())
    sides.publish()
    assert sides.trainer.calls == ["sender.fill"]
    assert sides.handles[0].calls == ["receiver.stage", "receiver.load"]


def test_two_buckets_at_most_are_held(tmp_path):
    sides = Sides(tmp_path, {str(i): torch.randn(1000) for i in range(20)}, bucket_bytes=8100)
    sides.publish()
    sender = sides.trainer.ranks[0]["sender"]
    assert [b.size for b in sender._buckets.values()] == [8032, 8032]
    _assert_same(sides.trainers[0].tensors, sides.engines[0].tensors)


def test_no_engine_is_nothing_to_move(tmp_path):
    sides = Sides(tmp_path, _tensors(), engines=0)
    receipt = sides.publish(3)
    assert (receipt.version, receipt.digest, receipt.bytes) == (3, "", 0)


def test_workers_of_several_machines_are_refused_by_name(tmp_path):
    sides = Sides(tmp_path, _tensors())
    sides.trainer.machines, sides.handles[0].machines = ["one/1f", "one/1f"], ["two/2e"]
    found = f"{sides.trainer.name} on one/1f; {sides.handles[0].name} on two/2e"
    with pytest.raises(ConfigError, match=f"transport memory: {found}: machines share no memory"):
        sides.publish()
    assert sides.trainer.calls == []


def test_damaged_bytes_are_named_and_change_nothing(tmp_path):
    sides = Sides(tmp_path, _tensors())
    sides.publish(1)
    old = sides.engines[0].tensors
    sender = sides.trainer.ranks[0]["sender"]
    honest = sender.fill

    def damaging(slot, first):
        answer = honest(slot, first)
        at = next(t["offset"] for t in answer["tensors"] if t["name"] == "c")
        memory = sender._buckets[slot].memory
        memory[at] = memory[at] ^ 1
        return answer

    sender.fill = damaging
    with pytest.raises(WeightSyncError, match=r"engine-0: .*1 tensors differ from what .*: c"):
        sides.publish(2)
    assert sides.engines[0].serving == 1
    _assert_same(old, sides.engines[0].tensors)
    sender.fill = honest
    sides.publish(3)
    assert sides.engines[0].serving == 3


def test_stream_with_a_lost_bucket_is_refused(tmp_path):
    sides = Sides(tmp_path, _tensors(), bucket_bytes=3000)
    receiver = sides.handles[0].ranks[0]["receiver"]
    honest, count = receiver.stage, [0]

    async def losing(bucket, first):
        count[0] += 1
        if count[0] != 2:
            await honest(bucket, first)

    receiver.stage = losing
    with pytest.raises(WeightSyncError, match=r"version 1: \d tensors arrived with digest"):
        sides.publish(1)
    assert sides.engines[0].serving == -1


def test_one_refusing_engine_is_named(tmp_path):
    sides = Sides(tmp_path, _tensors(), engines=2)
    sides.engines[1].refuse = True
    with pytest.raises(
        WeightSyncError, match=r"receiver\.load failed: engine-1: refused on purpos"
    ):
        sides.publish(1)
    assert sides.engines[1].serving == -1
    assert sides.handles[1].ranks[0]["receiver"]._staged == {}


def test_export_that_fails_half_way_leaves_the_old_version(tmp_path):
    sides = Sides(tmp_path, _tensors(), bucket_bytes=1000)
    sides.publish(1)

    def failing():
        yield "a", torch.zeros(900)
        yield "b", torch.zeros(900)
        raise WeightSyncError("the export broke")

    honest, sides.trainers[0].export = sides.trainers[0].export, failing
    with pytest.raises(WeightSyncError, match="the export broke"):
        sides.publish(2)
    assert sides.engines[0].serving == 1
    assert sides.handles[0].ranks[0]["receiver"]._staged == {}
    sides.trainers[0].export = honest
    sides.publish(3)
    assert sides.engines[0].serving == 3
    assert not _shared()


def test_missing_directory_falls_back_and_says_so(tmp_path, caplog):
    sides = Sides(tmp_path, _tensors(), directory="/nowhere/at/all")
    with caplog.at_level(logging.WARNING):
        sides.publish(1)
    assert f"/nowhere/at/all: No such file or directory; using {tmp_path}" in caplog.text
    _assert_same(sides.trainers[0].tensors, sides.engines[0].tensors)
    assert os.listdir(tmp_path) == []


def test_full_directory_falls_back_and_nowhere_is_an_error(tmp_path, monkeypatch, caplog):
    """`posix_fallocate` is what a full file system refuses; a write into a map would kill the
    process."""
    real = os.posix_fallocate

    def full(descriptor, offset, size):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(full.where):
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    full.where = "/dev/shm"
    monkeypatch.setattr(os, "posix_fallocate", full)
    sides = Sides(tmp_path, _tensors())
    with caplog.at_level(logging.WARNING):
        sides.publish(1)
    assert "/dev/shm: No space left on device; using" in caplog.text
    full.where = "/"
    sides = Sides(tmp_path, _tensors())
    with pytest.raises(
        WeightSyncError, match=r"no room for a bucket of \d+ bytes: /dev/shm: No sp"
    ):
        sides.publish(1)
    assert not _shared()
    assert os.listdir(tmp_path) == []


def test_buckets_are_private_and_nameless(tmp_path):
    sides = Sides(tmp_path, _tensors())
    sides.publish(1)
    bucket = sides.trainer.ranks[0]["sender"]._buckets[0]
    status = os.stat(bucket.path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_nlink == 0


def test_bucket_bytes_must_be_positive(tmp_path):
    with pytest.raises(ConfigError, match="bucket_bytes is 0; it must be at least 1"):
        Memory(Memory.Config(bucket_bytes=0), Context(directory=tmp_path))


# ------------------------------------------------------------ processes of their own


class _ProcessHandle:
    """A handle over a pipe to a real process."""

    world = 1

    def __init__(self, name: str, main: Any, *args: Any) -> None:
        self.name = name
        self.turn = asyncio.Lock()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, *args), daemon=True)
        self.process.start()

    async def call(self, target: str, *args: Any, rank: int = 0, timeout: Any = None) -> Any:
        def ask() -> Any:
            self.pipe.send((target, args))
            return self.pipe.recv()

        async with self.turn:  # a real handle interleaves calls; a bare pipe cannot
            outcome, value = await asyncio.to_thread(ask)
        if outcome == "error":
            raise WeightSyncError(value)
        return value

    async def call_all(self, target: str, *args: Any, timeout: Any = None) -> list[Any]:
        return [await self.call(target, *args)]

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Any, parts: dict[str, Any]) -> None:
    while True:
        target, args = pipe.recv()
        part, method = target.split(".")
        try:
            value = getattr(parts[part], method)(*args)
            if asyncio.iscoroutine(value):
                value = asyncio.run(value)
            pipe.send(("ok", value))
        except WeightSyncError as error:
            pipe.send(("error", str(error)))


def _trainer_process(pipe: Any, directory: str, bucket: int) -> None:
    transport = Memory(Memory.Config(bucket_bytes=bucket), Context(directory=Path(directory)))
    _serve(pipe, {"sender": transport.sender(Trainer(_tensors()))})


class _Checking(Engine):
    def check(self) -> int:
        _assert_same(_tensors(), self.tensors)
        return self.serving


def _engine_process(pipe: Any, directory: str) -> None:
    engine = _Checking()
    transport = Memory(Memory.Config(), Context(directory=Path(directory)))
    _serve(pipe, {"receiver": transport.receiver(engine), "engine": engine})


@pytest.mark.slow
def test_publish_between_processes_and_nothing_left_after_a_kill(tmp_path):
    trainer = _ProcessHandle("trainer", _trainer_process, str(tmp_path), 2000)
    engines = [_ProcessHandle(f"engine-{i}", _engine_process, str(tmp_path)) for i in range(2)]
    driver = Memory(Memory.Config(bucket_bytes=2000), Context(directory=tmp_path))

    async def play():
        for version in (0, 1):
            await driver.publish(version, trainer=trainer, engines=engines)
            assert [await e.call("engine.check") for e in engines] == [version] * 2
        await trainer.call("sender.fill", 0, True)  # killed in the middle of a stream

    try:
        asyncio.run(play())
    finally:
        for handle in (trainer, *engines):
            handle.end()
    assert not _shared()
    assert os.listdir(tmp_path) == []
