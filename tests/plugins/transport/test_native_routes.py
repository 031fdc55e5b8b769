"""What is said to an engine's own server over SGLang's routes: buckets by handle and by broadcast,
the proof against a snapshot, updates that end half way."""

from __future__ import annotations

import asyncio
import base64
import pickletools
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from miles import Context, Gpu, TrainerError, WeightSyncError, WorkerError
from miles.learn.digest import contents
from miles.testing import FakeHandle
from miles_plugins.transport.broadcast import Group
from miles_plugins.transport.ipc import Ipc
from miles_plugins.transport.nccl import Nccl

CHOICES = {
    "ipc": (Ipc, {"bucket_bytes": 300}),
    "nccl": (Nccl, {"bucket_bytes": 300, "backend": "gloo", "timeout_s": 10.0}),
}
each = pytest.mark.parametrize("name", CHOICES)
late = pytest.mark.parametrize(  # of NCCL's group the others are waited for
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "nccl" else ()) for n in CHOICES]
)


class Trainer:
    def __init__(self):
        self.version, self.broken = 1, False

    def export(self):
        generator = torch.Generator().manual_seed(self.version)
        for index in range(8):
            if self.broken and index == 7:  # after several buckets
                raise TrainerError("the export broke")
            shape = (7, 2 * index + 1)  # odd sizes, so that float32 may come to lie askew
            kind = torch.float32 if index % 3 == 2 else torch.bfloat16
            yield f"layer.{index}.weight", torch.randn(shape, generator=generator).to(kind)


