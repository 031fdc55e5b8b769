"""Health checks: who is drained, and who may come back.

An engine is drained when its checks fail, or it serves weights older than the published ones. It
comes back when it is well and serves exactly those. Requests are `miles.router.router`'s matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from miles.router.accounts import Accounts
from miles.router.upstream import Seen, Upstream

__all__ = ["Watch"]

_log = logging.getLogger(__name__)
_LONGEST_BACKOFF_S = 300.0
_VERSION = "it serves weight version"


class Watch:
    """Checks every engine in a task of its own, so that one that hangs delays nobody else."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        accounts: Accounts,
        *,
        every_s: float,
        timeout_s: float,
        failures: int,
    ) -> None:
        self._upstreams = upstreams
        self._accounts = accounts
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._failures = failures
        self._tasks: list[asyncio.Task[None]] = []
        self._now = {upstream.name: asyncio.Event() for upstream in upstreams}
        self.some = asyncio.Event()
        """Set while an engine serves."""
        self.some.set()
        self.published: int | None = None
        """Weight version that engines must serve; None when nobody publishes any."""

    @property
    def running(self) -> bool:
        """Whether drained engines are looked at, so that one may come back."""
        return bool(self._tasks)

    def start(self) -> None:
        """Begin checking."""
        self._tasks = [
            asyncio.get_running_loop().create_task(self._watch(u), name=f"router check {u.name}")
            for u in self._upstreams
        ]

    async def stop(self) -> None:
        """End the checks, and wait until they have ended."""
        probes = [u.probe for u in self._upstreams if u.probe is not None]
        tasks, self._tasks = [*self._tasks, *probes], []
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def publish(self, version: int) -> None:
        """Engines must serve this version from now on; they are asked at once."""
        self.published = version
        for event in self._now.values():
            event.set()

    def drain(self, upstream: Upstream, why: str) -> None:
        """Take an engine out; safe to call twice."""
        if upstream.drained:
            return
        _log.warning("router: engine %s is drained: %s", upstream.name, why)
        upstream.drain(why)
        self._accounts.drained += 1
        if not any(u.serving for u in self._upstreams):
            self.some.clear()

    async def ask(self, upstream: Upstream) -> str:
        """What is wrong with an engine; empty when it is well. Everybody who asks at the same time
        shares one check, except that nobody takes good news from before the question."""
        old = upstream.probe
        while True:
            probe = upstream.probe
            if probe is None or probe.done():
                loop = asyncio.get_running_loop()
                name = f"router probe {upstream.name}"
                probe = upstream.probe = loop.create_task(self._probe(upstream), name=name)
            await asyncio.wait([probe])  # one who gives up waiting does not end it for the others
            if probe.cancelled():
                return "the router was closed"
            seen = probe.result()
            if seen.published != self.published:
                continue  # seen before other weights were published
            wrong = seen.wrong or self._wrong_version(upstream, seen.version)
            if wrong or probe is not old:
                return wrong

    def _wrong_version(self, upstream: Upstream, version: int) -> str:
        wanted = self.published
        # one that serves may be ahead, as it has new weights before the publish is complete
        if wanted is None or version == wanted or (version > wanted and not upstream.drained):
            return ""
        return f"{_VERSION} {version}; {wanted} is published"

    async def _watch(self, upstream: Upstream) -> None:
        event = self._now[upstream.name]
        while True:
            try:
                async with asyncio.timeout(self._every_s):
                    await event.wait()
            except TimeoutError:
                pass
            event.clear()
            await self.check(upstream)

    async def check(self, upstream: Upstream) -> None:
        """Look at one engine, and drain or readmit it."""
        wrong = await self.ask(upstream)
        if upstream.serving:
            upstream.failed_checks = upstream.failed_checks + 1 if wrong else 0
            if upstream.failed_checks >= self._failures or wrong.startswith(_VERSION):
                self.drain(upstream, wrong)
        elif not wrong and upstream.drained_s >= self._backoff(upstream):
            upstream.readmit()
            self.some.set()
            self._accounts.readmitted += 1
            _log.info("router: engine %s serves again", upstream.name)

    def _backoff(self, upstream: Upstream) -> float:
        """Seconds to stay out: longer each time for an engine that says it is well and fails
        requests all the same."""
        if not upstream.relapses:
            return 0.0
        return min(self._every_s * 2.0**upstream.relapses, _LONGEST_BACKOFF_S)

    async def _probe(self, upstream: Upstream) -> Seen:
        published, version, wrong = self.published, -1, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await upstream.engine.health()
                if published is not None:
                    version = int(await upstream.engine.version())
        except TimeoutError:
            wrong = f"its health check took longer than {self._timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - any answer but a good one means it is not well
            wrong = f"its health check failed: {type(error).__name__}: {error}"
        return Seen(published=published, version=version, wrong=wrong)
