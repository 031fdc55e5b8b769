"""Requests through the router, over engines with prefix caches that fail in every way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.errors import ConfigError, EngineError, PromptTooLong, RoutingError, WorkerError
from miles.metrics import faults
from miles.protocols import Engine
from miles.router import Router
from miles.testing import CachingEngine
from miles.types import Completion, Request, Sampling

Ask = Callable[..., Request]
Fleet = Callable[..., tuple[Router, dict[str, CachingEngine]]]


def who(engines: dict[str, CachingEngine], key: str) -> str:
    """The engine that saw the key's last request; fails when several did."""
    (name,) = [n for n, e in engines.items() if any(r.key == key for r in e.requests)]
    return name


def test_router_is_an_engine(fleet: Fleet) -> None:
    router, _ = fleet("a")
    assert isinstance(router, Engine) and router.samples


def test_router_keeps_a_conversation_on_the_engine_that_has_its_cache(
    ask: Ask, fleet: Fleet
) -> None:
    async def play() -> dict[str, float]:
        router, engines = fleet("abc", CachingEngine.Config(page=4))
        for turn in range(5):
            for key in ("x", "y", "z"):
                await router.generate(ask(key, 8 * (turn + 1), turn=turn))
        for key in ("x", "y", "z"):
            who(engines, key)
        return router.metrics()

    metrics = asyncio.run(play())
    assert metrics["router/requests"] == metrics["router/completed"] == 15
    assert metrics["router/keys"] == 3 and metrics["router/rebinds"] == 0
    assert 0 < metrics["router/prefix_hit_rate"] < 1


def test_router_spreads_new_keys_over_idle_engines(ask: Ask, fleet: Fleet) -> None:
    async def play() -> list[int]:
        router, engines = fleet("abcd", CachingEngine.Config(decode_s=0.01))
        await asyncio.gather(*(router.generate(ask(f"k{i}")) for i in range(12)))
        assert router.metrics()["router/active/a"] == 0
        return [len(engine.requests) for engine in engines.values()]

    assert asyncio.run(play()) == [3, 3, 3, 3]


def test_router_binds_to_data_parallel_ranks(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("ab", CachingEngine.Config(dp_ranks=4, decode_s=0.01))
        for turn in range(2):
            await asyncio.gather(*(router.generate(ask(f"k{i}", turn=turn)) for i in range(8)))
        seats: dict[str, set[tuple[str, int | None]]] = {}
        for name, engine in engines.items():
            for request in engine.requests:
                seats.setdefault(request.key, set()).add((name, request.dp_rank))
        assert all(len(places) == 1 for places in seats.values())  # the second turn as the first
        assert len({place for places in seats.values() for place in places}) == 8

    asyncio.run(play())


def test_router_leaves_the_rank_out_where_there_is_one(ask: Ask, fleet: Fleet) -> None:
    router, engines = fleet("a")
    request = ask("key")
    asyncio.run(router.generate(request))
    assert engines["a"].requests == [request] and engines["a"].requests[0] is request


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_router_refuses_a_request_without_a_key_and_names_it(
    ask: Ask, fleet: Fleet, way: str
) -> None:
    router, engines = fleet("a")

    async def send() -> None:
        if way == "generate":
            await router.generate(ask("", turn=7))
        async for _ in router.stream(ask("", turn=7)):
            pass

    with pytest.raises(RoutingError, match=r"request '/7' has no routing key.*set `Request.key`"):
        asyncio.run(send())
    assert not engines["a"].requests
    assert router.counts()["refused"] == 1 and router.counts()["requests"] == 0


def test_router_refuses_to_be_made_of_nothing_or_of_both() -> None:
    with pytest.raises(ConfigError, match="no engine to route to"):
        Router({})
    replays = CachingEngine()
    replays.samples = False  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"replay together: \{'a': True, 'b': False\}"):
        Router({"a": CachingEngine(), "b": replays})
    with pytest.raises(ConfigError, match="max_keys is 0"):
        Router({"a": CachingEngine()}, max_keys=0)


