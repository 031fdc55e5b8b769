"""Updates of SGLang servers that go wrong, and what their proof does beside the event loop: no
server is left with weights of two versions, paused for everybody, or silent."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from miles import Context, EngineError, Request, Sampling, WeightsDiffer, WeightSyncError
from miles.testing import FakeHandle
from miles_plugins.engine.sglang import Sglang, facts, publishing
from miles_plugins.transport.calling import everywhere
from miles_plugins.transport.serving import Serving

_SPEC = importlib.util.spec_from_file_location(
    "native_server", Path(__file__).with_name("native_server.py")
)
native = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(native)

MODEL = SimpleNamespace(hf_config=dict, directory=lambda: None)


@pytest.fixture
def play(tmp_path):
    """Run a coroutine function of (client, server) against a server that is up."""

    def run(function, **config):
        async def main():
            (tmp_path / "key").write_text(native.KEY)
            server = native.NativeServer()
            async with server.up() as url:
                made = Sglang.Config(url=url, api_key_file=str(tmp_path / "key"), **config)
                client = Sglang(made, Context(directory=tmp_path, model=MODEL))
                try:
                    async with asyncio.timeout(20):
                        return await function(client, server)
                finally:
                    await client.close()

        return asyncio.run(main())

    return run


def _request():
    tokens = np.arange(40, 50, dtype=np.int32)
    sampling = Sampling(max_new_tokens=12)
    return Request(id="g0.0/0", key="g0.0", tokens=tokens, sampling=sampling, seed=5)


async def _serves(client, version):
    assert await client.version() == version
    made = await client.generate(_request())
    assert [span.version for span in made.spans] == [version]


class _Beside:
    """A task that runs beside; `turns` that it had while a function that blocks its thread ran."""

    def __init__(self):
        self.turns, self._all = -1, 0

    def blocks(self):
        before = self._all
        time.sleep(0.3)
        self.turns = self._all - before

    @asynccontextmanager
    async def running(self):
        async def tick():
            while True:
                self._all += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        yield
        ticking.cancel()


# ---------------------------------------------------------------- the proof


def test_scramble_that_broke_half_way_leaves_no_scrambled_tensor(play, checkpoint, caplog):
    async def check(client, server):
        server.reset_fault = "CUDA out of memory"
        await client.load_directory(1, checkpoint)
        assert server.tensors == dict.fromkeys(server.tensors, "of 1")
        await _serves(client, 1)

    caplog.set_level(logging.INFO)
    play(check)
    assert "weights cannot be scrambled" in caplog.text
    assert "version 1: scrambled" not in caplog.text


def test_scramble_that_broke_and_is_not_read_over_makes_the_engine_unusable(play, checkpoint):
    async def check(client, server):
        server.reset_fault, server.untouched = "CUDA out of memory", {"t0"}
        with pytest.raises(WeightSyncError, match="do not come from the files: t0"):
            await client.load_directory(1, checkpoint)
        with pytest.raises(EngineError, match="cannot be used"):
            await client.generate(_request())

    play(check)


def test_proof_that_fails_twice_says_the_same_words_to_the_driver(play, checkpoint):
    """By which it knows that another restart would not help."""

    async def check(client, server):
        server.untouched, faults = {"t0"}, []
        for _ in range(2):
            client._watch.broken = ""  # as a server that was started again
            half = SimpleNamespace(load=partial(client.load_directory, 1, checkpoint))
            engine = FakeHandle("engine", {"receiver": half})
            with pytest.raises(WeightSyncError) as found:
                await everywhere([engine], "disk", "receiver.load")
            faults.append(str(found.value))
        assert faults[0] == faults[1] and faults[0].endswith(": t0")

    play(check)


def test_head_that_a_tied_checkpoint_does_not_bring_is_named(play, checkpoint):
    async def check(client, server):
        server.tensors = {"lm_head.weight": "made up", "t0": "made up"}
        server.untouched = {"lm_head.weight"}
        for tied, told in ((False, 0), (True, 1)):
            client._watch.broken = ""
            (checkpoint / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
            with pytest.raises(WeightsDiffer, match=r"1 of 2 tensors .*: lm_head\.weight") as found:
                await client.load_directory(1, checkpoint)
            assert found.value.detail.count("the server has an output head of its own") == told

    play(check)


def test_server_without_checksums_is_told_of_and_served(play, checkpoint, caplog):
    async def check(client, server):
        server.refuses_checksums = True
        await client.load_directory(1, checkpoint)
        assert server.tensors == dict.fromkeys(server.tensors, "of 1")
        await _serves(client, 1)

    play(check)
    assert "cannot be proved in this server" in caplog.text


def test_server_is_proved_again_when_the_transport_compares(play, checkpoint):
    async def check(client, server):
        serving = Serving(client, "disk")
        for version, compare in ((1, True), (2, False), (3, True)):
            (checkpoint / "model.safetensors").write_bytes(b"weights of %d" % version)
            await serving.load_directory(version, checkpoint, [], tensors=list, compare=compare)
        resets = [at for at, (_, body) in enumerate(server.asked) if body == RESET]
        assert len(resets) == 2
        server.untouched = {"t1"}
        with pytest.raises(WeightSyncError, match=r"1 of 3 tensors do not come from the files: t1"):
            await serving.load_directory(4, checkpoint, [], tensors=list, compare=True)

    play(check)


RESET = {"action": "reset_tensors"}


@pytest.mark.parametrize("reply", [{"ranks": [{"message": "no"}]}, {"ranks": ["no"]}])
def test_checksums_that_are_none_are_an_engine_error(reply):
    with pytest.raises(EngineError, match=r"/weights_checker has no checksums: .*no"):
        facts.checksums(reply)


# ---------------------------------------------------------------- the event loop


def test_hashing_a_large_checkpoint_does_not_silence_the_worker(play, checkpoint, monkeypatch):
    beside = _Beside()

    def slow(directory):
        beside.blocks()
        return "digest"

    async def check(client, server):
        async with beside.running():
            await client.load_directory(1, checkpoint)

    monkeypatch.setattr(publishing, "content", slow)
    play(check)
    assert beside.turns > 3


def test_writing_large_tensors_does_not_silence_the_worker(play):
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch")

    beside = _Beside()

    def slow():
        beside.blocks()
        yield "a", torch.ones(2)

    async def check(client, server):
        async with beside.running():
            await client.load(1, slow())
        await _serves(client, 1)

    play(check)
    assert beside.turns > 3


def test_update_that_is_cancelled_while_files_are_written_leaves_none(play, tmp_path):
    torch = pytest.importorskip("torch")

    def slow():
        time.sleep(0.2)
        yield "a", torch.ones(2)

    async def check(client, server):
        task = asyncio.create_task(client.load(1, slow()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not list((tmp_path / "engines").glob("weights-*"))

    play(check)


# ---------------------------------------------------------------- files that are not there


def test_snapshot_that_is_gone_before_it_is_compared_breaks_the_engine_and_frees_the_server(
    play, checkpoint, monkeypatch
):
    def gone(directory):
        raise FileNotFoundError(2, "No such file or directory", str(directory))

    async def check(client, server):
        with pytest.raises(WeightSyncError, match=r"version 1 was not proved: FileNotF") as caught:
            await client.load_directory(1, checkpoint)
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        assert not server.paused
        for call in (client.version(), client.generate(_request())):
            with pytest.raises(EngineError, match=r"cannot be used: .*No such file"):
                await call

    monkeypatch.setattr(publishing, "content", gone)
    play(check)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_damaged_record_of_checksums_is_named(play, checkpoint, tmp_path, text):
    record = tmp_path / "engines" / "checksums" / f"{publishing.content(checkpoint)}.json"
    record.parent.mkdir(parents=True)
    record.write_text(text)

    async def check(client, server):
        with pytest.raises(WeightSyncError, match=rf"{record.name} is damaged .*; delete it"):
            await client.load_directory(1, checkpoint)
        assert not server.paused
        with pytest.raises(EngineError, match="cannot be used"):
            await client.version()

    play(check)


def test_record_that_cannot_be_written_is_only_told_of(play, checkpoint, tmp_path, caplog):
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "checksums").write_text("no folder")

    async def check(client, server):
        await client.load_directory(1, checkpoint)
        await _serves(client, 1)

    play(check)
    assert "other servers cannot be compared with this one" in caplog.text


def test_update_that_could_not_begin_leaves_the_old_weights(play, checkpoint):
    async def check(client, server):
        await client.load_directory(1, checkpoint)
        server.begin_status = 500
        with pytest.raises(WeightSyncError, match="/begin_weight_update: HTTP 500"):
            async with client.updating(2):
                raise AssertionError("it was refused")
        assert not server.paused
        await _serves(client, 1)

    play(check)
