"""Health checks: draining, and readmission only at the published version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.errors import WorkerError
from miles.router import Router
from miles.router.upstream import Upstream
from miles.testing import CachingEngine
from miles.types import Request

Ask = Callable[..., Request]
Fleet = Callable[..., tuple[Router, dict[str, CachingEngine]]]


def test_checks_drain_an_engine_that_fails_some_in_a_row(
    fleet: Fleet, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        router, engines = fleet("ab", failures=2)
        engines["a"].sick = OSError("connection refused")
        async with router:
            await until(lambda: router.counts()["drained"])
        upstream = router._upstreams[0]
        assert upstream.failed_checks == 2
        assert upstream.drained == "its health check failed: OSError: connection refused"

    with caplog.at_level(logging.WARNING, "miles.router"):
        asyncio.run(play())
    assert "router: engine a is drained: its health check failed" in caplog.text


def test_checks_forgive_one_failure(fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("ab", failures=2)
        engines["a"].sick = OSError("once")
        await router._watch.check(router._upstreams[0])
        engines["a"].sick = None
        await router._watch.check(router._upstreams[0])
        engines["a"].sick = OSError("again")
        await router._watch.check(router._upstreams[0])
        assert router.counts()["drained"] == 0

    asyncio.run(play())


def test_checks_of_an_engine_that_hangs_delay_no_other(fleet: Fleet, until: Any) -> None:
    async def play() -> None:
        router, engines = fleet("ab", failures=1, check_timeout_s=0.2)
        await engines["a"].pause()
        engines["b"].sick = OSError("refused")
        async with router:
            await until(lambda: router._upstreams[1].drained)
            assert router._upstreams[0].serving  # its check still waits
            await until(lambda: router._upstreams[0].drained)
        assert router._upstreams[0].drained == "its health check took longer than 0.2 s"

    asyncio.run(play())


def test_checks_stop_with_the_block(fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("ab")
        await engines["a"].pause()  # a check that hangs is ended too
        async with router:
            await asyncio.sleep(0.02)
            names = {task.get_name() for task in asyncio.all_tasks()}
            assert {"router check a", "router check b", "router probe a"} <= names
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())


def test_engine_returns_only_with_the_published_version(fleet: Fleet, until: Any) -> None:
    async def play() -> None:
        router, engines = fleet("ab")
        for engine in engines.values():
            engine.served = 3
        router.published(3)
        async with router:
            engines["a"].sick = WorkerError("gone")
            await until(lambda: router.counts()["drained"])
            engines["a"].sick, engines["a"].served = None, 0  # restarted, with what it loads first
            await asyncio.sleep(0.05)
            assert router.counts()["readmitted"] == 0
            engines["a"].served = 4  # ahead is wrong, too, for one that comes back
            await asyncio.sleep(0.05)
            assert router.counts()["readmitted"] == 0
            router.published(4)
            await until(lambda: router.counts()["readmitted"])
        assert router._upstreams[0].serving

    asyncio.run(play())


def test_engine_that_missed_a_publish_is_drained(fleet: Fleet, until: Any) -> None:
    async def play() -> None:
        router, engines = fleet("ab", check_every_s=60)  # `published` looks at once
        engines["b"].served = 1
        async with router:
            router.published(1)
            await until(lambda: router.counts()["drained"])
        assert router._upstreams[0].drained == "it serves weight version 0; 1 is published"
        assert router._upstreams[1].serving

    asyncio.run(play())


def test_engine_that_has_the_next_version_before_the_others_serves_on(fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("ab")
        router.published(0)
        engines["a"].served = 1
        for upstream in router._upstreams:
            await router._watch.check(upstream)
        assert router.counts()["drained"] == 0

    asyncio.run(play())


def test_check_that_spans_a_publish_does_not_count(fleet: Fleet) -> None:
    """An answer about version 1 must not readmit an engine once 2 is published."""

    async def play() -> None:
        router, engines = fleet("a")
        upstream, watch = router._upstreams[0], router._watch
        engines["a"].served = 1
        router.published(1)
        watch.drain(upstream, "on purpose")
        await engines["a"].pause()
        checking = asyncio.create_task(watch.check(upstream))
        await asyncio.sleep(0.01)
        router.published(2)
        await engines["a"].resume()
        await checking
        assert not upstream.serving

    asyncio.run(play())


def test_an_answer_from_before_a_publish_drains_nobody(fleet: Fleet) -> None:
    """The engine said 0 and took version 1 while its answer was on the way."""

    async def play() -> None:
        router, engines = fleet("a")
        upstream, watch = router._upstreams[0], router._watch
        router.published(0)

        async def late(real: Any = engines["a"].version) -> int:
            answer = await real()
            await asyncio.sleep(0.02)
            return int(answer)

        engines["a"].version = late  # type: ignore[method-assign]
        checking = asyncio.create_task(watch.check(upstream))
        await asyncio.sleep(0.01)
        engines["a"].served = 1
        router.published(1)
        await checking
        assert upstream.serving

    asyncio.run(play())


def test_good_news_from_before_a_failure_does_not_count(fleet: Fleet) -> None:
    async def play() -> None:
        router, engines = fleet("ab")
        upstream, watch = router._upstreams[0], router._watch

        async def late(real: Any = engines["a"].health) -> Any:
            answer = await real()
            await asyncio.sleep(0.02)
            return answer

        engines["a"].health = late  # type: ignore[method-assign]
        early = asyncio.create_task(watch.ask(upstream))
        await asyncio.sleep(0.01)
        engines["a"].sick = WorkerError("gone")
        asked = asyncio.create_task(watch.ask(upstream))
        assert await early == "" and "WorkerError: gone" in await asked

    asyncio.run(play())


def test_engine_that_fails_while_well_stays_out_longer_each_time(
    ask: Ask, fleet: Fleet, until: Any
) -> None:
    async def play() -> list[float]:
        router, engines = fleet("ab", failures=1, check_every_s=0.02)
        upstream = router._upstreams[0]
        engines["a"].fault = OSError("reset")
        spells = []
        async with router:
            for spell in range(3):
                for number in range(20):
                    await router.generate(ask(f"s{spell}.{number}"))
                assert upstream.drained
                await until(lambda: upstream.serving)
                spells.append(asyncio.get_running_loop().time() - upstream.drained_at)
            engines["a"].fault = None
            for number in range(20):
                await router.generate(ask(f"good.{number}"))
        assert upstream.relapses == 0  # an answer clears its record
        return spells

    spells = asyncio.run(play())
    assert spells[0] >= 0.04 and spells[1] >= 0.08 and spells[2] >= 0.16


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["kill", "heal", "load", "publish", "wait"]), st.integers(0, 2)),
        max_size=40,
    )
)
def test_no_engine_is_readmitted_at_another_version_than_the_published(
    plan: list[tuple[str, int]],
) -> None:
    class Told(CachingEngine):
        told = -1

        async def version(self) -> int:
            self.told = await super().version()
            return self.told

    async def play() -> None:
        engines = {name: Told() for name in "abc"}
        router = Router(engines, check_every_s=0.001, failures=1)
        published = 0
        router.published(0)
        readmit, wrong = Upstream.readmit, []

        def checked(upstream: Upstream) -> None:
            if engines[upstream.name].told != published:
                wrong.append((upstream.name, engines[upstream.name].told, published))
            readmit(upstream)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Upstream, "readmit", checked)
            async with router:
                for what, which in plan:
                    engine = engines["abc"[which]]
                    if what == "kill":
                        engine.sick = WorkerError("gone")
                    elif what == "heal":
                        engine.sick = None
                    elif what == "load":
                        engine.served += 1
                    elif what == "publish":
                        published += 1
                        router.published(published)
                    await asyncio.sleep(0.003 if what == "wait" else 0)
                await asyncio.sleep(0.005)
                assert not wrong
                for engine in engines.values():  # and it does return, when all is right again
                    engine.sick, engine.served = None, published
                async with asyncio.timeout(5):
                    while any(u.drained for u in router._upstreams):
                        await asyncio.sleep(0.001)
        assert not wrong

    asyncio.run(play())
