"""What every engine must do: sample by its seed alone, say truly what it sampled, and never
half-load weights.

An engine that replays demonstrations (`samples` is False) is held to the few promises that it
makes; one that is a client of somebody else's server (`attached` is True) is tested against a
server, beside its own code.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from miles.errors import EngineError, WeightSyncError
from miles.testing.contract.case import Case, expect, inapplicable, raises
from miles.testing.contract.completions import expect_equal, expect_whole
from miles.types import Completion, Request, Sampling

TOGETHER = 24
"""Requests at once, of several lengths."""


async def check_versions(case: Case) -> None:
    """It serves version -1 before the first load, then what was loaded, and every sampled token
    says so."""
    engine = _built(case)
    before = await engine.version()
    expect(before == -1 or not case.component.samples, f"a new engine serves {before}, not -1")  # type: ignore[attr-defined]
    for version in (0, 1, 7):
        await _load(case, engine, version)
        found = await engine.version()
        expect(found == version, f"after load({version}) it serves {found}")
        completion = await engine.generate(_request(0, demonstrate=True))
        versions = {span.version for span in completion.spans}
        expect(versions == {version}, f"tokens sampled under {version} say {versions}")


async def check_completion(case: Case) -> None:
    """A completion is whole: types and lengths agree, spans tile it, log-probs are finite and at
    most 0."""
    engine = await _ready(case)
    for index in range(8):
        expect_whole(await engine.generate(_request(index, demonstrate=True)), engine)


async def check_seed_decides(case: Case) -> None:
    """The same request gives the same tokens and log-probs again; other seeds give others."""
    engine = await _sampler(case)
    one, two = [await engine.generate(_request(0, size=24)) for _ in range(2)]
    expect_equal(one, two, "the same request twice")
    others = [await engine.generate(replace(_request(0, size=24), seed=s)) for s in range(100, 104)]
    expect(
        any(not np.array_equal(one.tokens, o.tokens) for o in others), "every seed gives the same"
    )


async def check_company_is_nothing(case: Case) -> None:
    """Alone, together and shuffled, a request gets the same tokens and log-probs, bit for bit."""
    engine = await _sampler(case)
    asked = [_request(i, size=4 + i % 9) for i in range(TOGETHER)]
    alone = [await engine.generate(r) for r in asked]
    together = await asyncio.gather(*(engine.generate(r) for r in asked))
    order = np.random.default_rng(1).permutation(len(asked))
    shuffled = await asyncio.gather(*(engine.generate(asked[i]) for i in order))
    for index, one in enumerate(alone):
        expect_equal(one, together[index], f"request {index}, alone and together")
    for place, index in enumerate(order):
        expect_equal(alone[index], shuffled[place], f"request {index}, alone and shuffled")


async def check_greedy(case: Case) -> None:
    """At temperature 0 the seed is nothing, and every token is the likeliest of all."""
    engine = await _sampler(case)
    greedy = Sampling(max_new_tokens=6, temperature=0.0)
    asked = replace(_request(0), sampling=greedy)
    one, two = [await engine.generate(replace(asked, seed=s)) for s in (1, 2)]
    expect(np.array_equal(one.tokens, two.tokens), "greedy completions depend on the seed")
    highest = await engine.generate(
        replace(asked, seed=3, sampling=replace(greedy, temperature=1.0, top_k=1))
    )
    expect(np.array_equal(one.tokens, highest.tokens), "greedy and top_k=1 choose different tokens")


async def check_finish(case: Case) -> None:
    """It ends with `stop` at a stop id, which is part of the completion, and with `length` at the
    limit."""
    engine = await _sampler(case)
    free = await engine.generate(_request(3, size=12))
    expect(free.finish == "length", f"no stop id can be sampled, yet finish is {free.finish!r}")
    expect(len(free.tokens) == 12, f"{len(free.tokens)} tokens for max_new_tokens=12")
    stop = int(free.tokens[5])
    first = free.tokens.tolist().index(stop)
    asked = _request(3, size=12)
    asked = replace(asked, sampling=replace(asked.sampling, stop_ids=(stop,)))
    cut = await engine.generate(asked)
    expect(cut.finish == "stop", f"sampling a stop id gives finish {cut.finish!r}")
    same = np.array_equal(cut.tokens, free.tokens[: first + 1])
    expect(same, f"with stop id {stop}: {cut.tokens.tolist()}, without: {free.tokens.tolist()}")


async def check_logprobs_are_its_score(case: Case) -> None:
    """At temperature 1 a completion's log-probs are what `score` gives for the same tokens."""
    engine = await _sampler(case)
    for index in range(4):
        asked = _request(index, size=10)
        completion = await engine.generate(asked)
        whole = np.concatenate([asked.tokens, completion.tokens])
        scored = await engine.score(whole)
        good = scored.shape == whole.shape and scored.dtype == np.float32
        expect(good, f"score gave {scored.dtype} {scored.shape} for {len(whole)} tokens")
        expect(scored[0] == 0, f"score of the first token is {scored[0]}, not 0")
        worst = float(np.abs(scored[len(asked.tokens) :] - completion.logprobs).max())
        limit = _limit(case)
        expect(worst <= limit, f"log-probs are {worst:.3g} off its own score; {limit:g} is allowed")


