"""The engine's forward against `transformers`, in float32 and bfloat16."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from miles import Settings, WeightSyncError
from miles_plugins.engine.torch.cache import Cache
from miles_plugins.engine.torch.decoder import Forward, collect, fuse, wanted


@pytest.mark.parametrize("shape", ["qwen3", "qwen3-untied", "llama", "llama-one-key-head"])
def test_forward_agrees_with_transformers(make_tiny, request_for, shape):
    """Under 1e-4 at most is promised; a few 1e-6 is what float32 gives."""
    tiny = make_tiny(shape)

    async def play():
        engine = tiny.engine(key_block=16)
        await engine.load(0, tiny.weights())
        worst = 0.0
        for index, size in enumerate((1, 2, 15, 16, 17, 60)):
            asked = request_for(index, size=size, new=30)
            said = await engine.generate(asked)
            whole = np.concatenate([asked.tokens, said.tokens])
            theirs = tiny.logprobs(whole)
            worst = max(worst, np.abs(theirs[size:] - said.logprobs).max())
            worst = max(worst, np.abs(theirs - await engine.score(whole)).max())
        return worst

    assert asyncio.run(play()) < 2e-5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_at_the_sampling_temperature(tiny, request_for, temperature):
    async def play():
        engine = tiny.engine(settings=Settings(temperature=temperature))
        await engine.load(0, tiny.weights())
        asked = request_for(0, new=40, temperature=temperature)
        said = await engine.generate(asked)
        whole = np.concatenate([asked.tokens, said.tokens])
        theirs = tiny.logprobs(whole, temperature)
        assert np.abs(theirs[len(asked.tokens) :] - said.logprobs).max() < 2e-5
        assert np.abs(theirs - await engine.score(whole)).max() < 2e-5

    asyncio.run(play())


def test_greedy_takes_the_likeliest_and_reports_temperature_one(tiny, request_for):
    async def play():
        engine = tiny.engine()
        await engine.load(0, tiny.weights())
        asked = request_for(0, new=30, temperature=0.0, top_k=3)
        said = await engine.generate(asked)
        assert said.truncated_logprobs is None
        whole = np.concatenate([asked.tokens, said.tokens])
        assert np.abs(tiny.logprobs(whole)[len(asked.tokens) :] - said.logprobs).max() < 2e-5
        with torch.no_grad():
            logits = tiny.module(torch.from_numpy(whole.astype(np.int64))[None]).logits[0]
        assert logits.argmax(-1)[len(asked.tokens) - 1 : -1].tolist() == said.tokens.tolist()

    asyncio.run(play())


def test_attention_bias_agrees_with_transformers(make_tiny, request_for):
    tiny = make_tiny("llama")
    tiny.model._hf = {**tiny.model.hf_config(), "attention_bias": True}
    from miles_plugins.model.build import causal_lm

    tiny.module = tiny.made(causal_lm, seed=3)
    names = [n for n, _ in tiny.weights()]
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert "model.layers.0.self_attn.o_proj.bias" in names

    async def play():
        engine = tiny.engine()
        await engine.load(0, tiny.weights())
        asked = request_for(0, new=30)
        said = await engine.generate(asked)
        whole = np.concatenate([asked.tokens, said.tokens])
        assert np.abs(tiny.logprobs(whole) - await engine.score(whole)).max() < 2e-5

    asyncio.run(play())


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_16_bits_stay_within_the_recipes_budget(make_tiny, request_for, precision, dtype):
    """Against the float32 module the engine errs no more than `transformers` itself does in the
    same type."""
    tiny = make_tiny("qwen3", precision)
    rounded = [(n, t.to(dtype)) for n, t in tiny.weights()]

    async def play():
        engine = tiny.engine()
        await engine.load(0, rounded)
        parts = []
        for index in range(6):
            asked = request_for(index, new=60)
            said = await engine.generate(asked)
            whole = np.concatenate([asked.tokens, said.tokens])
            exact, ours = tiny.logprobs(whole), await engine.score(whole)
            with torch.no_grad():
                half = tiny.module.to(dtype)
                logits = half(torch.from_numpy(whole.astype(np.int64))[None]).logits[0]
                tiny.module.float()
            full = logits.float().log_softmax(-1)
            index_T = torch.from_numpy(whole[1:].astype(np.int64))[:, None]
            theirs = np.concatenate([[0], full[:-1].gather(1, index_T)[:, 0].numpy()])
            parts.append((np.abs(ours - exact), np.abs(theirs - exact), np.abs(ours - theirs)))
        return [np.concatenate(p) for p in zip(*parts, strict=True)]

    ours, theirs, between = asyncio.run(play())
    budget = tiny.context.precision.budget
    assert between.max() < budget.max
    assert between.mean() < budget.mean
    assert ours.mean() < 1.5 * theirs.mean()


def test_more_key_blocks_than_needed_change_nothing(tiny):
    """The promise behind reading as many blocks as the longest neighbour needs."""
    decoder = tiny.model.decoder()
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    shape = {"max_len": 64, "key_block": 8, **kind}
    weights = fuse(decoder, dict(collect(decoder, tiny.model.engine_name, tiny.weights())), **kind)
    forward = Forward(decoder, slots=8, **shape)
    outputs = []
    for longest in (6, 64):
        cache = Cache(decoder, rows=2, **shape)
        tokens = torch.arange(8) + 40
        rows = torch.tensor([0, 0, 0, 0, 0, 0, 2, 2])
        positions = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])
        outputs.append(forward(weights, cache, tokens, rows, positions, longest=longest))
    assert torch.equal(outputs[0][:6], outputs[1][:6])


@pytest.mark.parametrize("shape", ["qwen3", "llama-one-key-head"])
def test_cache_read_where_it_lies_gives_the_same_bits(make_tiny, shape):
    tiny = make_tiny(shape)
    decoder = tiny.model.decoder()
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    size = {"max_len": 64, "key_block": 8, **kind}
    weights = fuse(decoder, dict(collect(decoder, tiny.model.engine_name, tiny.weights())), **kind)
    forward = Forward(decoder, slots=8, **size)
    caches = {aligned: Cache(decoder, rows=8, **size) for aligned in (False, True)}
    rows = torch.arange(8)
    for cache in caches.values():
        for early in range(3):
            forward(weights, cache, rows + early, rows, torch.full((8,), early), longest=3)
    rows[[2, 5]] = 8  # padding
    for position in range(19):
        positions = torch.where(rows == 8, 0, position + rows // 3)
        gathered, read = (
            forward(weights, cache, 3 * rows + position, rows, positions, longest=22, aligned=how)
            for how, cache in caches.items()
        )
        assert torch.equal(gathered[rows < 8], read[rows < 8])
    assert torch.equal(caches[False].data[:, :, :8], caches[True].data[:, :, :8])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_unit_is_the_root_mean_square_norm_in_float64(tiny, scale):
    size = {"max_len": 8, "key_block": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    forward = Forward(tiny.model.decoder(), slots=4, **size)
    x = torch.linspace(-2.0, 3.0, 2 * 3 * 24).sin_().view(2, 3, 24) * scale
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + tiny.model.decoder().norm_eps).sqrt()
    assert torch.allclose(forward._unit(x).double(), exact, rtol=1e-6, atol=0)


def test_collect_names_every_fault(tiny):
    decoder, weights = tiny.model.decoder(), dict(tiny.weights())
    del weights["model.norm.weight"]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)
    weights["model.layers.1.mlp.down_proj.weight"] = torch.full((64, 160), torch.nan)
    with pytest.raises(WeightSyncError) as caught:
        collect(decoder, tiny.model.engine_name, weights.items())
    assert str(caught.value) == (
        "engine torch: weights refused: "
        "model.layers.0.mlp.up_proj.weight has shape (2, 2), not (160, 64); "
        "model.layers.1.mlp.down_proj.weight is not finite; "
        "model.layers.9.mlp.up_proj.weight is unknown; "
        "model.norm.weight is missing"
    )
    twice = [*tiny.weights(), tiny.weights()[0]]
    with pytest.raises(WeightSyncError, match=r"embed_tokens\.weight arrived twice"):
        collect(decoder, tiny.model.engine_name, twice)


def test_engine_runs_a_family_by_decoder_and_engine_name_alone(tiny, request_for):
    """Third-party names: only `engine_name` knows what they are."""

    own = tiny.model

    class Renamed:
        def decoder(self):
            return own.decoder()

        def engine_name(self, name):
            return None if name == "extra.statistics" else name.removeprefix("theirs/")

    weights = [(f"theirs/{n}", t) for n, t in tiny.weights()]
    weights.append(("extra.statistics", torch.zeros(3)))

    async def play():
        engine = tiny.engine()
        await engine.load(0, tiny.weights())
        tiny.model = Renamed()
        renamed = tiny.engine()
        await renamed.load(0, weights)
        one, two = [await e.generate(request_for(0)) for e in (engine, renamed)]
        assert one.logprobs.tobytes() == two.logprobs.tobytes()

    asyncio.run(play())
    assert set(wanted(own.decoder())) == {n for n, _ in tiny.weights()}
