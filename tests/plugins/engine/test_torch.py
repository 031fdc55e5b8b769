"""What the embedded engine promises around sampling: life cycle, versions, prefixes, refusals,
accounts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles import ConfigError, EngineError, Gpu, Settings, Span, Spec, WeightSyncError
from miles.learn.digest import contents
from miles.session.partial import Partial
from miles_plugins.engine import torch as served
from miles_plugins.engine.torch import Torch, checks
from miles_plugins.precision.bf16 import Bf16


def _run(play):
    return asyncio.run(play())


async def _loaded(tiny, **config):
    engine = tiny.engine(**config)
    await engine.load(0, tiny.weights())
    return engine


def test_importing_the_entry_point_imports_no_torch():
    code = "import sys, miles_plugins.engine.torch as m; print(m.Torch, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[-1] == "False"


def test_requests_wait_for_the_first_load(tiny, request_for):
    async def play():
        engine = tiny.engine()
        assert await engine.version() == -1
        task = asyncio.ensure_future(engine.generate(request_for(0)))
        await asyncio.sleep(0.01)
        assert not task.done()
        assert (await engine.health())["waiting"] == 1
        await engine.load(4, tiny.weights())
        assert (await task).spans == (Span(start=0, stop=12, version=4),)

    _run(play)


def test_health_says_the_longest_context_that_fits(tiny):
    async def play():
        for max_len in (40, 0):
            engine = await _loaded(tiny, max_len=max_len)
            assert (await engine.health())["max_len"] == (max_len or engine.max_len)

    _run(play)


def test_group_computes_its_prompt_once(tiny, request_for):
    async def play():
        engine = await _loaded(tiny, rows=16)
        first = request_for(0, size=33, new=9)
        group = [replace(first, id=f"g{i}", key=f"g{i}", seed=i) for i in range(8)]
        done = await asyncio.gather(*(engine.generate(r) for r in group))
        assert sorted(c.cached_tokens for c in done) == [0] + [33] * 7
        late = await engine.generate(replace(first, id="late", key="late", seed=99))
        assert late.cached_tokens == 32  # the last prompt token is run again for its logits
        health = await engine.health()
        assert health["prompt_tokens"] == 9 * 33
        assert health["cached_tokens"] == 7 * 33 + 32
        assert health["tokens"] == 9 * 9
        assert health["busy_s"] > 0
        assert len({c.tokens.tobytes() for c in done}) == 8

    _run(play)


def test_late_arrival_shares_the_prompt_of_a_running_request(tiny, request_for, assert_equal):
    async def play():
        engine = await _loaded(tiny, rows=16)
        first = request_for(0, size=30, new=60)
        running = asyncio.ensure_future(engine.generate(first))
        while (await engine.health())["tokens"] < 5:
            await asyncio.sleep(0)
        late = await engine.generate(replace(first, id="late", key="late", seed=5))
        assert late.cached_tokens == 29
        fresh = await _loaded(tiny, prefix_reuse=False)
        assert_equal(late, await fresh.generate(replace(first, id="x", key="x", seed=5)))
        assert_equal(await running, await fresh.generate(first))

    _run(play)


def test_load_forgets_cached_prefixes(tiny, request_for, assert_equal):
    async def play():
        engine = await _loaded(tiny)
        await engine.generate(request_for(0))
        await engine.load(1, tiny.weights(tiny.other))
        after = await engine.generate(request_for(0))
        assert after.cached_tokens == 0
        fresh = tiny.engine()
        await fresh.load(1, tiny.weights(tiny.other))
        assert_equal(after, await fresh.generate(request_for(0)))

    _run(play)


def test_load_between_forwards_gives_exact_spans_and_logprobs(tiny, request_for):
    """Tokens after a reload are sampled and scored as the new weights alone would have it."""

    async def play():
        engine = await _loaded(tiny)
        asked = request_for(0, size=10, new=50)
        task = asyncio.ensure_future(engine.generate(asked))
        while (await engine.health())["tokens"] < 20:
            await asyncio.sleep(0)
        sampled = int((await engine.health())["tokens"])
        await engine.load(3, tiny.weights(tiny.other))
        got = await task
        assert got.spans == (
            Span(start=0, stop=sampled, version=0),
            Span(start=sampled, stop=50, version=3),
        )
        old, new = await _loaded(tiny), tiny.engine()
        await new.load(3, tiny.weights(tiny.other))
        whole = np.concatenate([asked.tokens, got.tokens])
        by_old = (await old.score(whole))[10:]
        by_new = (await new.score(whole))[10:]
        assert got.logprobs[:sampled].tobytes() == by_old[:sampled].tobytes()
        assert got.logprobs[sampled:].tobytes() == by_new[sampled:].tobytes()
        assert np.abs(by_old - by_new).max() > 0.1

    _run(play)


@pytest.mark.parametrize("new", [50, 80])
def test_load_in_place_keeps_running_caches_and_shares_them_with_nobody(
    tiny, request_for, assert_equal, new
):
    """Spans record both versions; what comes later is as on an engine that never saw the old."""

    async def play():
        engine = tiny.engine(settings=Settings(pause="in_place"))
        await engine.load(0, tiny.weights())
        asked = request_for(0, size=10, new=new)
        task = asyncio.ensure_future(engine.generate(asked))
        while (await engine.health())["tokens"] < 20:
            await asyncio.sleep(0)
        before = int((await engine.health())["tokens"])
        await engine.load(3, tiny.weights(tiny.other))
        late = request_for(7, tokens=asked.tokens, new=12)
        other = await engine.generate(late)
        got = await task
        assert [s.version for s in got.spans] == [0, 3] and got.spans[0].stop == before
        fresh = tiny.engine()
        await fresh.load(3, tiny.weights(tiny.other))
        assert_equal(other, await fresh.generate(late))
        whole = np.concatenate([asked.tokens, got.tokens])
        recomputed = (await fresh.score(whole))[10 + before :]
        assert np.abs(got.logprobs[before:] - recomputed).max() > 0.01  # under kept keys and values
        again = request_for(8, tokens=whole[:30], new=6)
        assert_equal(await engine.generate(again), await fresh.generate(again))

    _run(play)


def test_load_that_aborts_ends_what_runs_and_partial_goes_on(tiny, request_for):
    async def play():
        engine = tiny.engine(settings=Settings(pause="abort"))
        await engine.load(0, tiny.weights())
        asked = request_for(0, size=10, new=50)
        cut = asyncio.ensure_future(engine.generate(asked))
        whole = asyncio.ensure_future(Partial(engine).generate(request_for(1, size=9, new=50)))
        while (await engine.health())["tokens"] < 40:
            await asyncio.sleep(0)
        await engine.load(3, tiny.weights(tiny.other))
        assert (await cut).finish == "abort" and 0 < len((await cut).tokens) < 50
        made = await whole
        assert made.finish == "length" and len(made.tokens) == len(made.logprobs) == 50
        assert [s.version for s in made.spans] == [0, 3] and made.spans[-1].stop == 50

    _run(play)


def test_partial_of_the_same_weights_is_what_it_would_have_been(tiny, request_for, assert_equal):
    """Cut anywhere and gone on with, a completion is bit-equal to one that was never cut."""

    async def play():
        asked = request_for(0, size=10, new=40, temperature=1.0)
        whole = await (await _loaded(tiny)).generate(asked)
        engine = await _loaded(tiny)
        task = asyncio.ensure_future(Partial(engine).generate(asked))
        for tokens in (7, 19, 31):
            while (await engine.health())["tokens"] < tokens:
                await asyncio.sleep(0)
            await engine.abort()
        assert_equal(await task, whole)

    _run(play)


def test_load_of_an_older_version_under_running_requests_is_refused(tiny, request_for):
    async def play():
        engine = await _loaded(tiny)
        await engine.load(5, tiny.weights())
        task = asyncio.ensure_future(engine.generate(request_for(0, new=60)))
        await asyncio.sleep(0.005)
        with pytest.raises(WeightSyncError, match="version 4 is older than 5, and 1 requests are"):
            await engine.load(4, tiny.weights())
        await task
        await engine.load(4, tiny.weights())
        assert await engine.version() == 4

    _run(play)


def test_refused_weights_leave_the_old_ones(tiny, request_for, assert_equal):
    async def play():
        engine = await _loaded(tiny)
        before = await engine.generate(request_for(0))
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight is missing"):
            await engine.load(1, [w for w in tiny.weights() if w[0] != "model.norm.weight"])
        assert await engine.version() == 0
        assert_equal(before, await engine.generate(request_for(0)))

    _run(play)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_of_a_directory_are_those_of_a_publish(
    make_tiny, request_for, assert_equal, tmp_path, precision
):
    """An evaluation fleet must sample what the rollout engines would."""
    from safetensors.torch import save_file

    async def play():
        tiny = make_tiny("qwen3", precision)
        folder = tmp_path / "model"
        folder.mkdir()
        with pytest.raises(WeightSyncError, match="holds no safetensors files"):
            await tiny.engine().load_directory(3, folder)
        masters = {name: tensor.contiguous() for name, tensor in tiny.weights()}
        save_file(masters, folder / "model.safetensors")
        export = getattr(torch, precision.replace("fp", "float").replace("bf", "bfloat"))
        published, read = tiny.engine(), tiny.engine()
        await published.load(3, [(name, t.to(export)) for name, t in masters.items()])
        await read.load_directory(3, folder)
        assert await read.version() == 3
        assert_equal(await published.generate(request_for(0)), await read.generate(request_for(0)))
        (folder / "model.safetensors").write_bytes(b"no")
        with pytest.raises(WeightSyncError, match=r"cannot read .*model\.safetensors"):
            await read.load_directory(4, folder)
        assert await read.version() == 3

    _run(play)


def test_taking_large_weights_does_not_silence_the_worker(tiny, request_for, monkeypatch):
    """Nor does it mix versions: the switch is between two forwards."""
    monkeypatch.setattr(served, "_BRIEF", 0, raising=False)

    async def play():
        engine = await _loaded(tiny)
        ticks = 0

        def slow():
            for pair in tiny.weights(tiny.other):
                time.sleep(0.01)
                yield pair

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        before = asyncio.create_task(engine.generate(request_for(0, new=4)))
        await engine.load(1, slow())
        assert ticks > 3
        ticking.cancel()
        assert [span.version for span in (await before).spans] == [0]
        assert [span.version for span in (await engine.generate(request_for(0))).spans] == [1]
        running = asyncio.create_task(engine.generate(request_for(1, new=80)))
        while not (await engine.health())["active"]:
            await asyncio.sleep(0)
        await engine.pause()
        with pytest.raises(WeightSyncError, match="version 0 is older than 1, and 1 requests are"):
            await engine.load(0, tiny.weights())
        await engine.resume()
        await running

    _run(play)


def test_abort_ends_by_key_with_what_there_is(tiny, request_for, assert_equal):
    async def play():
        engine = await _loaded(tiny, rows=4)
        asked = [request_for(i, new=80) for i in range(6)]
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in asked]
        while (await engine.health())["tokens"] < 40:
            await asyncio.sleep(0)
        assert await engine.abort(["k1", "k5", "nobody"]) == 2
        one, five = await tasks[1], await tasks[5]
        assert (one.finish, five.finish) == ("abort", "abort")
        assert 0 < len(one.tokens) < 80
        assert one.spans == (Span(start=0, stop=len(one.tokens), version=0),)
        assert len(five.tokens) == 0  # it was still waiting
        assert five.spans == ()
        rest = [await tasks[i] for i in (0, 2, 3, 4)]
        assert {c.finish for c in rest} == {"length"}
        fresh = await _loaded(tiny, rows=4)
        assert_equal(rest[3], await fresh.generate(asked[4]))
        assert await engine.abort() == 0

    _run(play)


def test_aborted_leader_hands_its_prompt_on(tiny, request_for, assert_equal):
    """Others wait for a prompt that is half computed when its request is aborted."""

    async def play():
        engine = await _loaded(tiny, rows=4, chunk=4)
        first = request_for(0, size=40, new=8)
        group = [replace(first, id=f"g{i}", key=f"g{i}", seed=i) for i in range(3)]
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in group]
        for _ in range(6):
            await asyncio.sleep(0)
        assert (await engine.health())["tokens"] == 0
        assert await engine.abort(["g0"]) == 1
        assert (await tasks[0]).finish == "abort"
        fresh = await _loaded(tiny, rows=4, chunk=4, prefix_reuse=False)
        for task, asked in zip(tasks[1:], group[1:], strict=True):
            assert_equal(await task, await fresh.generate(asked))

    _run(play)


def test_cancelled_caller_frees_its_row(tiny, request_for):
    async def play():
        engine = await _loaded(tiny, rows=4)
        tasks = [asyncio.ensure_future(engine.generate(request_for(i, new=80))) for i in range(6)]
        await asyncio.sleep(0.01)
        for task in (tasks[0], tasks[5]):
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(d, asyncio.CancelledError) for d in done] == [True, *[False] * 4, True]
        health = await engine.health()
        assert (health["active"], health["waiting"]) == (0, 0)

    _run(play)


def test_pause_and_sleep_hold_requests_and_change_nothing(tiny, request_for, assert_equal):
    async def play():
        engine, fresh = await _loaded(tiny), await _loaded(tiny)
        asked = request_for(0, new=80)
        for stop, go in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
            task = asyncio.ensure_future(engine.generate(asked))
            before = (await engine.health())["tokens"]
            while (await engine.health())["tokens"] < before + 10:
                await asyncio.sleep(0)
            await stop()
            held = (await engine.health())["tokens"]
            await asyncio.sleep(0.02)
            assert (await engine.health())["tokens"] == held
            assert not task.done()
            await go()
            assert_equal(await task, await fresh.generate(asked))

    _run(play)


def test_load_while_asleep_is_served_after_waking(tiny, request_for, assert_equal):
    async def play():
        engine, fresh = await _loaded(tiny), tiny.engine()
        await engine.sleep()
        await engine.load(2, tiny.weights(tiny.other))
        await engine.wake()
        await fresh.load(2, tiny.weights(tiny.other))
        got = await engine.generate(request_for(0))
        assert got.spans[0].version == 2
        assert_equal(got, await fresh.generate(request_for(0)))

    _run(play)


def test_stop_ids_of_any_number_end_a_completion(tiny, request_for):
    async def play():
        engine = await _loaded(tiny)
        free = await engine.generate(request_for(0, new=30))
        stops = (int(free.tokens[7]), *range(300, 340))
        cut = await engine.generate(request_for(0, new=30, stop_ids=stops))
        assert cut.finish == "stop"
        assert cut.tokens.tolist() == free.tokens[: len(cut.tokens)].tolist()
        assert cut.tokens[-1] == stops[0]

    _run(play)


def test_completion_ends_where_the_context_does(tiny, request_for):
    async def play():
        engine = await _loaded(tiny, max_len=20)
        got = await engine.generate(request_for(0, size=15, new=100))
        assert (len(got.tokens), got.finish) == (5, "length")

    _run(play)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 96}, "'r0': 96 tokens do not fit: max_len is 96, and at least 1 must be left"),
        ({"size": 0}, "'r0': there are no tokens"),
        ({"tokens": np.array([1, 264], np.int32)}, "token 264 is outside the vocabulary of 264"),
        ({"tokens": np.array([-1], np.int32)}, "token -1 is outside"),
        ({"new": 0}, "max_new_tokens is 0, not at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0.0, not in \(0, 1\]"),
        ({"top_k": -2}, "top_k is -2"),
    ],
)
def test_generate_refuses_with_numbers(tiny, request_for, changes, message):
    async def play():
        engine = await _loaded(tiny)
        with pytest.raises(EngineError, match=message):
            await engine.generate(request_for(0, **changes))

    _run(play)


def test_generate_refuses_a_request_without_a_routing_key(tiny, request_for):
    async def play():
        engine = await _loaded(tiny)
        with pytest.raises(EngineError, match="'r0' has no routing key"):
            await engine.generate(replace(request_for(0), key=""))

    _run(play)


def test_full_queue_refuses(tiny, request_for):
    async def play():
        engine = await _loaded(tiny, rows=4, max_waiting=3)
        await engine.pause()
        held = [asyncio.ensure_future(engine.generate(request_for(i))) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="3 requests wait for 4 rows, max_waiting is 3"):
            await engine.generate(request_for(9))
        await engine.resume()
        await asyncio.gather(*held)

    _run(play)


def test_numbers_that_are_not_finite_fail_their_request_and_spoil_no_other(
    tiny, request_for, assert_equal
):
    """Finite weights that overflow in the forward: an error, and nothing left in the cache."""

    async def play():
        engine, fresh = await _loaded(tiny), await _loaded(tiny)
        huge = [(n, t * 2e38 if "v_proj" in n else t) for n, t in tiny.weights()]
        await engine.load(1, huge)
        with pytest.raises(EngineError, match="'r0': logits are not finite at token 8 under vers"):
            await engine.generate(request_for(0))
        await engine.load(2, tiny.weights())
        assert_equal(await engine.generate(request_for(0)), await fresh.generate(request_for(0)))

    _run(play)


def test_forward_that_raises_fails_requests_instead_of_hanging_them(tiny, request_for):
    async def play():
        engine = await _loaded(tiny)
        working = engine._batching.forward

        def broken(*args, **kwargs):
            raise MemoryError("no room")

        engine._batching.forward = broken
        broken.slots = working.slots
        tasks = [engine.generate(request_for(i)) for i in range(3)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(d) for d in done] == ["engine torch: MemoryError: no room"] * 3
        engine._batching.forward = working
        assert (await engine.generate(request_for(0))).finish == "length"

    _run(play)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rows": 3}, r"rows \(chunk is 0\) is 3; a forward needs at least 4 token slots"),
        ({"chunk": 2}, "chunk is 2; a forward needs at least 4"),
        ({"rows": 0}, "rows is 0; it must be at least 1"),
        ({"max_len": 999}, "max_len is 999, but the model's longest context is 256"),
        ({"max_len": 1}, "max_len is 1; it must be at least 2"),
        ({"device": "cuda"}, "device is cuda, but torch sees no GPU"),
    ],
)
def test_config_is_refused_with_its_reason(tiny, config, message):
    with pytest.raises(ConfigError, match=message):
        tiny.engine(**config)


def test_float16_engine_proves_weights_that_it_rounds(tiny):
    """bfloat16 has numbers that are too small for float16; others than their roundings are told."""
    recipe = Bf16(Bf16.Config(engine="float16"), None)
    tiny.context = replace(tiny.context, precision=recipe)
    sent = {name: tensor.bfloat16() * 0.02 for name, tensor in tiny.weights()}
    wanted = dict(zip(sent, contents(list(sent.values())), strict=True))
    assert any((t.half().bfloat16() != t).any() for t in sent.values())

    async def play():
        engine = tiny.engine()
        await engine.load(0, sent.items())
        assert await engine.digests() == wanted
        with torch.inference_mode():
            engine._batching.parameters.layers[1].down[3, 5] += 0.01
        found = await engine.digests()
        name = "model.layers.1.mlp.down_proj.weight"
        assert {n for n in wanted if found[n] != wanted[n]} == {name}
        await engine.load(1, ((n, t + 0.5) for n, t in sent.items()))
        assert all(found != wanted[n] for n, found in (await engine.digests()).items())

    _run(play)


LARGE = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip


def _faults(monkeypatch, *, gpus=0, runtime="local", **config):
    monkeypatch.setattr(checks, "gpus_here", lambda: [Gpu(name="H200", total=141 << 30)] * gpus)
    monkeypatch.setattr(checks, "memory_here", lambda: 200 << 30)
    planned = SimpleNamespace(
        built={
            "model": SimpleNamespace(hf_config=lambda: LARGE),
            "precision": SimpleNamespace(engine="bfloat16"),
        },
        specs={"runtime": Spec(kind="runtime", name=runtime, config={})},
    )
    return Torch.check(Torch.Config(**config), planned)


def test_check_names_a_gpu_that_is_not_there_and_a_model_that_does_not_fit(monkeypatch):
    (fault,) = _faults(monkeypatch, device="cuda")
    assert "device is cuda, and there is no GPU here" in fault and "use device=cpu" in fault
    assert _faults(monkeypatch, device="cuda", gpus=1) == []
    (fault,) = _faults(monkeypatch, workers=2)
    assert "weights of 2 engine(s) take about 262.8 GiB in bfloat16, and this machine's" in fault
    assert _faults(monkeypatch, device="cuda", workers=2, runtime="ray") == []


def test_check_finds_the_values_that_the_engine_would_refuse(monkeypatch):
    found = _faults(monkeypatch, rows=2, threads=0)
    assert found[0] == "threads is 0; it must be at least 1"
    assert found[1].startswith("rows (chunk is 0) is 2; a forward needs at least 4 token slots")