def test_router_moves_the_sessions_of_a_dead_engine_and_counts_the_prefill(
    ask: Ask, fleet: Fleet
) -> None:
    async def play() -> None:
        router, engines = fleet("ab", CachingEngine.Config(page=4))
        await router.generate(ask("key", 40))
        dead = who(engines, "key")
        other = "b" if dead == "a" else "a"
        engines[dead].fault = engines[dead].sick = WorkerError(f"{dead} died")
        completion = await router.generate(ask("key", 80, turn=1))  # served, elsewhere
        assert completion.cached_tokens == 0 and engines[other].requests[-1].id == "key/1"
        await router.generate(ask("key", 84, turn=2))
        metrics = router.metrics()
        assert metrics["router/drained"] == metrics["router/rebinds"] == 1
        assert metrics["router/retries"] == 1 and metrics["router/completed"] == 3
        assert metrics["router/failed"] == 0
        assert metrics["router/rebind_prefill_tokens"] == 80
        assert faults(metrics) == ()

    asyncio.run(play())


def test_router_leaves_an_error_of_a_healthy_engine_to_the_caller(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("ab")
        await router.generate(ask("key"))
        name = who(engines, "key")
        engines[name].fault = EngineError("this prompt is poison")
        with pytest.raises(EngineError, match="this prompt is poison"):
            await router.generate(ask("key", turn=1))
        engines[name].fault = None
        await router.generate(ask("key", turn=2))
        assert who(engines, "key") == name  # it never moved
        counts = router.counts()
        assert (counts["failed"], counts["retries"], counts["drained"]) == (1, 0, 0)

    asyncio.run(play())


def test_router_makes_an_engine_error_of_what_a_connection_raises(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("a")
        engines["a"].fault = ConnectionResetError("reset by peer")
        with pytest.raises(EngineError, match="ConnectionResetError: reset by peer; it says that"):
            await router.generate(ask("key"))
        engines["a"].sick = OSError("refused")
        with pytest.raises(RoutingError, match="all are drained"):
            await router.generate(ask("key", turn=1))

    asyncio.run(play())


def test_router_does_not_hold_what_is_no_engine_fault_against_the_engine(
    ask: Ask, fleet: Fleet
) -> None:
    async def play() -> None:
        router, engines = fleet("ab", failures=1)
        for engine in engines.values():
            engine.fault = PromptTooLong("no room")
        for turn in range(5):
            with pytest.raises(PromptTooLong):
                await router.generate(ask(f"k{turn}"))
        assert router.counts()["drained"] == 0 and router.counts()["failed"] == 5

    asyncio.run(play())


def test_router_drains_an_engine_that_says_it_is_well_and_fails_everything(
    ask: Ask, fleet: Fleet
) -> None:
    """It would look idle and draw every new key."""

    async def play() -> None:
        router, engines = fleet("ab", failures=3)
        engines["a"].fault = EngineError("out of memory")
        failed = 0
        for number in range(40):
            try:
                await router.generate(ask(f"k{number}"))
            except EngineError:
                failed += 1
        assert failed == 2  # the third was tried elsewhere
        assert router.counts()["drained"] == router.counts()["retries"] == 1

    asyncio.run(play())


def test_router_keeps_the_last_engine_that_says_it_is_well(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("a", failures=2)
        engines["a"].fault = EngineError("out of memory")
        for number in range(5):
            with pytest.raises(EngineError):
                await router.generate(ask(f"k{number}"))
        engines["a"].fault = None
        await router.generate(ask("k9"))
        assert router.counts()["drained"] == 0

    asyncio.run(play())


def test_router_tries_another_engine_when_one_hangs(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("ab", failures=1, check_timeout_s=0.05)
        await router.generate(ask("key"))
        name = who(engines, "key")
        await engines[name].pause()
        async with router:  # a health check finds it, and ends the request that waits there
            await router.generate(ask("key", turn=1))
            assert router.metrics()["router/rebinds"] == 1
            assert engines[name].requests[-1].id == "key/1"
            assert router.counts()["active/" + name] == 0

    asyncio.run(play())


def test_router_says_that_a_healthy_engine_did_not_answer(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, _ = fleet("a", CachingEngine.Config(decode_s=10), request_timeout_s=0.02)
        with pytest.raises(
            EngineError, match=r"engine a: request 'key/0': no answer within 0\.02 s"
        ):
            await router.generate(ask("key"))
        assert router.counts()["active/a"] == 0

    asyncio.run(play())


def test_router_bounds_its_attempts_and_says_so(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("abcd", attempts=2)
        for engine in engines.values():
            engine.fault = engine.sick = WorkerError("gone")
        with pytest.raises(EngineError) as caught:  # a value in an episode, not the run's end
            await router.generate(ask("key"))
        assert "request 'key/0': WorkerError: gone; not tried elsewhere" in str(caught.value)
        assert "it was attempt 2 of 2" in str(caught.value)
        assert sum(len(e.requests) for e in engines.values()) == 2

    asyncio.run(play())


def test_router_without_engines_names_each_and_why(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("ab", attempts=9)
        for name, engine in engines.items():
            engine.fault = engine.sick = WorkerError(f"{name} died")
        with pytest.raises(RoutingError) as caught:
            await router.generate(ask("key"))
        said = str(caught.value)
        assert "no engine can take request 'key/0' of 'key': all are drained" in said
        assert "a: it failed request 'key/0'" in said and "WorkerError: b died" in said
        for question in (router.health(), router.version(), router.score(np.arange(3))):
            with pytest.raises(RoutingError, match="all are drained"):
                await question

    asyncio.run(play())


def test_router_waits_a_while_for_an_engine_to_come_back(
    ask: Ask, fleet: Fleet, until: Any
) -> None:
    async def play() -> None:
        router, engines = fleet("a", readmission_timeout_s=5)
        engines["a"].fault = engines["a"].sick = WorkerError("restarting")
        async with router:
            waiting = asyncio.create_task(router.generate(ask("key")))
            await until(lambda: router.counts()["drained"])
            engines["a"].fault = engines["a"].sick = None
            assert len((await waiting).tokens) == 4
            assert router.counts()["readmitted"] == 1

    asyncio.run(play())


def test_router_shares_one_probe_between_all_that_failed_at_once(ask: Ask, fleet: Fleet) -> None:
    class Counting(CachingEngine):
        asked = 0

        async def health(self) -> Any:
            self.asked += 1
            await asyncio.sleep(0.01)
            return await super().health()

    async def play() -> None:
        engines = {name: Counting(CachingEngine.Config(decode_s=0.001)) for name in "ab"}
        router = Router(engines)
        requests = [asyncio.create_task(router.generate(ask(f"k{i}"))) for i in range(40)]
        await asyncio.sleep(0)
        engines["a"].fault = engines["a"].sick = WorkerError("gone")
        await asyncio.gather(*requests)
        assert engines["a"].asked <= 2 and router.counts()["rebinds"] == 20

    asyncio.run(play())


def test_router_streams_as_the_engine_does(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, _ = fleet("a", CachingEngine.Config(chunk=3))
        items = [item async for item in router.stream(ask("key", new=8))]
        assert [len(i) for i in items[:-1]] == [3, 3, 2]
        assert np.concatenate(items[:-1]).tolist() == items[-1].tokens.tolist()
        whole = await router.generate(ask("key", new=8))
        assert whole.tokens.tolist() == items[-1].tokens.tolist()
        counts = router.counts()
        assert counts["completed"] == counts["requests"] == 2 and counts["active/a"] == 0

    asyncio.run(play())


def test_router_has_no_stream_when_an_engine_has_none(ask: Ask) -> None:
    class Whole:
        samples = True

    assert not hasattr(Router({"a": CachingEngine(), "b": Whole()}), "stream")


def test_router_retries_a_stream_only_before_its_first_tokens(ask: Ask, fleet: Fleet) -> None:
    async def play(after: int) -> tuple[list[Any], dict[str, float]]:
        router, engines = fleet("ab", CachingEngine.Config(chunk=1))
        await router.generate(ask("key"))
        engine = engines[who(engines, "key")]
        items: list[Any] = []
        if after == 0:
            engine.fault = engine.sick = WorkerError("gone")
        try:
            async for item in router.stream(ask("key", new=6)):
                items.append(item)
                if len(items) == after:
                    engine.fault = engine.sick = WorkerError("gone")
        except EngineError as error:
            items.append(error)
        return items, router.counts()

    items, counts = asyncio.run(play(0))
    assert isinstance(items[-1], Completion) and counts["retries"] == 1
    items, counts = asyncio.run(play(2))
    assert "not tried elsewhere: tokens of it were streamed" in str(items[-1]) and len(items) == 3
    assert (counts["retries"], counts["drained"], counts["failed"]) == (0, 1, 1)


def test_router_accounts_for_a_stream_that_its_reader_leaves(ask: Ask, fleet: Fleet) -> None:
    async def play() -> dict[str, float]:
        router, _ = fleet("a", CachingEngine.Config(chunk=1))
        stream = router.stream(ask("left", new=6))
        await anext(stream)
        assert router.counts()["active/a"] == 1
        await stream.aclose()
        stream = router.stream(ask("read", new=2))
        async for item in stream:
            if isinstance(item, Completion):
                break  # it has everything; leaving now is no cancellation
        await stream.aclose()
        return router.counts()

    counts = asyncio.run(play())
    assert (counts["cancelled"], counts["completed"], counts["active/a"]) == (1, 1, 0)


def test_router_limits_the_wait_for_a_stream_not_its_reader(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, _ = fleet("a", CachingEngine.Config(chunk=1), request_timeout_s=0.05)
        count = 0
        async for _ in router.stream(ask("slow reader", new=3)):
            await asyncio.sleep(0.1)
            count += 1
        assert count == 4

    asyncio.run(play())


def test_router_ends_a_stream_whose_engine_never_completes(ask: Ask) -> None:
    class Short(CachingEngine):
        async def stream(self, request: Request) -> Any:
            yield np.zeros(1, np.int32)

    async def read() -> None:
        router = Router({"a": Short()})
        async for _ in router.stream(ask("key")):
            pass

    with pytest.raises(EngineError, match="the stream of request 'key/0' ended without its compl"):
        asyncio.run(read())


def test_router_cancels_where_the_caller_does(ask: Ask, fleet: Fleet) -> None:
    async def play() -> dict[str, float]:
        router, _ = fleet("ab", CachingEngine.Config(decode_s=10))
        tasks = [asyncio.create_task(router.generate(ask(f"k{i}"))) for i in range(4)]
        await asyncio.sleep(0.01)
        assert router.counts()["active/a"] == router.counts()["active/b"] == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return router.counts()

    counts = asyncio.run(play())
    assert (counts["cancelled"], counts["active/a"], counts["active/b"]) == (4, 0, 0)


def test_router_aborts_keys_where_they_are(ask: Ask, fleet: Fleet) -> None:
    async def play() -> None:
        router, _ = fleet("ab", CachingEngine.Config(decode_s=0.02, chunk=1))
        tasks = [asyncio.create_task(router.generate(ask(f"k{i}", new=50))) for i in range(4)]
        await asyncio.sleep(0.01)
        assert await router.abort(["k0", "k1", "unknown"]) == 2
        assert [(await t).finish for t in tasks[:2]] == ["abort", "abort"]
        assert await router.abort() == 2
        assert [(await t).finish for t in tasks[2:]] == ["abort", "abort"]
        assert await router.abort([]) == 0

    asyncio.run(play())


def test_router_answers_for_all_its_engines(fleet: Fleet) -> None:
    class Small(CachingEngine):
        async def health(self) -> Any:
            return {"active": 3.0, "max_len": 128.0}

    async def play() -> None:
        engines = {"a": CachingEngine(), "b": Small()}
        router = Router(engines)
        engines["b"].served = 4
        assert await router.health() == {"active": 3.0, "max_len": 128.0}
        assert await router.version() == 0
        assert (await router.score(np.arange(3, dtype=np.int32))).tolist() == [0, -1, -1]
        await router.pause()
        assert not any(e.stuck.is_set() for e in engines.values())
        await router.resume()
        assert all(e.stuck.is_set() for e in engines.values())
        await router.sleep()
        await router.wake()
        with pytest.raises(TypeError, match="publish them with a transport"):
            await router.load(1, [])
        engines["a"].sick = WorkerError("gone")
        assert (await router.health())["max_len"] == 128.0  # of the one that is left
        assert router.counts()["drained"] == 1

    asyncio.run(play())


def test_router_metrics_are_since_the_call_before(ask: Ask, fleet: Fleet) -> None:
    router, _ = fleet("a")
    asyncio.run(router.generate(ask("key")))
    assert router.metrics()["router/completed"] == 1
    assert router.metrics()["router/completed"] == 0
    assert router.release("key") and router.metrics()["router/keys_released"] == 1


@settings(max_examples=25)
@given(data=st.data())
def test_router_accounts_add_up_and_nothing_stays_active(data: st.DataObject) -> None:
    """Requests that are answered, cancelled, aborted and failed, while engines die and return."""
    names = "abc"
    plan = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["ask", "stream", "cancel", "abort", "kill", "heal", "tick"]),
                st.integers(0, 7),
            ),
            max_size=40,
        )
    )
    sampling = Sampling(max_new_tokens=3)

    async def play() -> None:
        config = CachingEngine.Config(page=2, chunk=1, dp_ranks=2)
        engines = {name: CachingEngine(config) for name in names}
        router = Router(engines, check_every_s=0.001, readmission_timeout_s=0.02, failures=2)
        tasks: list[asyncio.Task[Any]] = []

        async def read(request: Request) -> None:
            async for _ in router.stream(request):
                pass

        async with router:
            for number, (what, which) in enumerate(plan):
                key, engine = f"k{which}", engines[names[which % 3]]
                request = Request(
                    id=f"{key}/{number}",
                    key=key,
                    tokens=np.arange(5, dtype=np.int32),
                    sampling=sampling,
                    seed=number,
                )
                if what == "ask":
                    tasks.append(asyncio.create_task(router.generate(request)))
                elif what == "stream":
                    tasks.append(asyncio.create_task(read(request)))
                elif what == "cancel" and tasks:
                    tasks[which % len(tasks)].cancel()
                elif what == "abort":
                    await router.abort([key])
                elif what == "kill":
                    engine.fault = engine.sick = WorkerError("gone")
                elif what == "heal":
                    engine.fault = engine.sick = None
                await asyncio.sleep(0.002 if what == "tick" else 0)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        counts = router.counts()
        assert all(counts[f"active/{name}"] == 0 for name in names)
        assert not any(u.waits for u in router._upstreams)
        assert not any(b.active for b in router._bindings._keys.values())
        ended = counts["completed"] + counts["failed"] + counts["cancelled"]
        assert counts["requests"] == ended
        failed = sum(isinstance(o, (RoutingError, EngineError)) for o in outcomes)
        assert counts["failed"] == failed
        assert counts["cached_tokens"] <= counts["prompt_tokens"] == 5 * counts["completed"]

    asyncio.run(play())


def test_router_costs_little_at_a_thousand_requests_at_once(ask: Ask) -> None:
    """The figure is in docs/measurements.md; here the limit is loose, as the machine is shared."""

    class Instant:
        samples = True

        async def generate(self, request: Request) -> Completion:
            await asyncio.sleep(0)
            return answer

    answer = asyncio.run(CachingEngine().generate(ask("key")))

    async def cpu(engine: Any, rounds: int) -> float:
        requests = [ask(f"k{i}") for i in range(1000)]
        began = time.process_time()
        for _ in range(rounds):
            await asyncio.gather(*(engine.generate(r) for r in requests))
        return (time.process_time() - began) / (rounds * len(requests))

    plain = asyncio.run(cpu(Instant(), 4))
    routed = asyncio.run(cpu(Router({f"e{i}": Instant() for i in range(8)}), 4))
    assert routed - plain < 400e-6