async def check_truncation(case: Case) -> None:
    """Under top-k and top-p both log-probs are told: the full one, and the cut one, which is never
    lower."""
    engine = await _sampler(case)
    plain = await engine.generate(_request(1, size=12))
    expect(plain.truncated_logprobs is None, "nothing was cut, yet truncated_logprobs are given")
    for cut in ({"top_k": 5}, {"top_p": 0.6}, {"top_k": 50, "top_p": 0.9}):
        asked = _request(1, size=12)
        asked = replace(asked, sampling=replace(asked.sampling, **cut))
        completion = await engine.generate(asked)
        expect_whole(completion, engine)
        truncated = completion.truncated_logprobs
        expect(truncated is not None, f"{cut}: truncated_logprobs are missing")
        lower = float((completion.logprobs - truncated).max())
        expect(lower <= 1e-5, f"{cut}: a cut log-prob is {lower:.3g} below the full one")
        whole = np.concatenate([asked.tokens, completion.tokens])
        scored = (await engine.score(whole))[len(asked.tokens) :]
        worst = float(np.abs(scored - completion.logprobs).max())
        expect(worst <= _limit(case), f"{cut}: full log-probs are {worst:.3g} off its own score")
    asked = _request(1, size=6)
    one = await engine.generate(replace(asked, sampling=replace(asked.sampling, top_k=1)))
    certain = bool((np.abs(one.truncated_logprobs) < 1e-6).all())
    expect(certain, "top_k=1 leaves one choice, whose cut log-prob must be 0")


async def check_temperature(case: Case) -> None:
    """Log-probs are under the sampling temperature: a lower one makes the greedy tokens
    likelier."""
    engine = await _sampler(case)
    greedy = replace(_request(2), sampling=Sampling(max_new_tokens=6, temperature=0.0))
    best = (await engine.generate(greedy)).tokens
    totals = []
    for temperature in (2.0, 1.0, 0.25):
        sampling = Sampling(max_new_tokens=1, temperature=temperature, top_k=1)
        completion = await engine.generate(replace(greedy, sampling=sampling))
        expect(completion.tokens[0] == best[0], "top_k=1 is not the likeliest token")
        totals.append(float(completion.logprobs[0]))
    expect(totals == sorted(totals), f"log-probs of the likeliest at 2, 1, 0.25: {totals}")


async def check_abort(case: Case) -> None:
    """`abort` ends the requests of a key, and no others, with what they have; it counts them."""
    engine = await _sampler(case)
    room = _request(0, size=200)
    tasks = [
        asyncio.ensure_future(engine.generate(replace(room, id=f"r{i}", key=f"k{i}", seed=i)))
        for i in range(2)
    ]
    await _until_active(engine, 2)
    ended = await engine.abort(["k0"])
    expect(ended == 1, f"abort of one key ended {ended} requests")
    cut, whole = await asyncio.gather(*tasks)
    expect(cut.finish == "abort", f"an aborted request has finish {cut.finish!r}")
    expect_whole(cut, engine)
    expect(len(cut.tokens) < 200, "an aborted request went on to its limit")
    expect(whole.finish == "length", f"the other request ended with {whole.finish!r}")
    again = await engine.generate(replace(room, id="r2", key="k1", seed=1))
    expect_equal(whole, again, "a request beside an aborted one, and alone")
    expect(await engine.abort() == 0, "abort with nothing in flight ended something")