class Server:
    """An engine whose own server keeps tensors and says their checksums."""

    def __init__(self):
        self.weights, self.asked, self.serving, self.state = {}, [], -1, "runs"
        self.group, self.loses, self.ranks, self.first_gpu = None, "", 1, 0

    @asynccontextmanager
    async def updating(self, version):
        self.state, touched = "paused", len(self.asked)
        try:
            yield self
        except WeightSyncError:
            wrote = any(path.startswith("/update") for path, _ in self.asked[touched:])
            self.state = "broken" if wrote else "runs"
            raise
        self.serving, self.state = version, "runs"

    async def post(self, path, body):
        assert self.state == "paused"
        self.asked.append((path, body))
        handler = getattr(self, "do_" + path.strip("/"))
        await asyncio.to_thread(handler, **body)
        return {"success": True}

    async def end(self):
        self.asked.append(("end", {}))

    async def checksums(self):
        return {name: contents([tensor])[0] for name, tensor in self.weights.items()}

    def take(self, name, tensor):
        if name != self.loses:
            self.weights[name] = tensor.clone()

    def do_update_weights_from_tensor(self, serialized_named_tensors, load_format, flush_cache):
        from multiprocessing.reduction import ForkingPickler

        assert (load_format, len(serialized_named_tensors)) == ("flattened_bucket", self.ranks)
        raw = base64.b64decode(serialized_named_tensors[0])
        for held in _globals(raw):
            assert held in ALLOWED, held
        said = ForkingPickler.loads(raw)
        for one in said["metadata"]:
            part = said["flattened_tensor"][one.start_idx : one.end_idx]
            self.take(one.name, part.view(one.dtype).reshape(one.shape))

    def do_init_weights_update_group(
        self, master_address, master_port, rank_offset, world_size, group_name, backend
    ):
        store = dist.TCPStore(master_address, master_port, world_size, False)
        how = {"backend": backend, "name": group_name, "timeout_s": 10.0}
        self.group = Group(store, rank=rank_offset, world=world_size, **how)

    def do_destroy_weights_update_group(self, group_name):
        self.group.leave()

    def do_update_weights_from_distributed(
        self, names, dtypes, shapes, group_name, load_format, flush_cache
    ):
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [torch.Size(s).numel() * k.itemsize for s, k in zip(shapes, kinds, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self.group.wait(self.group.broadcast(flat))
        at = 0
        for name, kind, shape, size in zip(names, kinds, shapes, sizes, strict=True):
            assert at % kind.itemsize == 0  # the server refuses what is misaligned
            self.take(name, flat[at : at + size].view(kind).reshape(shape))
            at += size

    def do_weights_checker(self, action):
        assert action == "reset_tensors"
        self.weights = {name: torch.rand_like(t) for name, t in self.weights.items()}

    def do_update_weights_from_disk(self, model_path, load_format, flush_cache, weight_version):
        for file in Path(model_path).glob("*.safetensors"):
            self.weights.update(load_file(file))


ALLOWED = {
    "SimpleNamespace", "Size", "bfloat16", "float32", "uint8", "UntypedStorage", "TypedStorage",
    "rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename", "Tensor", "OrderedDict",
}  # fmt: skip
"""Globals that SGLang's own list of harmless ones has as well, without their modules."""


def _globals(raw):
    """Names of what a payload would import."""
    last = ""
    for code, value, _ in pickletools.genops(raw):
        if code.name == "STACK_GLOBAL":
            yield last
        elif code.name == "GLOBAL":
            yield value.split()[-1]
        elif isinstance(value, str):
            last = value


class Sides:
    def __init__(self, name, directory, servers=1, **more):
        kind, config = CHOICES[name]
        context = Context(directory=directory)

        def half():
            return kind(kind.Config(**{**config, **more}), context)

        self.source = Trainer()
        self.servers = [Server() for _ in range(servers)]
        self.trainer = FakeHandle("trainer", {"sender": half().sender(self.source)})
        self.engines = [
            FakeHandle(f"engine-{i}", {"receiver": half().receiver(server)})
            for i, server in enumerate(self.servers)
        ]
        self.driver = half()

    async def publish(self, version):
        self.source.version = version
        async with asyncio.timeout(60):
            how = {"trainer": self.trainer, "engines": self.engines}
            return await self.driver.publish(version, **how)

    def same(self):
        wanted = dict(self.source.export())
        return all(
            set(server.weights) == set(wanted)
            and all(torch.equal(server.weights[n], t) for n, t in wanted.items())
            for server in self.servers
        )


@each
def test_servers_take_every_bit_and_are_proven_when_it_is_due(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path, servers=2, verify_every=2)
        for version in (1, 2, 3):
            await sides.publish(version)
            assert sides.same()
            assert [(s.serving, s.state) for s in sides.servers] == [(version, "runs")] * 2
        paths = [path for path, _ in sides.servers[0].asked]
        assert paths.count("/update_weights_from_disk") == 2  # versions 1 and 3
        assert paths.count("/init_weights_update_group") == (name == "nccl")
        assert not list((tmp_path / "weights").glob("proof_*"))

    asyncio.run(play())


@each
def test_server_that_loses_a_tensor_is_named_and_serves_nothing(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path, servers=2)
        await sides.publish(1)
        sides.driver._verifying.failed()  # as after a restart
        sides.servers[1].loses = "layer.3.weight"
        with pytest.raises(WeightSyncError) as raised:
            await sides.publish(2)
        assert "engine-1" in str(raised.value)
        assert "1 of 8 tensors on the server differ from those of a snapshot" in str(raised.value)
        assert "layer.3.weight" in str(raised.value)
        assert sides.servers[1].state == "broken"

    asyncio.run(play())


@late
def test_update_that_ends_half_way_leaves_no_server_with_two_versions(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path)
        await sides.publish(1)
        sides.source.broken = True
        with pytest.raises(TrainerError, match="the export broke"):
            await sides.publish(2)
        (server,) = sides.servers
        assert server.serving == 1
        assert server.state == "broken"  # some of its tensors were written

    asyncio.run(play())


@each
def test_update_that_fails_before_the_first_write_leaves_the_old_version_running(name, tmp_path):
    async def play():
        sides = Sides(name, tmp_path)
        await sides.publish(1)
        sides.trainer.dead = True
        with pytest.raises(WorkerError):
            await sides.publish(2)
        (server,) = sides.servers
        assert (server.serving, server.state) == (1, "runs")

    asyncio.run(play())


def test_broadcast_that_rank_0_cannot_send_ends_the_publish_though_servers_still_wait(tmp_path):
    """As when NCCL cannot connect: the server waits in its first broadcast, for minutes."""

    async def play():
        sides = Sides("nccl", tmp_path)
        (server,), waits = sides.servers, threading.Event()
        await sides.publish(1)
        sender = sides.trainer.ranks[0]["sender"]

        def refused(flat):
            raise WeightSyncError("transport nccl: a broadcast was refused: unhandled system error")

        sender._group.broadcast = refused
        server.do_update_weights_from_distributed = lambda **body: waits.wait(30)
        began = time.monotonic()
        try:
            with pytest.raises(WeightSyncError, match="refused: unhandled system error"):
                await sides.publish(2)
        finally:
            waits.set()
        assert time.monotonic() - began < 5
        assert server.state == "broken"

    asyncio.run(play())


def test_bucket_that_a_server_never_takes_is_given_up_after_its_limit(tmp_path):
    async def play():
        sides = Sides("nccl", tmp_path, timeout_s=1.0)
        (server,), waits = sides.servers, threading.Event()
        server.do_update_weights_from_distributed = lambda **body: waits.wait(30)
        try:
            with pytest.raises(WeightSyncError, match=r"layer\.0\.weight.* within 1 s \(transport"):
                await sides.publish(1)
        finally:
            waits.set()
        assert server.state == "broken"

    asyncio.run(play())


def test_nothing_is_asked_of_the_gpu_between_a_broadcast_and_telling_receivers(tmp_path):
    """It spins until they take part, and what waits for the GPU to be idle would wait for ever."""
    sender = Sides("nccl", tmp_path).trainer.ranks[0]["sender"]
    order = []

    def noted(what, call):
        return lambda *args: order.append(what) or call(*args)

    sender.sent = lambda *args, **how: order.append("sent") or {}
    for what in ("take", "write", "end"):
        setattr(sender._outgoing, what, noted(what, getattr(sender._outgoing, what)))
    slot, last = 0, {}
    while not last:
        last = sender.fill(slot % 2, not slot, True)["last"]
        slot += 1
    assert order == ["take", "write", "sent"] * (slot - 1) + ["take", "write", "end", "sent"]


@pytest.mark.parametrize(
    ("shown", "first", "taken"), [("01", 0, "ab"), ("01", 1, "ba"), ("1", 0, "ba"), ("", 0, "aa")]
)
def test_server_opens_the_buckets_of_trainer_ranks_on_its_own_gpus(
    shown, first, taken, tmp_path, monkeypatch
):
    """The second server of a colocated run, or one that Ray shows its GPU alone, cannot always open
    the first GPU's; a rank whose GPU nobody knows takes the first one."""
    gpus = [Gpu(name="H200", total=0, uuid=f"gpu-{number}") for number in shown]
    monkeypatch.setattr("miles_plugins.transport.handles.gpus_here", lambda: gpus)
    server, paid = Server(), []
    server.ranks, server.first_gpu = 2, first
    server.do_update_weights_from_tensor = lambda serialized_named_tensors, **_: paid.extend(
        serialized_named_tensors
    )
    receiver = Ipc(Ipc.Config(), Context(directory=tmp_path)).receiver(server)
    handles = [{"device": f"gpu-{n}", "native": native} for n, native in enumerate("ab")]

    async def play():
        await receiver.begin(1, False)
        await receiver.take({"tensors": [{"name": "w"}], "handles": [{}, *handles]})

    asyncio.run(play())
    assert "".join(paid) == taken
