"""Places for groups, and the one place where freshness is decided.

The buffer admits new groups, holds finished ones, hands the trainer batches that are fresh enough,
and keeps the accounts: every group that was started is in flight, buffered, in training, trained,
or dropped for a named reason. It reads a clock only to say how long something waited.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from miles.records.accounts import Accounts
from miles.records.starvation import Standstill, starved
from miles.types import Drop, Group, Task

__all__ = ["Buffer", "Lease"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right, and the duty, to bring back one group."""

    id: int
    """The group's id."""
    task: Task
    """What to attempt."""


class Buffer:
    """See the module. All methods belong to one event loop."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        samples_per_group: int,
        max_lag: int = 0,
        concurrency: int = 256,
        oversample: int = 0,
        capacity: int | None = None,
        take_order: str = "fifo",
        free_each_sample: bool = False,
        max_retries: int = 0,
        cancel_doomed: bool = False,
        version: int = 0,
        until: int | None = None,
        starved_after_s: float = 120.0,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.samples_per_group = samples_per_group
        self.max_lag = max_lag
        self.concurrency = concurrency
        self.oversample = oversample
        self.capacity = max(capacity or 2 * groups_per_step, groups_per_step)
        self.take_order = take_order
        self.free_each_sample = free_each_sample
        self.max_retries = max_retries
        self.cancel_doomed = cancel_doomed
        self.unused: list[Task] = []  # of groups that grew too old, to attempt again
        self.retried: Counter[str] = Counter()  # task id -> how often it was
        self.starved_after_s = starved_after_s
        self.trainer_version = version
        self.published_version = version
        self.until = until  # version after which no group is needed
        self.accounts = Accounts()
        # (group id, "trained" or the drop's reason) since the last ledger line
        self.ended: list[tuple[int, str]] = []
        self._leases: dict[int, Lease] = {}
        self._running: dict[int, int] = {}  # group id -> trajectories that hold a place
        self._running_total = 0
        # group id -> when it began, and version that was published then
        self._began: dict[int, tuple[float, int]] = {}
        self._cancels: dict[int, Callable[[], object]] = {}
        self._doomed: dict[int, int] = {}  # cancelled and not back yet -> version too late for it
        self._ready: dict[int, Group] = {}  # in order of arrival
        self._arrived: dict[int, float] = {}  # when each of them did
        self._oldest: dict[int, int | None] = {}  # of groups in `_ready` and in training
        self._training: dict[int, Lease] = {}
        self.lags: list[int] = []  # staleness of the groups taken last, when they were taken
        self._held, self._held_s = 0, 0.0  # new groups; seconds that `take` waited meanwhile
        self._closed = self._stopped = False
        self._changed = asyncio.Event()
        self._clock: Callable[[], float] | None = None  # of the event loop
        self._last_arrival = self._now()
        self._waits: tuple[int, float, Accounts] | None = None  # `take`: for how many, since, then

    # ---- admission

    def room(self) -> bool:
        """Whether one more group may start now."""
        return not self.blocked()

    def blocked(self) -> str:
        """Why no further group may start now; empty when one may."""
        if self._held:
            return "new ones are held"
        if self._closed:
            return "the tasks have run out"
        a, newest = self.accounts, self.published_version + self.max_lag + 1
        if self.until is not None:
            newest = min(newest, self.until)
        ahead = newest - self.trainer_version
        held = a.in_flight + a.buffered + a.training
        # while a step trains, its groups are complete: a new one can only be for a later step
        if ahead <= bool(a.training) or held >= ahead * self.groups_per_step + self.oversample:
            return "max_lag allows no more to be under way"
        if a.buffered >= self.capacity:
            return "the buffer is full"
        if self.concurrency - self._running_total < self.samples_per_group:
            return "all places are taken"
        return ""

    async def place(self) -> None:
        """Wait until one more group may start; every drop, take, step and publish wakes this."""
        while not self.room():
            await self._wait(None)

    def start(self, lease: Lease, cancel: Callable[[], object] | None = None) -> None:
        """A group begins; `cancel` ends it early, when it has become useless."""
        self._began[lease.id] = self._now(), self.published_version
        if cancel is not None:
            self._cancels[lease.id] = cancel
        self._leases[lease.id] = lease
        self._running[lease.id] = self.samples_per_group
        self._running_total += self.samples_per_group
        self.accounts.started += 1
        self.accounts.in_flight += 1

    def returned(self, group: int) -> None:
        """One trajectory of a group is back; frees its place when places are counted by sample."""
        if self.free_each_sample and self._running.get(group, 0) > 0:
            self._running[group] -= 1
            self._running_total -= 1
            self._changed.set()

    def finish(self, group: Group, drop: Drop | None) -> None:
        """A group is back: buffered, or dropped on arrival."""
        self._running_total -= self._running.pop(group.id)
        self._began.pop(group.id)
        self._cancels.pop(group.id, None)
        self._doomed.pop(group.id, None)  # it may be back before it could be cancelled
        self.accounts.in_flight -= 1
        self.accounts.attempts += len(group.trajectories)
        self.accounts.truncated += group.truncated
        if drop is None:
            self._ready[group.id] = group
            self._oldest[group.id] = group.oldest
            self.accounts.buffered += 1
            self._last_arrival = self._arrived[group.id] = self._now()
        else:
            self._end(group.id, drop.reason)
        self._changed.set()

    def _end(self, group: int, fate: str) -> None:
        del self._leases[group]
        self._oldest.pop(group, None)
        self._arrived.pop(group, None)
        if fate == "trained":
            self.accounts.trained += 1
        else:
            self.accounts.dropped[fate] += 1
        self.ended.append((group, fate))

    # ---- collection

    def staleness(self, group: Group) -> int:
        """Trainer version minus the oldest version of a trainable token anywhere in the group."""
        oldest = self._oldest[group.id]
        return 0 if oldest is None else self.trainer_version - oldest

    def _evict(self) -> None:
        for group in [g for g in self._ready.values() if self.staleness(g) > self.max_lag]:
            del self._ready[group.id]
            self.accounts.buffered -= 1
            self._retry(group.task)
            self._end(group.id, "stale")
            self._changed.set()

    def _retry(self, task: Task) -> None:
        if self.retried[task.id] < self.max_retries:
            self.retried[task.id] += 1
            self.accounts.retried += 1
            self.unused.append(task)

    def _cancel_doomed(self) -> None:
        """End groups in flight that can no longer be fresh enough when the trainer next takes any:
        their oldest token may be of the version that was published as they began."""
        next_take = self.trainer_version + bool(self._training)
        for group, (_, began) in self._began.items():
            late = next_take - began > self.max_lag and group not in self._doomed
            if late and (cancel := self._cancels.get(group)) is not None:
                self._doomed[group] = next_take
                cancel()

    def doomed(self, group: int) -> Drop | None:
        """Why a group that was cancelled is dropped; None when it was not this buffer's doing."""
        if (next_take := self._doomed.pop(group, None)) is None:
            return None
        self._retry(self._leases[group].task)  # until now its own lease stood for the task
        return Drop(
            reason="aborted",
            detail=f"began under version {self._began[group][1]}, more than max_lag "
            f"({self.max_lag}) before version {next_take}, at which groups are taken next",
        )

    async def take(self, count: int, *, last: str = "keep") -> list[Group]:
        """Exactly `count` groups, none older than `max_lag`, in order of id; they count as in
        training.

        When the tasks have run out (`close`): the short rest, or with `last="drop"` nothing. Empty
        also after `stop`. Raises `BufferStarved` when nothing usable arrived for `starved_after_s`.
        """
        self._last_arrival = self._now()
        a = self.accounts
        self._waits = count, self._last_arrival, replace(a, dropped=Counter(a.dropped))
        try:
            return await self._take(count, last)
        finally:
            self._waits = None

    async def _take(self, count: int, last: str) -> list[Group]:
        self._evict()
        while True:
            if self._stopped:
                return []
            if len(self._ready) >= count or self._closed:
                self._evict()  # stragglers may have been stale on arrival
            if len(self._ready) >= count and self._in_order(count):
                return self._collect(count)
            if self._closed and not self.accounts.in_flight:
                return self._collect(len(self._ready)) if last == "keep" else []
            patience = self._last_arrival + self.starved_after_s - self._now()
            if patience <= 0 and (still := self.standstill()) is not None:
                if not still.in_flight or still.dropped:
                    raise starved(still)
                patience = inf  # attempts are merely slow; each has its own deadline
            if not self._held:
                await self._wait(patience)
            else:
                held_since = self._now()
                await self._wait(None)
                self._last_arrival = self._now()
                self._held_s += self._last_arrival - held_since

    def _in_order(self, count: int) -> bool:
        """Whether, under `started`, no group in flight began before the ones to take: the order in
        which groups end prefers short ones."""
        if self.take_order != "started" or not self._running:
            return True
        first = min(self._running)
        return sum(group < first for group in self._ready) >= count

    def _collect(self, count: int) -> list[Group]:
        ready = list(self._ready.values())
        if self.take_order == "freshest":
            ready.sort(key=lambda g: (self.staleness(g), g.id))
        elif self.take_order == "started":
            ready.sort(key=lambda g: g.id)
        taken = sorted(ready[:count], key=lambda g: g.id)
        for group in taken:
            del self._ready[group.id]
            self._arrived.pop(group.id, None)
            self._training[group.id] = self._leases[group.id]
        self.lags = [self.staleness(g) for g in taken]
        self.accounts.buffered -= len(taken)
        self.accounts.training += len(taken)
        if self.cancel_doomed:
            self._cancel_doomed()
        self._changed.set()
        return taken

    def standstill(self) -> Standstill | None:
        """What the trainer waits for, and what it saw since it does; None while it does not, and
        while new groups are held."""
        if self._waits is None or self._held:
            return None
        count, began, seen = self._waits
        now, a = self._now(), self.accounts
        first = min(self._began, key=self._began.__getitem__, default=None)
        longest = None
        if first is not None:
            longest = (first, self._leases[first].task.id, now - self._began[first][0])
        return Standstill(
            wanted=count,
            ready=len(self._ready),
            seconds=now - began,
            dropped=a.dropped - seen.dropped,
            attempts=a.attempts - seen.attempts,
            truncated=a.truncated - seen.truncated,
            in_flight=a.in_flight,
            longest=longest,
            blocked=self.blocked(),
        )

    # ---- versions

    def stepped(self, version: int, groups: Sequence[Group]) -> None:
        """The trainer has taken its step on these groups and is now at `version`."""
        for group in groups:
            del self._training[group.id]
            self._end(group.id, "trained")
        self.accounts.training -= len(groups)
        self.trainer_version = version
        self._changed.set()

    def published(self, version: int) -> None:
        """Engines serve `version`."""
        self.published_version = version
        self._changed.set()

    # ---- holding and ending

    def hold(self) -> None:
        """No new groups start until `release`; counts."""
        self._held += 1

    def release(self) -> None:
        """Undo one `hold`."""
        self._held -= 1
        self._last_arrival = self._now()
        self._changed.set()

    async def drained(self, timeout: float) -> None:
        """Wait until nothing is in flight. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            while self.accounts.in_flight:
                await self._wait(None)

    def close(self) -> None:
        """No more tasks will come."""
        self._closed = True
        self._changed.set()

    def stop(self) -> None:
        """Give the trainer nothing more: the run was interrupted."""
        self._stopped = True
        self._changed.set()

    def end(self) -> None:
        """The stage is over: groups that were not trained on are dropped as `run_ended`. After
        `stop` their leases stay open, as if they had never started: a resumed run starts them
        again."""
        left = [*self._running, *self._ready]
        for known in (self._running, self._began, self._cancels, self._doomed):
            known.clear()
        self._ready.clear()
        self._arrived.clear()
        self._running_total = self.accounts.in_flight = self.accounts.buffered = 0
        if self._stopped:
            self.accounts.started -= len(left)
        else:
            for group in left:
                self._end(group, "run_ended")
        self._changed.set()

    def leases(self) -> list[Lease]:
        """Groups that were started and have not ended, by id: a resumed run starts them again."""
        return [self._leases[i] for i in sorted(self._leases)]

    def held_s(self) -> float:
        """Seconds that `take` has waited while new groups were held."""
        return self._held_s

    def queue(self) -> list[tuple[float, int]]:
        """(seconds since it came back, staleness now) of each group that waits for the trainer."""
        now = self._now()
        return [(now - self._arrived[g.id], self.staleness(g)) for g in self._ready.values()]

    @property
    def running(self) -> int:
        """Trajectories that hold a place."""
        return self._running_total

    @property
    def waiting(self) -> tuple[Group, ...]:
        """Finished groups that wait for the trainer."""
        return tuple(self._ready.values())

    def _now(self) -> float:
        """Seconds of the event loop, which are virtual in a simulation."""
        if self._clock is None:  # asking for the loop is a system call on Python 3.11
            try:
                self._clock = asyncio.get_running_loop().time
            except RuntimeError:  # made before it runs; loops count as the monotonic clock does
                return time.monotonic()
        return self._clock()

    async def _wait(self, timeout: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if timeout == inf else timeout):
                await self._changed.wait()
