"""Workers that die in the middle of a publish, full disks, damaged and half-written files: what is
left behind, and what the other side says."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from miles import ConfigError, Context, Gpu, Spec, WeightSyncError, process_identity
from miles.learn.digest import contents, sums
from miles.testing import FakeHandle
from miles_plugins.transport.broadcast import BroadcastReceiver, BroadcastSender, Group
from miles_plugins.transport.delta import DeltaReceiver
from miles_plugins.transport.disk import Disk
from miles_plugins.transport.disk_delta import DiskDelta
from miles_plugins.transport.handles import IpcSender
from miles_plugins.transport.ipc import Ipc
from miles_plugins.transport.nccl import Nccl
from miles_plugins.transport.rdma import Rdma
from miles_plugins.transport.snapshot import (
    SnapshotReceiver,
    SnapshotSender,
    check_contents,
    one_thread,
    read_manifest,
)


class Trainer:
    def __init__(self, dies_after=None):
        self.dies_after = dies_after

    def export(self):
        for index in range(6):
            if index == self.dies_after:
                os._exit(9)
            yield f"layer.{index}", torch.full((500,), float(index))


class Engine:
    def __init__(self):
        self.serving, self.tensors = -1, {}

    async def load(self, version, weights):
        self.serving, self.tensors = version, dict(weights)

    async def version(self):
        return self.serving


def _apart(work) -> int:
    """Run in a process of its own; how it ended."""
    if (pid := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _sender(directory, trainer=None, rank=0):
    return SnapshotSender(
        trainer or Trainer(), rank=rank, directory=directory, file_bytes=4000, model=None
    )


def _names(directory):
    return sorted(path.name.partition(".")[0] or ".unfinished" for path in directory.iterdir())


def test_snapshot_of_a_trainer_that_died_is_absent_and_cleared_by_the_next(tmp_path):
    assert _apart(lambda: _sender(tmp_path, Trainer(dies_after=4)).write(3)) == 9
    assert _names(tmp_path) == [".unfinished"]
    sender = _sender(tmp_path)
    written = sender.write(4)
    assert _names(tmp_path) == ["version_000004"]
    SnapshotReceiver(Engine()).look(written["directory"], written["digest"])


@pytest.mark.parametrize("kind", [SnapshotReceiver, DeltaReceiver])
def test_contents_are_compared_by_one_thread(tmp_path, monkeypatch, kind):
    """Torch's own threads spin for each other: beside a busy server, 6 s where one takes 0.2."""
    written = _sender(tmp_path / "sent").write(1)
    seen, before = [], torch.get_num_threads()

    def noted(made):
        seen.append(torch.get_num_threads())
        return sums(made)

    monkeypatch.setattr("miles_plugins.transport.snapshot.sums", noted)
    monkeypatch.setattr("miles.learn.digest.sums", noted)
    torch.set_num_threads(2)
    try:
        if kind is SnapshotReceiver:
            folder = Path(written["directory"])
            check_contents(folder, read_manifest(folder)["tensors"])
        else:
            receiver = DeltaReceiver(Engine(), local=tmp_path / "here", file_bytes=4000)
            receiver.stage(written["directory"], written["digest"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen and set(seen) == {1}


def test_contents_that_are_compared_at_once_leave_torch_all_its_threads():
    """The second took the first's one thread for what there was, and left that behind."""
    before, inside, over = torch.get_num_threads(), threading.Event(), threading.Event()

    def first():
        with one_thread():
            inside.set()
            time.sleep(0.2)
        over.set()

    def second():
        inside.wait()
        with one_thread():
            over.wait()

    torch.set_num_threads(2)
    try:
        threads = [threading.Thread(target=each) for each in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = []
        new = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert found == [2]
    finally:
        torch.set_num_threads(before)


def test_old_snapshot_is_deleted_when_the_new_one_is_served_and_not_before(tmp_path):
    sender = _sender(tmp_path)
    sender.keep(sender.write(1)["directory"])
    second = sender.write(2)["directory"]
    assert _names(tmp_path) == ["version_000001", "version_000002"]
    sender.keep(second)
    assert _names(tmp_path) == ["version_000002"]
    sender.write(3)
    sender.give_up()
    assert _names(tmp_path) == ["version_000002"]


@contextmanager
def _full_disk(size):
    """No file may grow beyond `size` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_named_leaves_nothing_and_the_old_version(tmp_path):
    engine = Engine()

    def half():
        return Disk(Disk.Config(directory=str(tmp_path / "w")), Context(directory=tmp_path))

    trainer = FakeHandle("trainer", {"sender": half().sender(Trainer())})
    engines = [FakeHandle("engine", {"receiver": half().receiver(engine)})]
    driver = half()
    asyncio.run(driver.publish(1, trainer=trainer, engines=engines))
    with _full_disk(3000), pytest.raises(WeightSyncError, match=r"cannot write .*safetensors"):
        asyncio.run(driver.publish(2, trainer=trainer, engines=engines))
    (own,) = (tmp_path / "w").iterdir()
    assert _names(own) == ["version_000001"]
    assert engine.serving == 1
    asyncio.run(driver.publish(3, trainer=trainer, engines=engines))
    assert engine.serving == 3


OTHERS = (
    "version_0", "version_000007", "version_000007.best", "versions", "version_000007.abcdef.old",
    ".unfinished-version_notes", "lightning_logs",
)  # fmt: skip


@pytest.mark.parametrize("kind", [Disk, DiskDelta])
def test_folders_of_others_in_a_shared_directory_survive(tmp_path, kind):
    """Snapshots of another run, and whatever lies beside them."""
    shared, runs = tmp_path / "shared", [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for name in OTHERS:
        (shared / name / "file").mkdir(parents=True)

    def made(run):
        half = kind(kind.Config(directory=str(shared)), Context(directory=run))
        return half.sender(Trainer())

    one, two = map(made, runs)
    first, second = (Path(each.write(1)["directory"]) for each in (one, two))
    two.keep(str(second))
    two.keep(two.write(2)["directory"])
    assert first.is_dir()
    assert not second.is_dir()
    made(runs[0]).write(2)  # as a run that is resumed, which nobody serves any more
    assert not first.is_dir()
    assert all((shared / name / "file").is_dir() for name in OTHERS)
    assert len(list(shared.iterdir())) == len(OTHERS) + 2


def test_folders_of_others_in_a_directory_of_snapshots_survive(tmp_path):
    for name in OTHERS:
        (tmp_path / name / "file").mkdir(parents=True)
    sender = _sender(tmp_path)
    sender.keep(sender.write(1)["directory"])
    sender.keep(sender.write(2)["directory"])
    assert all((tmp_path / name / "file").is_dir() for name in OTHERS)
    assert len(list(tmp_path.iterdir())) == len(OTHERS) + 1


def test_folders_of_others_beside_received_snapshots_survive(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    host = process_identity().rsplit(".", 2)[0]
    others = ("2024-runs", f"{ended.pid}-data", f"elsewhere.{ended.pid}.7-0123abcd")
    others += (f"{process_identity()}-0123abcd",)
    dead = tmp_path / f"{host}.{ended.pid}.7-0123abcd"
    for name in (*others, dead.name):
        (tmp_path / name / "file").mkdir(parents=True)
    DeltaReceiver(Engine(), local=tmp_path, file_bytes=4000)
    assert all((tmp_path / name / "file").is_dir() for name in others)
    assert not dead.exists()


def test_other_ranks_gather_to_the_end_when_the_disk_is_full(tmp_path):
    """Or they would wait for rank 0 for ever, in the middle of a collective call."""
    exported = []

    class Counting(Trainer):
        def export(self):
            for pair in super().export():
                exported.append(pair[0])
                yield pair

    with _full_disk(1000), pytest.raises(WeightSyncError, match="cannot write"):
        _sender(tmp_path, Counting()).write(1)
    assert len(exported) == 6


@pytest.mark.parametrize("damage", ["bytes", "shape", "missing", "manifest", "file"])
def test_damaged_snapshot_is_refused_and_named(tmp_path, damage):
    from safetensors.torch import load_file, save_file

    written = _sender(tmp_path).write(1)
    folder = Path(written["directory"])
    file = folder / "model-00002.safetensors"
    held = load_file(file)
    if damage == "bytes":
        held["layer.3"][7] += 1
    elif damage == "shape":
        held["layer.3"] = held["layer.3"].reshape(50, 10)
    elif damage == "missing":
        del held["layer.3"]
    save_file(held, file)
    if damage == "manifest":
        (folder / "snapshot.json").write_text(json.dumps({"version": 1}))
    elif damage == "file":
        file.unlink()
    said = {
        "bytes": r"1 tensors in .* differ from what the trainer sent: layer\.3",
        "shape": r"layer\.3 is F32 \[50, 10\], not float32 \[500\]",
        "missing": r"layer\.3 is missing",
        "manifest": r"snapshot\.json cannot be read, so the snapshot is not complete",
        "file": r"cannot read .*model-00002",
    }[damage]
    engine = Engine()
    receiver = SnapshotReceiver(engine)

    async def play():
        receiver.look(str(folder), written["digest"])
        await receiver.load(1, str(folder), True)

    with pytest.raises(WeightSyncError, match=said):
        asyncio.run(play())
    assert engine.serving == -1


# ---------------------------------------------------------------- buckets


DYING = """
import os, sys, torch
from pathlib import Path
from miles_plugins.transport.handles import IpcSender

class Trainer:
    def export(self):
        yield "layer", torch.zeros(5000)

how = {"rank": 0, "bucket_bytes": 4000, "directory": Path(sys.argv[1]), "model": None}
IpcSender(Trainer(), **how).fill(0, True)
os._exit(9)
"""


@pytest.mark.slow
def test_shared_memory_of_a_trainer_that_died_is_freed(tmp_path):
    before = set(os.listdir("/dev/shm"))
    work = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=False, timeout=200)
    assert work.returncode == 9
    deadline = time.monotonic() + 30

    def left():
        return {name for name in set(os.listdir("/dev/shm")) - before if "torch_" in name}

    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()


def test_engine_that_dies_in_the_group_is_an_error_and_no_hang(tmp_path):
    there, ours = os.pipe()

    def die():
        port = int(os.read(there, 16))
        receiver = BroadcastReceiver(Engine(), backend="gloo", timeout_s=30.0)
        asyncio.run(receiver.join("127.0.0.1", port, "group", 1, 2))
        os._exit(9)

    if (pid := os.fork()) == 0:
        try:
            die()
        finally:
            os._exit(1)
    how = {"backend": "gloo", "timeout_s": 30.0, "directory": tmp_path, "model": None}
    sender = BroadcastSender(Trainer(), rank=0, bucket_bytes=4000, **how)
    os.write(ours, str(sender.open("127.0.0.1", "group", 2)).encode())
    asyncio.run(sender.join())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    began = time.monotonic()

    def send():
        for slot, first in ((0, True), (1, False), (0, False)):
            sender.fill(slot, first)

    with pytest.raises(WeightSyncError, match="transport nccl: a broadcast"):
        send()
    sender.give_up()
    assert time.monotonic() - began < 20


def test_place_where_the_sides_meet_is_closed_to_other_addresses(tmp_path):
    how = {"backend": "gloo", "timeout_s": 5.0, "directory": tmp_path, "model": None}
    sender = BroadcastSender(Trainer(), rank=0, bucket_bytes=4000, **how)
    port = sender.open("127.0.0.1", "group", 2)
    socket.create_connection(("127.0.0.1", port), 5.0).close()
    with pytest.raises(ConnectionRefusedError):  # what listens everywhere is here as well
        socket.create_connection(("127.0.0.2", port), 5.0)
    with pytest.raises(WeightSyncError, match=r"cannot listen at 192\.0\.2\.1"):
        sender.open("192.0.2.1", "group", 2)


def test_bucket_goes_before_anybody_has_come_to_receive_it(tmp_path):
    """NCCL connects in the first broadcast, which receivers begin when they are told of it."""
    here = threading.Event()

    class Waits:
        device, sent = torch.device("cpu"), 0

        def broadcast(self, flat):
            assert here.wait(20.0)
            return len(flat)

        def wait(self, work):
            self.sent += work

        def leave(self):
            here.set()

    how = {"backend": "gloo", "timeout_s": 0.2, "directory": tmp_path, "model": None}
    sender = BroadcastSender(Trainer(), rank=0, bucket_bytes=4000, **how)
    sender._group = group = Waits()
    sender.fill(0, True)
    sender.fill(1, False)
    with pytest.raises(WeightSyncError, match=r"nobody came to a broadcast within 0\.2 s"):
        sender.free(0)
    here.set()
    sender.finish()
    assert group.sent > 0
    sender.give_up()


def test_broadcast_that_hangs_on_the_gpu_is_waited_for_as_long_as_its_limit(monkeypatch):
    never = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: never)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    group = Group.__new__(Group)
    group._limit, group.device = timedelta(seconds=0.05), torch.device("cuda")
    with pytest.raises(WeightSyncError, match=r"did not end within 0\.05 s"):
        group.wait(SimpleNamespace(wait=lambda limit: True))


@pytest.mark.parametrize(
    ("backend", "cumem", "hints"), [("nccl", False, 1), ("nccl", True, 0), ("gloo", False, 0)]
)
def test_broadcast_that_hangs_over_legacy_handles_says_what_may_help(
    backend, cumem, hints, tmp_path
):
    """The hint was in a worker's error, which came too late: the driver had given the bucket up."""

    class Half:
        async def begun(self, slot):
            pass

        async def take(self, bucket):
            await asyncio.sleep(60)

    config = Nccl.Config(backend=backend, cumem=cumem, timeout_s=0.05)
    transport = Nccl(config, Context(directory=tmp_path))
    trainer, engine = (FakeHandle(of, {of: Half()}) for of in ("sender", "receiver"))
    with pytest.raises(WeightSyncError, match=r"\(w\) was not sent and taken within") as raised:
        asyncio.run(transport.move(trainer, [engine], {"slot": 0, "tensors": [{"name": "w"}]}))
    notes = getattr(raised.value, "__notes__", [])
    assert ["transport.cumem=true" in note for note in notes] == [True] * hints


def test_uses_of_gpu_memory_by_handles_that_nobody_opened_end(tmp_path, monkeypatch):
    ended = []
    release = lambda *use: ended.append(use)  # noqa: E731
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release)
    how = {"rank": 0, "bucket_bytes": 4000, "directory": tmp_path, "model": None}
    sender = IpcSender(Trainer(), **how)
    sender.fill(0, True, native=True)
    sender.finish()
    assert not ended  # only a GPU's memory has uses that are counted
    sender._uses += [(b"/torch_1_2", 7)]
    sender.give_up()  # somebody may still read it
    assert not ended
    sender.finish()
    sender.finish()
    assert ended == [(b"/torch_1_2", 7)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it takes a GPU")
def test_gpu_memory_of_buckets_that_nobody_opened_is_freed(tmp_path):
    class OnGpu(Trainer):
        def export(self):
            yield from ((name, tensor.cuda()) for name, tensor in super().export())

    how = {"rank": 0, "bucket_bytes": 4000, "directory": tmp_path, "model": None}
    sender = IpcSender(OnGpu(), **how)
    contents([torch.zeros(8, device="cuda")])  # its keys stay on the GPU
    before = torch.cuda.memory_allocated()
    for native in (False, True, True):
        slot, last = 0, False
        while not last:
            last = bool(sender.fill(slot % 2, not slot, native)["last"])
            slot += 1
        sender.finish()
    assert torch.cuda.memory_allocated() == before


# ---------------------------------------------------------------- what is refused before a run


def _planned(placement="split", trainer=None, engine=None):
    specs = {
        "trainer": SimpleNamespace(config=trainer or {}),
        "engine": SimpleNamespace(config=engine or {}),
    }
    return SimpleNamespace(settings=SimpleNamespace(placement=placement), specs=specs)


def test_handles_are_refused_between_gpus_that_are_not_shared():
    (fault,) = Ipc.check(Ipc.Config(), _planned("split"))
    assert "placement is split" in fault
    assert "use placement=colocated, or transport=nccl" in fault
    assert Ipc.check(Ipc.Config(), _planned("colocated")) == []


def test_nccl_is_refused_on_one_gpu_and_on_cpus(monkeypatch):
    (fault,) = Nccl.check(Nccl.Config(), _planned("colocated"))
    assert "NCCL refuses two ranks on one GPU; use transport=ipc" in fault
    (fault,) = Nccl.check(Nccl.Config(), _planned(engine={"device": "cpu"}))
    assert "engine.device is cpu" in fault
    assert "transport.backend=gloo" in fault
    planned = _planned(engine={"device": "cuda"})
    planned.specs["engine"].name = "torch"
    (fault,) = Nccl.check(Nccl.Config(), planned)
    assert "engine=torch computes on the first GPU, where trainer rank 0 does" in fault
    card = Gpu(name="H200", total=0)
    monkeypatch.setattr("miles_plugins.transport.nccl.gpus_here", lambda: [card] * 3)
    planned = _planned(trainer={"workers": 2}, engine={"workers": 1, "tp": 2})
    (fault,) = Nccl.check(Nccl.Config(), planned)
    assert "are 4 ranks, and NCCL needs a GPU for each; here are 3" in fault
    assert Nccl.check(Nccl.Config(), _planned(trainer={"workers": 4}, engine={"url": "x"})) == []
    both = {"trainer": {"workers": 2}, "engine": {"workers": 1, "first_gpu": 0}}
    (fault,) = Nccl.check(Nccl.Config(), _planned(**both))
    assert "engines begin at GPU 0, and trainer ranks have GPUs 0 to 1" in fault
    assert "use engine.first_gpu=2" in fault
    both["engine"]["first_gpu"] = 2
    assert Nccl.check(Nccl.Config(), _planned(**both)) == []
    planned.specs["runtime"] = Spec(kind="runtime", name="ray")  # other machines have GPUs too
    assert Nccl.check(Nccl.Config(), planned) == []
    assert Nccl.check(Nccl.Config(backend="gloo"), _planned("colocated")) == []


@pytest.mark.parametrize(
    ("cumem", "engine", "said"),
    [
        (False, {}, ""),
        (True, {"environment": {"NCCL_CUMEM_ENABLE": "1"}}, ""),
        (True, {"flags": {"enable_symm_mem": True}}, ""),
        (False, {"environment": {"NCCL_CUMEM_ENABLE": "1"}}, "engine.environment has"),
        (False, {"flags": {"enable_symm_mem": True}}, "enable_symm_mem sets it"),
        (False, {"flags": {"enable-symm-mem": True}}, "enable_symm_mem sets it"),
    ],
)
def test_servers_that_take_nccls_memory_otherwise_than_the_trainer_are_refused(cumem, engine, said):
    """A server's NCCL said "invalid argument" in the first broadcast."""
    engine = {"url": "http://127.0.0.1:1", **engine}
    faults = Nccl.check(Nccl.Config(cumem=cumem), _planned(engine=engine))
    assert len(faults) == bool(said)
    if faults:
        assert said in faults[0] and "use transport.cumem=true" in faults[0]
    assert Nccl.variables(Nccl.Config(cumem=cumem)) == {"NCCL_CUMEM_ENABLE": "01"[cumem]}
    assert Nccl.variables(Nccl.Config(backend="gloo")) == {}


def test_broadcast_that_fails_in_a_servers_nccl_names_what_both_ends_need(monkeypatch):
    class Server:
        async def post(self, path, body):
            raise WeightSyncError("HTTP 400: NCCL error in: NCCLUtils.cpp: 'invalid argument'")

    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    receiver = BroadcastReceiver(None, backend="nccl", timeout_s=1.0)
    with pytest.raises(WeightSyncError) as found:
        asyncio.run(receiver.hand_on(Server(), {"tensors": []}))
    assert "NCCL_CUMEM_ENABLE is 1 for the trainer (transport.cumem)" in found.value.detail


def test_rdma_and_differences_are_refused_without_what_they_need(monkeypatch, tmp_path):
    monkeypatch.setattr("miles_plugins.transport.rdma._DEVICES", tmp_path / "infiniband")
    (fault,) = Rdma.check(Rdma.Config(), _planned())
    assert "there is no RDMA device here" in fault and "use transport.protocol=tcp" in fault
    assert Rdma.check(Rdma.Config(protocol="tcp"), _planned()) == []
    elsewhere = _planned()
    elsewhere.specs["runtime"] = Spec(kind="runtime", name="ray")
    assert Rdma.check(Rdma.Config(), elsewhere) == []
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert Rdma.check(Rdma.Config(), _planned()) == DiskDelta.check(DiskDelta.Config()) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Rdma.check(Rdma.Config(), elsewhere) == []
    (fault,) = Rdma.check(Rdma.Config(), _planned())
    assert fault.startswith("Mooncake is not installed; pip install 'miles[rdma]'")
    assert DiskDelta.check(DiskDelta.Config()) == [
        "zstandard is not installed; pip install 'miles[delta]'"
    ]


@pytest.mark.parametrize("kind", [Disk, Ipc, Nccl])
def test_numbers_that_cannot_be_meant_are_refused(kind, tmp_path):
    with pytest.raises(ConfigError, match="verify_every is 0"):
        kind(kind.Config(verify_every=0), Context(directory=tmp_path))


def test_transport_that_cannot_reach_an_engine_is_refused():
    from miles.protocols import Spec
    from miles.registry.conformance import carried

    class Files:
        brings = ("directory",)

    class Streams:
        def load(self): ...

    class Registry:
        def component(self, kind, name):
            return {"transport": Files, "engine": Streams}[kind]

    specs = {kind: Spec(kind=kind, name=kind) for kind in ("transport", "engine")}
    (fault,) = carried(SimpleNamespace(specs=specs, samples=True), Registry())
    assert "brings weights as directory, and engine 'engine' takes them as tensors" in fault
    assert carried(SimpleNamespace(specs=specs, samples=False), Registry()) == []