async def check_cancel(case: Case) -> None:
    """A caller that goes away takes its request along: nothing is left running."""
    engine = await _sampler(case)
    task = asyncio.ensure_future(engine.generate(_request(0, size=200)))
    await _until_active(engine, 1)
    await engine.pause()  # or it might end by itself
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _until_idle(engine)
    await engine.resume()
    expect_whole(await engine.generate(_request(1)), engine)


async def check_stream(case: Case) -> None:
    """`stream`, where there is one, gives the tokens of `generate` piece by piece and last the
    completion; leaving early ends the request."""
    engine = await _sampler(case)
    if not hasattr(engine, "stream"):
        inapplicable("it has no stream")
    whole = await engine.generate(_request(0, size=24))
    *pieces, last = [item async for item in engine.stream(_request(0, size=24))]
    expect(isinstance(last, Completion), f"a stream ends with a {type(last).__name__}")
    expect_equal(whole, last, "a streamed request and the same at once")
    expect(len(pieces) > 1, f"{len(whole.tokens)} tokens came in {len(pieces)} piece")
    joined = np.concatenate(pieces)
    expect(np.array_equal(joined, last.tokens), "the pieces are not the completion's tokens")
    items = engine.stream(_request(1, size=200))
    await anext(items)
    await items.aclose()
    await _until_idle(engine)


async def check_pause(case: Case) -> None:
    """A paused engine samples nothing; resumed, requests end with the tokens that they would have
    had."""
    engine = await _sampler(case)
    wanted = await engine.generate(_request(0, size=20))
    await engine.pause()
    task = asyncio.ensure_future(engine.generate(_request(0, size=20)))
    done, _ = await asyncio.wait([task], timeout=0.2)
    expect(not done, "a paused engine finished a request")
    await engine.resume()
    expect_equal(wanted, await task, "a request, and the same one held by a pause")


async def check_load_refuses(case: Case) -> None:
    """Missing, unknown or misshapen weights are a `WeightSyncError`, and the old version goes on
    being served."""
    engine = await _sampler(case)
    before = await engine.generate(_request(0))
    weights = _weights(case, 9)
    name = sorted(weights)[0]
    bad = {
        "a missing tensor": {k: v for k, v in weights.items() if k != name},
        "an unknown tensor": {**weights, "no.such.tensor": weights[name]},
        "a misshapen tensor": {**weights, name: weights[name][:-1]},
    }
    for what, given in bad.items():
        with raises(WeightSyncError, f"load with {what}"):
            await engine.load(9, given.items())
        found = await engine.version()
        expect(found == 0, f"after a load with {what} it serves {found}, not 0")
        expect_equal(before, await engine.generate(_request(0)), f"before and after {what}")


async def check_load_changes_the_policy(case: Case) -> None:
    """After a load it samples the new weights, with nothing cached of the old; loading the old ones
    restores them."""
    engine = await _sampler(case)
    before = await engine.generate(_request(0, size=16))
    await _load(case, engine, 1)
    after = await engine.generate(_request(0, size=16))
    expect(not np.array_equal(before.logprobs, after.logprobs), "new weights sample as the old did")
    fresh = _built(case)
    await _load(case, fresh, 1)
    expect_equal(after, await fresh.generate(_request(0, size=16)), "reloaded and fresh engine")
    await engine.load(2, _weights(case, 0).items())
    restored = await engine.generate(_request(0, size=16))
    expect_equal(before, restored, "the first weights, loaded again")


async def check_refuses_prompts(case: Case) -> None:
    """A prompt that does not fit, or is empty, is an `EngineError`; the engine goes on."""
    engine = await _sampler(case)
    limit = case.companion("model").decoder().max_len
    asked = _request(0)
    for what, size in (("that does not fit", limit + 1), ("that is empty", 0)):
        tokens = np.ones(size, np.int32)
        with raises(EngineError, f"a prompt {what}"):
            await engine.generate(replace(asked, tokens=tokens))
    expect_whole(await engine.generate(asked), engine)


