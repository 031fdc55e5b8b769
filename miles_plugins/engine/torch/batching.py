"""Continuous batching: which requests hold a row, what the next forward computes, what was sampled.

Synchronous and free of asyncio; one `step` is one forward. Request state lives in arrays by row, so
the cost of a step hardly grows with the number of rows.

A row knows `length` tokens, of which the first `filled` have keys and values in the cache. Whatever
lies between is due, be it a prompt, a freshly sampled token, or everything again after new weights;
when nothing more is due the row's last slot gives its next token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from miles import Array, Completion, EngineError, Finish, Request, Span
from miles_plugins.engine.torch.decoder import Cache, Forward, Parameters
from miles_plugins.engine.torch.sampling import Rules, draw, logprob_of, mix, noise

__all__ = ["Batching", "Job", "Outcome"]

_FREE, _SAMPLING, _SCORING = 0, 1, 2
_WORTH_COPYING = 16
"""Shared tokens below which a partial prefix is computed anew: a copy costs about as much."""


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """One request, or tokens to score when `request` is None."""

    tokens: Array
    """(tokens,) int64: the prompt, or what to score."""
    request: Request | None = None
    """What was asked."""
    future: Any = None
    """For the caller; not touched here."""
    row: int = -1
    """Row it holds; -1 while it waits."""
    cached: int = 0
    """Prompt tokens it did not have to compute."""
    followers: list[Job] = field(default_factory=list)
    """Jobs with the same prompt, waiting for this one to have computed it."""

    @property
    def key(self) -> bytes:
        """Equal for equal tokens."""
        return self.tokens.tobytes()


Outcome = tuple[Job, "Completion | Array | EngineError"]


class Batching:
    """Rows, their requests, and the arithmetic between two forwards."""

    def __init__(
        self,
        *,
        forward: Forward,
        cache: Cache,
        rows: int,
        max_len: int,
        reuse: bool,
        score_temperature: float,
    ) -> None:
        self.forward, self.cache, self.reuse = forward, cache, reuse
        self.score_temperature = score_temperature
        self.rows, self.max_len = rows, max_len
        self.device = cache.data.device
        self.parameters: Parameters | None = None
        self.version = -1
        self.waiting: deque[Job] = deque()
        self.jobs: list[Job | None] = [None] * rows
        self.leaders: dict[bytes, Job] = {}
        self.sampled = self.prompt_tokens = self.cached_tokens = 0
        self.busy_s = 0.0
        self._clock = 0
        self._newest = 0
        self.state = np.full(rows, _FREE, np.int8)
        self.held_back = np.zeros(rows, bool)  # (rows,) follows another row's prompt
        self.tokens = np.zeros((rows, max_len), np.int64)
        self.length = np.zeros(rows, np.int64)
        self.filled = np.zeros(rows, np.int64)
        self.prompt = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.used = np.zeros(rows, np.int64)  # (rows,) when the row was last computed or freed
        self.arrival = np.zeros(rows, np.int64)
        self.logprobs = np.zeros((rows, max_len), np.float32)
        self.truncated = np.zeros((rows, max_len), np.float32)
        self.versions = np.zeros((rows, max_len), np.int32)
        self.streams = np.zeros(rows, np.uint64)
        self.temperature = np.ones(rows, np.float32)
        self.greedy = np.zeros(rows, bool)
        self.top_p = np.ones(rows, np.float64)
        self.top_k = np.zeros(rows, np.int64)
        self.stops = np.full((rows, 1), -1, np.int64)

    @property
    def active(self) -> int:
        """Rows in use."""
        return int(np.count_nonzero(self.state))

    def due(self) -> bool:
        """Whether a step would do anything."""
        return self.parameters is not None and (bool(self.waiting) or bool(self.state.any()))

    def load(self, version: int, parameters: Parameters) -> None:
        """Serve other weights from the next step on. Running requests keep their tokens, log-probs and
        versions, and their keys and values are computed again under the new weights."""
        self.parameters, self.version = parameters, version
        self.forget()

    def forget(self) -> None:
        """Drop all keys and values; running requests compute theirs again."""
        self.filled[:] = 0

    # ------------------------------------------------------------ requests come and go

    def abort(self, keys: Sequence[str] | None) -> list[Outcome]:
        """End requests of these routing keys, or all; scores go on."""
        wanted = None if keys is None else set(keys)

        def meant(job: Job | None) -> bool:
            if job is None or job.request is None:
                return False
            return wanted is None or job.request.key in wanted

        ended = [job for job in (*self.waiting, *self.jobs) if meant(job)]
        outcomes: list[Outcome] = [(job, self._completion(job, "abort")) for job in ended]
        for job in ended:
            self.remove(job)
        return outcomes

    def remove(self, job: Job) -> None:
        """Forget a job, wherever it is; its followers get a new leader."""
        if job.row < 0:
            if job in self.waiting:
                self.waiting.remove(job)
            return
        row = job.row
        self._release(row)
        if self.held_back[row]:
            self.held_back[row] = False
            for leader in self.leaders.values():
                if job in leader.followers:
                    leader.followers.remove(job)
            return
        if self.leaders.get(job.key) is job:
            del self.leaders[job.key]
        if job.followers:
            heir, *rest = job.followers
            heir.followers, job.followers = rest, []
            self.leaders[heir.key] = heir
            self.held_back[heir.row] = False
            if self.filled[row]:
                self._copy([row], [heir.row], int(self.filled[row]))
                self.filled[heir.row] = self.filled[row]

    def _release(self, row: int) -> None:
        job = self.jobs[row]
        if job is not None:
            job.row = -1
        self.jobs[row] = None
        self.state[row] = _FREE
        self.used[row] = self._clock

    def _admit(self) -> None:
        free = deque(np.flatnonzero(self.state == _FREE).tolist())
        if not free or not self.waiting:
            return
        # Rows whose keys and values a newcomer could reuse are taken last, the stalest first.
        free = deque(sorted(free, key=lambda r: (self.filled[r] > 0, self.used[r], r)))
        sources: list[int] = []
        targets: list[int] = []
        longest = 0
        admitted: list[int] = []
        while self.waiting and free:
            job = self.waiting.popleft()
            leader = self.leaders.get(job.key) if self.reuse and job.request else None
            share = 0
            if leader is not None:
                row = free.popleft()
                leader.followers.append(job)
                self.held_back[row] = True
            else:
                source, share = self._resident(job, targets)
                if share and self.state[source] == _FREE:
                    row = source  # what it holds beyond the shared prefix is overwritten in place
                    free.remove(row)
                else:
                    row = free.popleft()
                    if share:
                        sources.append(source)
                        targets.append(row)
                        longest = max(longest, share)
                if self.reuse and job.request:
                    self.leaders[job.key] = job
            self._occupy(job, row, share)
            admitted.append(row)
        if targets:
            self._copy(sources, targets, longest)
        jobs = [self.jobs[row] for row in admitted]
        seeds = [job.request.seed & (2**64 - 1) if job.request else 0 for job in jobs]
        self.streams[admitted] = mix(mix(np.array(seeds, np.uint64)) + np.uint64(1))

    def _occupy(self, job: Job, row: int, share: int) -> None:
        job.row, job.cached = row, share
        self.jobs[row] = job
        size = len(job.tokens)
        self.tokens[row, :size] = job.tokens
        self.length[row] = self.prompt[row] = size
        self.filled[row] = share
        self._newest += 1
        self.arrival[row] = self._newest
        self.used[row] = self._clock
        self.prompt_tokens += size
        self.cached_tokens += share
        if job.request is None:
            self.state[row] = _SCORING
            self.temperature[row] = self.score_temperature
            return
        sampling = job.request.sampling
        self.state[row] = _SAMPLING
        self.limit[row] = min(size + sampling.max_new_tokens, self.max_len)
        self.greedy[row] = sampling.temperature == 0
        self.temperature[row] = sampling.temperature or 1.0
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        stops = sampling.stop_ids
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.rows, len(stops)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops

    def _resident(self, job: Job, pending: list[int]) -> tuple[int, int]:
        """The row that shares the longest computed prefix with a prompt, and how long it is.

        The last prompt token is always computed, for its logits.
        """
        size = len(job.tokens) - 1
        if not self.reuse or job.request is None or size < 1 or not self.filled.any():
            return -1, 0
        differs = self.tokens[:, :size] != job.tokens[:size]
        share = np.where(differs.any(1), differs.argmax(1), size)
        share = np.minimum(share, self.filled)
        share[pending] = 0  # rows that are yet to receive their copy
        # Among equals a free row, which need not be copied.
        row = int(np.argmax(2 * share + (self.state == _FREE)))
        best = int(share[row])
        return (row, best) if best >= min(size, _WORTH_COPYING) else (-1, 0)

    def _copy(self, sources: list[int], targets: list[int], length: int) -> None:
        self.cache.copy(self._index(np.array(sources)), self._index(np.array(targets)), length)

    def _index(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    # ------------------------------------------------------------ one forward

    def step(self) -> list[Outcome]:
        """Admit what fits, run one forward, and return what ended."""
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                self._admit()
                return self._forward()
        finally:
            self.busy_s += time.perf_counter() - began

    def _plan(self) -> tuple[Array, Array]:
        """(n,) rows and how many tokens of each the next forward computes, at most `slots` in all.

        Rows with several tokens due come first, oldest first, so that rows join soon; then rows in
        turn. Neither order can change what a row samples.
        """
        rows = np.flatnonzero((self.state != _FREE) & ~self.held_back)
        due = self.length[rows] - self.filled[rows]
        order = np.lexsort((self.arrival[rows], self.used[rows] * (due == 1), due == 1))
        rows, due = rows[order], due[order]
        room = self.forward.slots - (due.cumsum() - due)  # slots left before each row
        due = np.minimum(due, room)
        taken = due > 0
        return rows[taken], due[taken]

    def _forward(self) -> list[Outcome]:
        rows, counts = self._plan()
        if not len(rows):
            return []
        self._clock += 1
        slots, total = self.forward.slots, int(counts.sum())
        ends = counts.cumsum()
        padded = np.zeros(
            (3, slots), np.int64
        )  # token, row, position; padding has a row of its own
        padded[1] = self.cache.rows - 1
        slot_rows = rows.repeat(counts)
        positions = np.arange(total) - (ends - counts - self.filled[rows]).repeat(counts)
        padded[0, :total] = self.tokens[slot_rows, positions]
        padded[1, :total] = slot_rows
        padded[2, :total] = positions
        self.filled[rows] += counts
        self.used[rows] = self._clock
        complete = self.filled[rows] == self.length[rows]
        sampling = complete & (self.state[rows] == _SAMPLING)
        scoring = self.state[rows] == _SCORING
        inputs = self._index(padded)
        logits = self.forward(
            self.parameters,
            self.cache,
            *inputs,
            longest=int(positions.max()) + 1,
            head=bool(sampling.any() or scoring.any()),
        )
        ended: list[Outcome] = []
        if scoring.any():
            self._score(logits, slot_rows, positions, scoring.repeat(counts))
            ended += self._scored(rows[scoring & complete])
        if sampling.any():
            ended += self._sample(logits, rows[sampling], ends[sampling] - 1)
        return ended

    def _score(
        self, logits: torch.Tensor, slot_rows: Array, positions: Array, scored: Array
    ) -> None:
        """Keep the log-prob of the token after each slot of a scoring row."""
        slots = np.flatnonzero(scored & (positions + 1 < self.length[slot_rows]))
        if not len(slots):
            return
        rows, after = slot_rows[slots], positions[slots] + 1
        self.logprobs[rows, after] = logprob_of(
            _take(logits, slots), self.tokens[rows, after], self.temperature[rows]
        )

    def _scored(self, rows: Array) -> list[Outcome]:
        ended: list[Outcome] = []
        for row in rows.tolist():
            job = self.jobs[row]
            values = self.logprobs[row, : self.length[row]].copy()  # (tokens,) float32
            values[0] = 0
            ended.append((job, values))
            self._release(row)
        return ended

    def _sample(self, logits: torch.Tensor, rows: Array, slots: Array) -> list[Outcome]:
        rows, slots = self._gather_followers(rows, slots)
        rules = Rules(
            temperature=self.temperature[rows],
            greedy=self.greedy[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
        )
        at = self.length[rows]
        drawn = draw(_take(logits, slots), rules, noise(self.streams[rows], at.astype(np.uint64)))
        self.tokens[rows, at] = drawn.tokens
        self.logprobs[rows, at] = drawn.logprobs
        self.truncated[rows, at] = drawn.truncated
        self.versions[rows, at] = self.version
        self.length[rows] = at + 1
        self.sampled += len(rows)
        stopped = (drawn.tokens[:, None] == self.stops[rows]).any(1)
        broken = ~np.isfinite(drawn.logprobs)
        over = stopped | (at + 1 >= self.limit[rows]) | broken
        if not over.any():
            return []
        ended: list[Outcome] = []
        for index in np.flatnonzero(over).tolist():
            row = int(rows[index])
            job = self.jobs[row]
            if broken[index]:
                what = (
                    f"logits are not finite at token {int(at[index])} under version {self.version}"
                )
                ended.append(
                    (job, EngineError(f"engine torch: request {job.request.id!r}: {what}"))
                )
            else:
                ended.append((job, self._completion(job, "stop" if stopped[index] else "length")))
            self._release(row)
        if broken.any():
            self.cache.clear()
            self.forget()
        return ended

    def _gather_followers(self, rows: Array, slots: Array) -> tuple[Array, Array]:
        """Rows that were waiting for a prompt computed just now sample from the same logits."""
        if not self.leaders:
            return rows, slots
        sources: list[int] = []
        targets: list[int] = []
        taken_from: list[int] = []
        longest = 0
        first = self.length[rows] == self.prompt[rows]
        for row, slot in zip(rows[first].tolist(), slots[first].tolist(), strict=True):
            job = self.jobs[row]
            if self.leaders.get(job.key) is not job:
                continue
            del self.leaders[job.key]
            size = len(job.tokens)
            for follower in job.followers:
                sources.append(row)
                targets.append(follower.row)
                taken_from.append(slot)
                follower.cached = size
                longest = max(longest, size)
            job.followers = []
        if not targets:
            return rows, slots
        self._copy(sources, targets, longest)
        self.filled[targets] = self.filled[sources]
        self.cached_tokens += int(self.filled[targets].sum())
        self.held_back[targets] = False
        self.used[targets] = self._clock
        return np.concatenate([rows, targets]), np.concatenate([slots, taken_from])

    def _completion(self, job: Job, finish: Finish) -> Completion:
        row, cut = job.row, _cuts(job.request)
        if row < 0:
            nothing = np.zeros(0, np.float32)
            return Completion(
                tokens=np.zeros(0, np.int32),
                logprobs=nothing,
                spans=(),
                finish=finish,
                truncated_logprobs=nothing if cut else None,
            )
        part = slice(int(self.prompt[row]), int(self.length[row]))
        return Completion(
            tokens=self.tokens[row, part].astype(np.int32),
            logprobs=self.logprobs[row, part].copy(),
            spans=_spans(self.versions[row, part]),
            finish=finish,
            truncated_logprobs=self.truncated[row, part].copy() if cut else None,
            cached_tokens=job.cached,
        )


def _cuts(request: Request) -> bool:
    sampling = request.sampling
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _take(logits: torch.Tensor, slots: Array) -> torch.Tensor:
    return logits.index_select(0, torch.from_numpy(slots).to(logits.device))


def _spans(versions: Array) -> tuple[Span, ...]:
    """Runs of equal values, which never decrease."""
    if not len(versions):
        return ()
    first, last = int(versions[0]), int(versions[-1])
    if first == last:
        return (Span(start=0, stop=len(versions), version=first),)
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(
        Span(start=a, stop=b, version=int(versions[a]))
        for a, b in zip(edges, edges[1:], strict=False)
    )
