"""The simulated prefix cache and the engine that has one."""

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.protocols import Engine
from miles.testing import CachingEngine, PrefixCache
from miles.types import Request, Sampling


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)  # (tokens,) int32


def test_prefix_cache_finds_whole_pages_of_the_longest_prefix() -> None:
    cache = PrefixCache(page=2)
    cache.insert(cache.names(ids(1, 2, 3, 4, 5)))  # the fifth token is no whole page
    assert cache.match(cache.names(ids(1, 2, 3, 4, 5, 6))) == 4
    assert cache.match(cache.names(ids(1, 2, 9, 4))) == 2
    assert cache.match(cache.names(ids(3, 4))) == 0  # the same page elsewhere is another
    assert cache.match(cache.names(ids(1))) == 0


def test_prefix_cache_evicts_what_was_used_longest_ago_and_leaves_first() -> None:
    cache = PrefixCache(page=1, capacity=3)
    cache.insert(cache.names(ids(1, 2, 3)))
    cache.insert(cache.names(ids(1, 7)))
    assert cache.match(cache.names(ids(1, 2, 3))) == 2  # its last page made room
    cache.insert(cache.names(ids(8, 9)))
    assert cache.match(cache.names(ids(1, 7))) == 1
    assert cache.match(cache.names(ids(1, 2))) == 1


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12),
    st.integers(1, 3),
    st.integers(1, 8),
)
def test_prefix_cache_is_bounded_and_keeps_every_page_with_those_before_it(
    prompts: list[list[int]], page: int, pages: int
) -> None:
    cache = PrefixCache(page=page, capacity=page * pages)
    seen = []
    for prompt in prompts:
        names = cache.names(ids(*prompt))
        seen.append(names)
        cache.insert(names)
        assert len(cache) <= pages
        assert cache.match(names) == min(len(names), pages) * page
        matched = sum(len(set(n[: cache.match(n) // page])) for n in [*seen])
        held = {name for n in seen for name in n[: cache.match(n) // page]}
        assert len(held) == len(cache) and matched >= len(held)  # no page without its beginning


def test_prefix_cache_names_continue_known_ones() -> None:
    cache = PrefixCache(page=2)
    tokens = ids(*range(11))
    assert cache.names(tokens, cache.names(tokens[:5])) == cache.names(tokens)


def request(key: str, tokens: np.ndarray, *, rank: int | None = None, seed: int = 0) -> Request:
    sampling = Sampling(max_new_tokens=4)
    return Request(
        id=f"{key}/0", key=key, tokens=tokens, sampling=sampling, seed=seed, dp_rank=rank
    )


def test_caching_engine_reports_the_hits_of_each_rank() -> None:
    async def play() -> list[int]:
        engine = CachingEngine(CachingEngine.Config(page=4, dp_ranks=2))
        prompt = np.arange(16, dtype=np.int32)  # (tokens,) int32
        first = await engine.generate(request("a", prompt, rank=1))
        longer = np.concatenate([prompt, first.tokens, ids(5)])
        return [
            first.cached_tokens,
            (await engine.generate(request("a", longer, rank=1))).cached_tokens,
            (await engine.generate(request("a", longer, rank=0))).cached_tokens,
            (await engine.generate(request("b", prompt, rank=1))).cached_tokens,
        ]

    # 20 tokens of prompt and reply are cached; of the last prompt one token is always computed
    assert asyncio.run(play()) == [0, 20, 0, 15]


def test_caching_engine_aborts_and_streams() -> None:
    async def play() -> None:
        engine = CachingEngine(CachingEngine.Config(chunk=1, decode_s=0.01))
        assert isinstance(engine, Engine)
        items = []
        async for item in engine.stream(request("a", ids(1, 2))):
            items.append(item)
            if len(items) == 2:
                assert await engine.abort(["a", "b"]) == 1
        assert [len(i) for i in items[:-1]] == [1, 1] and items[-1].finish == "abort"
        assert items[-1].tokens.tolist() == [int(i[0]) for i in items[:-1]]
        assert await engine.abort() == 0

    asyncio.run(play())