async def check_health(case: Case) -> None:
    """`health` gives plain finite numbers, and counts what was sampled."""
    engine = await _ready(case)
    before = await engine.health()
    sampled = len((await engine.generate(_request(0, demonstrate=True))).tokens)
    after = await engine.health()
    for name in ("active", "waiting", "tokens", "busy_s", "prompt_tokens", "cached_tokens"):
        good = isinstance(after.get(name), int | float) and np.isfinite(after[name])
        expect(good, f"health has {name} = {after.get(name)!r}")
    if engine.samples:
        counted = after["tokens"] - before["tokens"]
        expect(counted == sampled, f"health counted {counted} tokens of {sampled}")


async def check_sleep_wake(case: Case) -> None:
    """After `sleep`, `wake` and a load of the same weights it samples as before."""
    engine = await _sampler(case)
    before = await engine.generate(_request(0))
    await engine.sleep()
    await engine.wake()
    await engine.load(0, _weights(case, 0).items())
    expect_equal(before, await engine.generate(_request(0)), "before and after a sleep")


async def check_demonstration(case: Case) -> None:
    """An engine that replays gives the demonstration's tokens, cut at the limit, without log-probs;
    or an error."""
    engine = _built(case)
    if engine.samples:
        inapplicable("it samples")
    await engine.load(3, ())
    shown = np.array([7, 8, 9, 2], np.int32)
    asked = replace(_request(0, size=8), demonstration=shown)
    whole = await engine.generate(asked)
    expect(np.array_equal(whole.tokens, shown), f"{whole.tokens.tolist()} is not what was shown")
    expect(whole.logprobs is None, "a demonstration was given log-probs")
    cut = await engine.generate(replace(asked, sampling=Sampling(max_new_tokens=2)))
    good = cut.finish == "length" and np.array_equal(cut.tokens, shown[:2])
    expect(good, f"cut at 2 tokens: {cut.tokens.tolist()}, finish {cut.finish!r}")
    with raises(EngineError, "a request without a demonstration"):
        await engine.generate(replace(asked, demonstration=None))


def _request(index: int, *, size: int = 8, demonstrate: bool = False) -> Request:
    """Prompts of several lengths; three in four share a beginning, as the attempts of a group
    do."""
    rng = np.random.default_rng(index // 4 if index % 4 else index + 1000)
    tokens = rng.integers(32, 127, 5 + index % 4 * 3).astype(np.int32)  # (prompt,) int32
    shown = np.array([65 + index, 66, 67], np.int32) if demonstrate else None
    return Request(
        id=f"r{index}",
        key=f"k{index}",
        tokens=tokens,
        sampling=Sampling(max_new_tokens=size),
        seed=17 + index,
        demonstration=shown,
    )


def _built(case: Case) -> Any:
    if getattr(case.component, "attached", False):
        inapplicable("it is a client of a server, which is not here")
    return case.build()


async def _ready(case: Case) -> Any:
    engine = _built(case)
    await _load(case, engine, 0)
    return engine


async def _sampler(case: Case) -> Any:
    if not case.component.samples:  # type: ignore[attr-defined]
        inapplicable("it replays demonstrations")
    return await _ready(case)


async def _load(case: Case, engine: Any, version: int) -> None:
    weights = _weights(case, version) if engine.samples else {}
    await engine.load(version, weights.items())


def _weights(case: Case, version: int) -> dict[str, Any]:
    """Weights of the companion model, a different set for every version.

    An engine with a model of its own offers them as `example_weights(seed)` instead.
    """
    own = getattr(case.component, "example_weights", None)
    if own is not None:
        return dict(own(version))
    from miles.testing.contract import reference

    key = f"weights of {version}"
    if key not in case.built:
        made = reference.noisy(reference.module(case.companion("model")), seed=version)
        case.built[key] = reference.names(made)
    return {name: tensor.clone() for name, tensor in case.built[key].items()}


async def _until_idle(engine: Any) -> None:
    async with asyncio.timeout(3):
        while (await engine.health())["active"]:
            await asyncio.sleep(0.001)


async def _until_active(engine: Any, count: int) -> None:
    while (await engine.health())["active"] < count:
        await asyncio.sleep(0.001)


def _limit(case: Case) -> float:
    return float(case.companion("precision").budget.max)
