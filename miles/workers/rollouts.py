"""The sampling side of the loop, as it stands in a rollout worker: environment, conversations,
engines.

The driver leases and collects; here `miles.loop.rollout` plays. Nothing here decides what is fresh,
moves weights, or imports torch.
"""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
)
from functools import lru_cache, partial
from typing import Any

from miles import loop
from miles.buffer import Lease
from miles.protocols import Context, Conversation, ServedSession, Tools
from miles.router import Router
from miles.seeds import derive_seed
from miles.session import Counters, Session, SessionConversation
from miles.session.partial import Partial
from miles.types import Group, Sampling, Task
from miles.wire.calls import Peer
from miles.wire.remote import RemoteEngine
from miles.workers.served import Served, SessionServer

__all__ = ["Rollouts", "as_they_end"]

_DIAL_S = 30.0  # for an engine worker to take a connection
_END_S = 30.0  # for a group that nobody wants any more to clean up
_RESTART_S = 240.0  # that a request waits for an engine which is being started again


@lru_cache(maxsize=1024)  # asked for by every attempt of a group
def _group_seed(seed: int, group: int) -> int:
    return derive_seed(seed, "evaluate" if group < 0 else "rollout", group)


async def as_they_end(
    play: Callable[[Callable[[], None]], Coroutine[Any, Any, Group]], *, name: str
) -> AsyncGenerator[Group | None]:
    """None whenever one attempt of a group has ended, last the group. `play(tell)` plays it, and
    calls `tell` for every attempt; leaving early ends it."""
    ended: asyncio.Queue[None] = asyncio.Queue()
    playing = asyncio.create_task(play(partial(ended.put_nowait, None)), name=name)
    playing.add_done_callback(lambda _: ended.put_nowait(None))
    try:
        while True:
            await ended.get()
            if playing.done():
                break
            yield None
        yield await playing
    finally:
        playing.cancel()
        await asyncio.wait({playing}, timeout=_END_S)
        if playing.done() and not playing.cancelled():
            playing.exception()  # heard here, if the group was not waited for any more


