"""The modelled engine against closed forms: rates, batches, caches, versions, and deaths."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles.errors import EngineError
from miles.simulate import clock
from miles.simulate.cache import PrefixCache
from miles.simulate.engine import ModelledEngine
from miles.simulate.keys import EngineKeys
from miles.simulate.requests import ModelledRequest, blank
from miles.types import Completion, Sampling


def engine(**keys: Any) -> ModelledEngine:
    plain = {"forward_s": 0.01, "sequence_s": 0.0, "prefill_tokens_per_s": 1000.0}
    return ModelledEngine("e", EngineKeys(**{**plain, **keys}), lambda _: None)


def request(name: str, prompt: int, size: int, *, of: str = "", **more: Any) -> ModelledRequest:
    return ModelledRequest(
        id=name, key=of or name, tokens=blank(prompt), sampling=Sampling(max_new_tokens=size),
        seed=0, trajectory=of or name, **more,
    )  # fmt: skip


async def timed(made: ModelledEngine, asked: ModelledRequest) -> tuple[float, Completion]:
    completion = await made.generate(asked)
    return asyncio.get_running_loop().time(), completion


def test_engine_alone_takes_prefill_and_one_forward_a_token() -> None:
    async def main() -> tuple[float, Completion]:
        return await timed(engine(), request("a", 500, 100))

    when, completion = clock.run(main())
    assert when == pytest.approx(500 / 1000 + 100 * 0.01)
    assert len(completion.tokens) == 100


def test_engine_batch_pays_for_its_size_weights_and_context() -> None:
    """Two that are decoded together from the start: the closed form of a forward, integrated."""
    keys = {
        "sequence_s": 0.002, "weights_s": 0.04, "activated": 0.25,
        "prefill_tokens_per_s": 1e12,
    }  # fmt: skip

    async def main() -> list[tuple[float, Completion]]:
        made = engine(**keys)
        both = (timed(made, request(name, 10, size)) for name, size in (("a", 50), ("b", 100)))
        return await asyncio.gather(*both)

    (short, _), (long, _) = clock.run(main())
    two = 0.01 + 2 * 0.002 + 0.04 * (1 - 0.75**2)
    one = 0.01 + 0.002 + 0.04 * 0.25
    assert short == pytest.approx(50 * two, rel=1e-6)
    assert long == pytest.approx(50 * two + 50 * one, rel=1e-6)


def test_engine_prefill_holds_decoding_up_by_the_share_that_is_said() -> None:
    for share, wanted in ((0.0, 1.0 + 0.1 + 0.5), (1.0, 1.0 + 0.1), (0.5, 1.0 + 0.1 + 0.25)):

        async def main(share: float = share) -> float:
            made = engine(decode_during_prefill=share)
            first = asyncio.create_task(timed(made, request("a", 100, 100)))
            await asyncio.sleep(0.2)
            await made.generate(request("b", 500, 1))
            return (await first)[0]

        assert clock.run(main()) == pytest.approx(wanted, abs=0.011)


def test_engine_waits_for_memory_and_for_places() -> None:
    async def main(**keys: Any) -> tuple[list[float], int]:
        made = engine(prefill_tokens_per_s=1e12, **keys)
        asked = [request(f"r{i}", 100, 100) for i in range(4)]
        done = await asyncio.gather(*(timed(made, one) for one in asked))
        return [round(when, 3) for when, _ in done], made.cache.tokens

    assert clock.run(main(kv_tokens=400))[0] == [1.0, 1.0, 2.0, 2.0]
    assert clock.run(main(max_requests=1))[0] == [1.0, 2.0, 3.0, 4.0]
    times, cached = clock.run(main(kv_tokens=10_000))
    assert times == [1.0] * 4
    assert cached == 4 * 192  # whole pages of 64


def test_engine_refuses_what_can_never_fit() -> None:
    async def main() -> None:
        await engine(kv_tokens=100).generate(request("a", 90, 20))

    with pytest.raises(EngineError, match=r"'a' of 90 tokens and 20 to sample does not fit .*100"):
        clock.run(main())


def test_engine_finds_what_a_trajectory_and_its_group_left() -> None:
    async def main() -> list[int]:
        made = engine()
        hits = []
        for name, prompt in (("g0.0", 640), ("g0.1", 640), ("g0.0", 1000)):
            asked = request(f"{name}:{len(hits)}", prompt, 64, of=name, group="g0", shared=640)
            hits.append((await made.generate(asked)).cached_tokens)
        return hits

    # the second has the group's prompt but its last page; the third all that the first left
    assert clock.run(main()) == [0, 576, 704]


def test_engine_spans_say_which_weights_sampled_what() -> None:
    async def main(forget: bool) -> tuple[float, Completion]:
        made = engine(prefill_tokens_per_s=1e4)
        await made.load(3)
        task = asyncio.create_task(timed(made, request("a", 100, 100)))
        await asyncio.sleep(0.01 + 0.4)
        await made.pause()
        await asyncio.sleep(5)
        await made.load(4)
        if forget:
            made.forget()
        await made.resume()
        return await task

    when, completion = clock.run(main(forget=False))
    assert [(s.stop - s.start, s.version) for s in completion.spans] == [(40, 3), (60, 4)]
    assert when == pytest.approx(0.01 + 1.0 + 5)
    when, completion = clock.run(main(forget=True))
    assert [(s.stop - s.start, s.version) for s in completion.spans] == [(40, 3), (60, 4)]
    assert when == pytest.approx(0.01 + 1.0 + 5 + 140 / 1e4)  # keys and values computed again


def test_engine_abort_gives_what_there_is_and_cancel_leaves_nothing() -> None:
    async def main() -> tuple[Completion, dict[str, float]]:
        made = engine(prefill_tokens_per_s=1e12)
        await made.load(0)
        tasks = [asyncio.create_task(made.generate(request(f"r{i}", 10, 100))) for i in range(3)]
        await asyncio.sleep(0.3)
        assert await made.abort(["r0"]) == 1
        tasks[1].cancel()
        cut = await tasks[0]
        await tasks[2]
        await asyncio.gather(tasks[1], return_exceptions=True)
        return cut, dict(await made.health())

    cut, health = clock.run(main())
    assert (cut.finish, len(cut.tokens)) == ("abort", 30)
    assert health["active"] == health["waiting"] == 0
    assert health["busy_s"] == pytest.approx(1.0)


def test_engine_death_fails_everything_and_forgets() -> None:
    async def main() -> None:
        made = engine()
        await made.load(0)
        task = asyncio.create_task(made.generate(request("a", 10, 100)))
        await asyncio.sleep(0.1)
        made.die("as modelled")
        with pytest.raises(EngineError, match="engine e: as modelled"):
            await task
        with pytest.raises(EngineError, match="as modelled"):
            await made.version()
        made.revive(7)
        assert await made.version() == 7
        completion = await made.generate(request("b", 10, 5))
        assert {s.version for s in completion.spans} == {7}

    clock.run(main())


def test_cache_gives_up_the_oldest_tails_first() -> None:
    cache = PrefixCache(10)
    for key, tokens in (("a", 100), ("b", 57), ("c", 100)):
        cache.put(key, tokens)
    assert cache.tokens == 250
    assert cache.find("a", 45) == 40
    cache.shrink(205)  # b is the oldest now
    assert (cache.find("b", 1000), cache.tokens) == (0, 200)
    cache.shrink(150)
    assert (cache.find("a", 1000), cache.find("c", 1000)) == (100, 50)
    assert cache.take("a", 100) == 90  # the last token must be computed
    assert (cache.tokens, cache.take("a", 100)) == (50, 0)
