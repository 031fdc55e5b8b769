"""A modelled engine: it queues, computes prompts, decodes in a batch, caches prefixes, and takes
weights.

Requests that decode share one clock of tokens, so that a request costs two events however long it
is. No token has a value, and what a request reserves of the cache is known when it begins: an
engine that over-commits and retracts later is not modelled.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from miles.errors import EngineError
from miles.simulate.cache import PrefixCache
from miles.simulate.keys import EngineKeys
from miles.simulate.requests import DECODES, GONE, PREFILLS, WAITS, Job, answered
from miles.types import Array, Completion, Finish

__all__ = ["ModelledEngine"]

_NEVER = float("inf")


class ModelledEngine:
    """Implements what the router asks of an `Engine`, in the time of the running loop."""

    samples = True

    def __init__(
        self, name: str, keys: EngineKeys, changed: Callable[[ModelledEngine], None]
    ) -> None:
        """`changed` is called when it begins or ends to compute. To be made in the loop."""
        self._loop = asyncio.get_running_loop()
        self._time, self._call_at = self._loop.time, self._loop.call_at
        self._future = self._loop.create_future
        self.name = name
        self.keys = keys
        self.cache = PrefixCache(keys.page_tokens)
        self.resident: set[str] = set()
        """Trajectories that have sent a request here and have not ended."""
        self.dead = ""
        """Why it fails everything; empty while it lives."""
        self.serves = -1
        """Weight version."""
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self.busy_s = self.batch_s = 0.0
        self.computing = self._told = False
        """Whether it has something to compute, and may."""
        self.traced = True
        """Whether `changed` is called for every request that comes or goes."""
        self._changed = changed
        self._waiting: deque[Job] = deque()
        self._prefills: deque[Job] = deque()
        self._decoding: list[tuple[float, int, Job]] = []  # by the token clock of their end
        self._jobs: dict[str, Job] = {}  # running or waiting, by request id
        self._running = 0  # prefilling or decoding
        self._active = 0  # decoding
        self._used = 0  # tokens of cache reserved
        self._clock = 0.0  # tokens that a request which decoded all the time would have
        self._base = 0.0  # context in the batch, less the token clock of each
        self._history: list[tuple[float, int]] = []  # (token clock, version) of every load
        self._prefill_left = 0.0
        self._at = 0.0  # when `_settle` ran last
        self._decode_rate = self._prefill_rate = 0.0
        self._speed = 1.0
        self._stops = 0
        self._asleep = False
        self._sequence = 0
        self._timer: Any = None
        size = keys.max_requests + 1
        self._forward = [
            keys.forward_s + keys.weights_s * (1 - (1 - keys.activated) ** n) + keys.sequence_s * n
            for n in range(size)
        ]  # seconds of a forward of n requests, their context left out

    # ---- what the router asks

    async def generate(self, request: Any) -> Completion:
        """Answer after the modelled time. Raises `EngineError` when dead, or too long."""
        if self.dead:
            raise EngineError(f"engine {self.name}: {self.dead}")
        job = Job(request, self._future())
        if job.need > self.keys.kv_tokens:
            raise EngineError(
                f"engine {self.name}: request {request.id!r} of {job.prompt} tokens and {job.left} "
                f"to sample does not fit kv_tokens ({self.keys.kv_tokens})"
            )
        self._settle()
        self.resident.add(request.trajectory)
        self._jobs[request.id] = job
        self._waiting.append(job)
        self._plan()
        try:
            return await job.answer
        except asyncio.CancelledError:
            self._drop(job)
            raise

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these keys (None: all) with what they have."""
        self._settle()
        ended = [j for j in self._jobs.values() if keys is None or j.request.key in keys]
        for job in ended:
            self._end(job, "abort")
        self._plan()
        return len(ended)

    async def version(self) -> int:
        """The version being served. Raises `EngineError` when dead."""
        if self.dead:
            raise EngineError(f"engine {self.name}: {self.dead}")
        return self.serves

    async def health(self) -> Mapping[str, float]:
        """As every engine's. Raises `EngineError` when dead."""
        if self.dead:
            raise EngineError(f"engine {self.name}: {self.dead}")
        self._settle()
        return {
            "active": self._running,
            "waiting": len(self._waiting),
            "tokens": self.tokens,
            "busy_s": self.busy_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }

    async def score(self, tokens: Array) -> Array:
        """Always raises `EngineError`: no token has a value."""
        raise EngineError(f"engine {self.name}: a modelled engine cannot score")

    async def pause(self) -> None:
        """Stop computing; counts."""
        self._settle()
        self._stops += 1
        self._plan()

    async def resume(self) -> None:
        """Undo one `pause`."""
        self._settle()
        self._stops -= 1
        self._plan()

    async def sleep(self) -> None:
        """Stop computing until `wake`."""
        self._settle()
        self._asleep = True
        self._plan()

    async def wake(self) -> None:
        """Go on, asleep or not."""
        self._settle()
        self._asleep = False
        self._plan()

    # ---- what the simulation does to it

    async def load(self, version: int, weights: Iterable[tuple[str, Any]] = ()) -> None:
        """Serve other weights from now on; requests go on, and spans say so."""
        self._settle()
        self.serves = version
        self._history.append((self._clock, version))

    def forget(self) -> None:
        """Compute all keys and values again: prompts and what was sampled since, and nothing is
        cached."""
        self._settle()
        self.cache.clear()
        decoding = [job for _, _, job in sorted(self._decoding) if job.state == DECODES]
        self._decoding.clear()
        for job in decoding:
            self._interrupt(job)
            job.state = PREFILLS
        for job in [*self._prefills, *decoding]:
            job.cached = 0
        self._prefills.extend(decoding)
        self._begin_prefill()
        self._plan()

    def die(self, why: str) -> None:
        """Fail everything from now on, and lose everything."""
        self._settle()
        self.dead = why
        for job in list(self._jobs.values()):
            self._leave(job)
            if not job.answer.done():
                job.answer.set_exception(EngineError(f"engine {self.name}: {why}"))
        self.cache.clear()
        self._plan()

    def revive(self, version: int) -> None:
        """Serve again, with these weights."""
        self._settle()
        self.dead = ""
        self.serves = version
        self._history.append((self._clock, version))
        self._plan()

    def at_speed(self, share: float) -> None:
        """Compute at a share of its speed from now on."""
        if share != self._speed:
            self._settle()
            self._speed = share
            self._plan()

    def ended(self, trajectory: str) -> None:
        """A trajectory will send nothing more."""
        self.resident.discard(trajectory)

    @property
    def stopped(self) -> bool:
        """Whether it was told not to compute."""
        return self._stops > 0 or self._asleep

    @property
    def running(self) -> int:
        """Requests that prefill or decode."""
        return self._running

    # ---- the model

    def _settle(self) -> None:
        """Bring everything to the present: tokens decoded and prompts computed since the last."""
        now = self._time()
        passed = now - self._at
        if passed <= 0:
            return
        self._at = now
        self._clock += self._decode_rate * passed
        self._prefill_left -= self._prefill_rate * passed
        if self.computing:
            self.busy_s += passed
            self.batch_s += self._running * passed

    def _plan(self) -> None:
        """Admit, set the rates that hold until the next event, and wait for that."""
        if self._waiting:
            self._admit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._prefill_rate = self._decode_rate = 0.0
        self.computing = computing = self._running > 0 and not (
            self._stops > 0 or self._asleep or self.dead
        )
        if computing:
            self._next()
        if self.traced or computing != self._told:
            self._told = computing
            self._changed(self)

    def _next(self) -> None:
        """Rates, and a timer for the first prompt or completion that is done at these."""
        keys, heap, soonest = self.keys, self._decoding, _NEVER
        prefills = bool(self._prefills)
        if prefills:
            self._prefill_rate = rate = keys.prefill_tokens_per_s * self._speed
            soonest = self._prefill_left / rate
        while heap and heap[0][2].state != DECODES:
            heappop(heap)  # it has left
        if heap and not (prefills and not keys.decode_during_prefill):
            n = self._active
            context = self._base + n * self._clock
            forward = self._forward[n] + keys.context_s * context
            rate = keys.tokens_per_forward / forward * self._speed
            if prefills:
                rate *= keys.decode_during_prefill
            self._decode_rate = rate
            ends = (heap[0][0] - self._clock) / rate
            if ends < soonest:
                soonest = ends
        self._timer = self._call_at(self._at + soonest if soonest > 0 else self._at, self._event)

    def _event(self) -> None:
        self._timer = None
        self._settle()
        if self._prefills and self._prefill_left <= 1e-6:
            self._decode(self._prefills.popleft())
            self._begin_prefill()
        heap, now = self._decoding, self._clock + 1e-6
        while heap and (heap[0][0] <= now or heap[0][2].state != DECODES):
            job = heappop(heap)[2]
            if job.state == DECODES:
                self._end(job, "stop")
        self._plan()

    def _admit(self) -> None:
        waiting, keys = self._waiting, self.keys
        while waiting and self._running < keys.max_requests:
            job = waiting[0]
            if self._used + job.need > keys.kv_tokens or self.dead:
                return
            waiting.popleft()
            request = job.request
            own = self.cache.take(request.trajectory, job.prompt)
            if request.shared > own:
                own = max(own, min(self.cache.find(request.group, job.prompt), request.shared))
            job.cached = own
            self._used += job.need
            self._running += 1
            if self.cache.tokens > keys.kv_tokens - self._used:
                self.cache.shrink(keys.kv_tokens - self._used)
            job.state = PREFILLS
            self._prefills.append(job)
            if len(self._prefills) == 1:
                self._begin_prefill()

    def _begin_prefill(self) -> None:
        if self._prefills:
            job = self._prefills[0]
            self._prefill_left = float(job.prompt + job.done - job.cached)

    def _decode(self, job: Job) -> None:
        """Its prompt is computed: it joins the batch."""
        request = job.request
        if request.shared > job.cached:
            self.cache.put(request.group, request.shared)
            self.cache.shrink(self.keys.kv_tokens - self._used)
        job.state, job.start = DECODES, self._clock
        self._active += 1
        self._base += job.prompt + job.done - self._clock
        self._sequence += 1
        heappush(self._decoding, (self._clock + job.left, self._sequence, job))

    def _interrupt(self, job: Job) -> None:
        """It leaves the batch, with what it has sampled."""
        self._active -= 1
        self._base -= job.prompt + job.done - job.start
        done = min(job.left, max(0, round(self._clock - job.start)))
        self._count(job, job.start, done)
        job.done += done
        job.left -= done

    def _count(self, job: Job, start: float, done: int) -> None:
        """Add `done` tokens since the token clock `start` to its spans, by version."""
        history = self._history
        if not job.spans and done and history and history[-1][0] <= start:  # no load since
            job.spans.append((done, history[-1][1]))
            return
        at = bisect_right(self._history, (start, 1 << 60)) - 1
        told = 0
        for index in range(max(at, 0), len(self._history)):
            version = self._history[index][1]
            last = index + 1 == len(self._history)
            until = done if last else min(done, round(self._history[index + 1][0] - start))
            if until > told:
                if job.spans and job.spans[-1][1] == version:
                    job.spans[-1] = (job.spans[-1][0] + until - told, version)
                else:
                    job.spans.append((until - told, version))
                told = until

    def _end(self, job: Job, finish: Finish) -> None:
        """Answer with what it has: everything, when it stops by itself."""
        if finish == "stop":
            self._clock = max(self._clock, job.start + job.left)  # not a rounding error less
        self._leave(job)
        cache, room = self.cache, self.keys.kv_tokens - self._used
        cache.put(job.request.trajectory, job.prompt + job.done)
        if cache.tokens > room:
            cache.shrink(room)
        self.tokens += job.done
        self.prompt_tokens += job.prompt
        self.cached_tokens += job.cached
        answer = job.answer
        if not answer.done():
            answer.set_result(answered(job.done, job.spans, finish, job.cached))

    def _drop(self, job: Job) -> None:
        """Whoever asked has gone."""
        if job.state != GONE:
            self._settle()
            self._leave(job)
            self._plan()

    def _leave(self, job: Job) -> None:
        """It holds nothing any more; what it sampled is in its spans."""
        state, job.state = job.state, GONE
        if state == GONE:
            return
        del self._jobs[job.request.id]
        if state == WAITS:
            self._waiting.remove(job)
            return
        if state == DECODES:
            self._interrupt(job)
        elif self._prefills[0] is job:
            self._prefills.popleft()
            self._begin_prefill()
        else:
            self._prefills.remove(job)
        self._running -= 1
        self._used -= job.need