class Rollouts:
    """Implements `miles.loop.Rollouts`; the driver calls `connect`, `published` or `replaying`,
    `group` or `returning`, and `counts`."""

    def __init__(self, parts: Mapping[str, Any], context: Context) -> None:
        """`parts` holds the environment, the tito handler, perhaps a sandbox, an engine where that
        lives here (it replays demonstrations), and environments of evaluation sets, each as
        `environment:<set>`."""
        settings = context.settings
        self.settings = settings
        self.environment = parts["environment"]
        self.environments = {
            name.partition(":")[2]: part
            for name, part in parts.items()
            if name.startswith("environment:")
        }
        self.tito = parts["tito"]
        self.sandbox = parts.get("sandbox")
        self.engine: Any = parts.get("engine")
        self.max_len: int | None = None
        self.sampler: Router | None = None  # evaluates; the rollout engine, if that samples
        self.sampler_max_len: int | None = None
        self.sampling = Sampling(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )
        self._replays = self.engine is not None
        self._peers: list[Peer] = []
        self._servers: dict[Sampling, SessionServer] = {}  # those that were asked for
        self._sessions: dict[int, list[Session]] = defaultdict(list)  # by group being played
        self._keys: dict[int, set[str]] = defaultdict(set)  # the same, of routing keys
        self._held: dict[int, AsyncExitStack] = {}  # what ends with a group
        self._counters = Counters()  # of sessions that have ended
        self._returned: dict[int, Callable[[], None]] = {}

    # ---- what the driver calls

    async def ping(self) -> None:
        """Answer, which shows that nothing blocks this process."""

    async def connect(self, engines: Sequence[Sequence[Any]], max_len: int | None) -> None:
        """Dial engine workers, each given as (name, host, port, token). `max_len` is their longest
        context in tokens. Raises `WorkerError`."""
        await self.close()
        self._peers = [
            await Peer.dial(name, (host, port), token, _DIAL_S)
            for name, host, port, token in engines
        ]
        if self._peers:
            settings = self.settings
            limit = settings.worker_timeout_s
            mirrors = (RemoteEngine(peer, timeout_s=limit).look() for peer in self._peers)
            router = Router(
                {engine.handle.name: engine for engine in await asyncio.gather(*mirrors)},
                # who asks has a deadline; a completion that keeps it is not the engine's fault
                request_timeout_s=max(
                    settings.episode_timeout_s, settings.session.upstream_timeout_s
                ),
                check_every_s=1.0,
                readmission_timeout_s=_RESTART_S,
            )
            self.sampler, self.sampler_max_len = await router.__aenter__(), max_len
        if not self._replays:
            engine: Any = self.sampler
            self.engine = Partial(engine) if self.settings.partial else engine
            self.max_len = max_len

    async def rewire(self, engines: Sequence[Sequence[Any]]) -> None:
        """Dial those again whose connection has ended, or that are elsewhere now (a host that
        vanished does not end connections); arguments as of `connect`."""
        for peer, (_, host, port, token) in zip(self._peers, engines, strict=True):
            if peer.lost or peer.address != (host, port):
                await peer.redial((host, port), token, _DIAL_S)

    async def published(self, version: int) -> None:
        """The engine workers now serve this version."""
        if self.sampler is not None:
            self.sampler.published(version)

    async def replaying(self, version: int) -> None:
        """The engine that replays demonstrations says this version from now on."""
        await self.engine.load(version, ())

    async def group(
        self,
        group: int,
        task: Task,
        samples: int | None = None,
        sampling: Sampling | None = None,
        of: str = "",
    ) -> Group:
        """Play a whole group under this id; `samples`, `sampling` and the set's name `of` are given
        by evaluations."""
        how = {} if sampling is None else {"sampling": sampling}
        here = self
        if of in self.environments:
            here = copy.copy(self)  # shares everything except the environment
            here.environment = self.environments[of]
        async with AsyncExitStack() as held:
            held.callback(self._end, group)
            self._held[group] = held
            return await loop.rollout(here, Lease(id=group, task=task), samples, **how)

    async def returning(self, group: int, task: Task) -> AsyncIterator[Group | None]:
        """As `group`: None whenever one attempt has ended, last the group."""

        async def play(tell: Callable[[], None]) -> Group:
            self._returned[group] = tell
            try:
                return await self.group(group, task)
            finally:
                del self._returned[group]

        async with aclosing(as_they_end(play, name=f"group {group}")) as ends:
            async for each in ends:
                yield each

    def _end(self, group: int) -> None:
        del self._held[group]
        for session in self._sessions.pop(group, ()):
            self._counters.add(session.counters)
            self._keys[group].add(session.id)
        for key in self._keys.pop(group, ()):
            if self.sampler is not None:
                self.sampler.release(key)

    async def counts(self) -> dict[str, Any]:
        """Of `session` and `router`, since the start."""
        router = {} if self.sampler is None else self.sampler.counts()
        return {"session": self._counters.plain(), "router": router}

    async def end(self) -> None:
        """Close everything, the sandbox's prepared boxes included."""
        await self.close()
        if (close := getattr(self.sandbox, "close", None)) is not None:
            await close()

    async def close(self) -> None:
        """Stop serving sessions and hang up on engines."""
        for server in self._servers.values():
            await server.close()
        self._servers.clear()
        if self.sampler is not None:
            await self.sampler.__aexit__()
        for peer in self._peers:
            peer.close()

    # ---- what the loop asks

    def returned(self, lease: Lease) -> None:
        """One attempt of a group has ended."""
        if (tell := self._returned.get(lease.id)) is not None:
            tell()

    def tools(self, lease: Lease, index: int | None, sampling: Sampling | None = None) -> Tools:
        """Everything one attempt may use. `sampling` is given by evaluations, which use the
        sampler."""
        seed = _group_seed(self.settings.seed, lease.id)
        name = f"g{lease.id}"
        if index is not None:
            name, seed = f"{name}.{index}", derive_seed(seed, index)
        self._keys[lease.id].add(name)  # for requests that are made without a session
        engine, max_len = self.engine, self.max_len
        if sampling is not None:
            engine, max_len = self.sampler, self.sampler_max_len
        how = sampling or self.sampling

        def conversation(key: str) -> Conversation:
            # several conversations of one attempt or group must not sample alike
            own = seed if key == name else derive_seed(seed, key)
            if self.settings.session.through == "server" and engine.samples:
                server = self._server(engine, how, max_len)
                return server.conversation(key, partial(self._open, server, lease, key, own))
            made = SessionConversation(
                key=key,
                tito=self.tito,
                engine=engine,
                sampling=how,
                seed=own,
                solution=lease.task.solution,
                max_len=max_len,
                rules=self.settings.session,
            )
            self._sessions[lease.id].append(made.session)
            return made

        def serve(key: str) -> AbstractAsyncContextManager[ServedSession]:
            server = self._server(engine, how, max_len)
            own = seed if key == name else derive_seed(seed, key)
            return self._serve(server, lease, key=key, seed=own)

        more: dict[str, Any] = {} if sampling is None else {"sampling": sampling}
        return Tools(
            id=name,
            group=lease.id,
            samples=self.settings.samples_per_group,
            seed=seed,
            sampling=how,
            engine=engine,
            tito=self.tito,
            sandbox=self.sandbox,
            conversation=conversation,
            serve=serve,
            play=None if index is not None else partial(loop.play, self, lease, **more),
        )

    async def _open(self, server: SessionServer, lease: Lease, key: str, seed: int) -> Served:
        """A served session that is closed with its group."""
        served = await self._held[lease.id].enter_async_context(server.open(key, seed))
        self._sessions[lease.id].append(served.session)
        return served

    @asynccontextmanager
    async def _serve(
        self, server: SessionServer, lease: Lease, *, key: str, seed: int
    ) -> AsyncIterator[ServedSession]:
        async with server.open(key, seed) as served:
            self._sessions[lease.id].append(served.session)
            yield served

    def _server(self, engine: Any, sampling: Sampling, max_len: int | None) -> SessionServer:
        """The one for this way of sampling; training's has the port that was asked for."""
        if sampling not in self._servers:
            rules = self.settings.session
            self._servers[sampling] = SessionServer(
                tito=self.tito,
                engine=engine,
                sampling=sampling,
                rules=rules,
                max_len=max_len,
                port=rules.port if sampling == self.sampling else 0,
            )
        return self._servers[sampling]
