"""Continuous batching: requests join and leave between any two forwards, and share prompts.

Synchronous and free of asyncio; one `step` is one forward. Bookkeeping is array arithmetic over the
rows, so the cost of a step hardly grows with their number.

Prefill and decoding are one thing here: a row's due tokens are computed, as many as fit, and when
nothing more is due its last slot gives the next token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from miles import Array, EngineError
from miles_plugins.engine.torch.cache import Cache
from miles_plugins.engine.torch.decoder import Forward, Parameters
from miles_plugins.engine.torch.sampling import draw, logprob_of, noise
from miles_plugins.engine.torch.table import FREE, SAMPLING, SCORING, Job, Outcome, Table

__all__ = ["Batching", "Job", "Outcome"]


class Batching:
    """A queue, a table of rows, a cache, and the arithmetic between two forwards."""

    def __init__(self, *, forward: Forward, cache: Cache, table: Table, reuse: bool) -> None:
        self.forward, self.cache, self.table, self.reuse = forward, cache, table, reuse
        self.device = cache.data.device
        self.parameters: Parameters | None = None
        self.version = -1
        self.waiting: deque[Job] = deque()
        self.leaders: dict[bytes, Job] = {}
        self.sampled = self.prompt_tokens = self.cached_tokens = 0
        self.busy_s = 0.0
        self.steps = 0

    def jobs(self) -> list[Job]:
        """Everything asked and not yet answered."""
        return [*self.waiting, *(job for job in self.table.jobs if job is not None)]

    def due(self) -> bool:
        """Whether a step would do anything."""
        return self.parameters is not None and bool(self.waiting or self.table.active)

    def load(self, version: int, parameters: Parameters, *, keep: bool = False) -> None:
        """Serve other weights from the next step on.

        Running requests keep their tokens, log-probs and versions; their keys and values are
        computed again under the new weights, or kept with `keep`. Kept ones serve no other request.
        """
        self.parameters, self.version = parameters, version
        if keep:
            self.table.grow_old()
        else:
            self.forget()

    def forget(self) -> None:
        """Drop all keys and values; running requests compute theirs again."""
        self.table.filled[:] = 0
        self.table.old[:] = False

    # ------------------------------------------------------------ requests come and go

    def abort(self, keys: Sequence[str] | None) -> list[Outcome]:
        """End requests of these routing keys, or all; scores go on."""
        wanted = None if keys is None else set(keys)
        asked = [job for job in self.jobs() if job.request is not None]
        ended = [job for job in asked if wanted is None or job.request.key in wanted]
        outcomes: list[Outcome] = [(job, self.table.completion(job, "abort")) for job in ended]
        for job in ended:
            self.remove(job)
        return outcomes

    def remove(self, job: Job) -> None:
        """Forget a job, wherever it is; its followers get a new leader."""
        table, row = self.table, job.row
        if row < 0:
            if job in self.waiting:
                self.waiting.remove(job)
            return
        table.release(row, step=self.steps)
        if table.held_back[row]:
            table.held_back[row] = False
            self.leaders[job.key].followers.remove(job)
            return
        if self.leaders.get(job.key) is job:
            del self.leaders[job.key]
        if job.followers:
            heir, *rest = job.followers
            heir.followers, job.followers = rest, []
            self.leaders[heir.key] = heir
            table.held_back[heir.row] = False
            if table.filled[row]:
                self._copy([row], [heir.row], int(table.filled[row]))
                table.filled[heir.row] = table.filled[row]
                table.old[heir.row] = table.old[row]

    def _admit(self) -> None:
        if not self.waiting:
            return
        table, free = self.table, self.table.free()
        sources: list[int] = []
        targets: list[int] = []
        longest = 0
        admitted: list[int] = []
        while self.waiting and free:
            job = self.waiting.popleft()
            share, shares = 0, self.reuse and job.request is not None
            leader = self.leaders.get(job.key) if shares else None
            if leader is not None:
                row = free.pop(0)
                leader.followers.append(job)
                table.held_back[row] = True
            else:
                source, share = table.resident(job.tokens, targets) if shares else (-1, 0)
                if share and table.state[source] == FREE:
                    row = source  # what it holds beyond the shared prefix is overwritten in place
                    free.remove(row)
                else:
                    row = free.pop(0)
                    if share:
                        sources.append(source)
                        targets.append(row)
                        longest = max(longest, share)
                if shares:
                    self.leaders[job.key] = job
            table.occupy(job, row, share=share, step=self.steps)
            if job.request is not None:
                self.prompt_tokens += len(job.tokens)
                self.cached_tokens += share
            admitted.append(row)
        if targets:
            self._copy(sources, targets, longest)
        if admitted:
            table.seed(admitted)

    def _copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions; every source is read before any target is written."""
        self.cache.copy(self._index(np.array(sources)), self._index(np.array(targets)), length)

    def _index(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    # ------------------------------------------------------------ one forward

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Admit what fits, run one forward, and return what ended."""
        began = time.perf_counter()
        try:
            self._admit()
            return self._forward()
        finally:
            self.busy_s += time.perf_counter() - began

    def _plan(self) -> tuple[Array, Array]:
        """(n,) rows and how many tokens of each the next forward computes, at most `slots` in all.

        Rows with several tokens due come first, oldest first, so that rows join soon; then rows in
        turn. Neither order can change what a row samples.
        """
        table = self.table
        rows = np.flatnonzero((table.state != FREE) & ~table.held_back)
        due = table.length[rows] - table.filled[rows]
        if len(rows) <= self.forward.slots and (due == 1).all():
            return rows, due
        order = np.lexsort((table.arrival[rows], table.used[rows] * (due == 1), due == 1))
        rows, due = rows[order], due[order]
        room = self.forward.slots - (due.cumsum() - due)  # slots left before each row
        due = np.minimum(due, room)
        taken = due > 0
        return rows[taken], due[taken]

    def _forward(self) -> list[Outcome]:
        table = self.table
        rows, counts = self._plan()
        if not len(rows):
            return []
        self.steps += 1
        ends = counts.cumsum()
        total = int(ends[-1])
        slot_rows = rows.repeat(counts)
        positions = np.arange(total) - (ends - counts - table.filled[rows]).repeat(counts)
        aligned = total == len(rows) and int(rows.max()) < self.forward.slots <= self.cache.rows
        at = slot_rows if aligned else np.arange(total)  # the slot of each token
        slots = np.zeros((3, self.forward.slots), np.int64)  # token, row and position of each
        slots[1] = self.cache.rows - 1  # padding has a row of its own
        slots[:, at] = table.tokens[slot_rows, positions], slot_rows, positions
        table.filled[rows] += counts
        table.used[rows] = self.steps
        complete = table.filled[rows] == table.length[rows]
        sampling = complete & (table.state[rows] == SAMPLING)
        scoring = table.state[rows] == SCORING
        samples, scores = bool(sampling.any()), bool(scoring.any())
        logits_TV = self.forward(
            self.parameters,
            self.cache,
            *self._index(slots),
            longest=int(positions.max()) + 1,
            head=samples or scores,
            aligned=aligned,
        )
        ended: list[Outcome] = []
        if scores:
            self._score(logits_TV, at, slot_rows, positions, scoring.repeat(counts))
            for row in rows[scoring & complete].tolist():
                ended.append((table.jobs[row], table.scores(row)))
                table.release(row, step=self.steps)
        if samples:
            ended += self._sample(logits_TV, rows[sampling], at[ends[sampling] - 1])
        return ended

    def _score(
        self,
        logits_TV: torch.Tensor,
        slots: Array,
        slot_rows: Array,
        positions: Array,
        scored: Array,
    ) -> None:
        """Keep the log-prob of the token after each slot of a scoring row."""
        table = self.table
        scored = scored & (positions + 1 < table.length[slot_rows])
        if not scored.any():
            return
        rows, after = slot_rows[scored], positions[scored] + 1
        logits_SV = logits_TV.index_select(0, self._index(slots[scored]))
        table.logprobs[rows, after] = logprob_of(
            logits_SV, table.tokens[rows, after], table.temperature[rows]
        )

    def _sample(self, logits_TV: torch.Tensor, rows: Array, slots: Array) -> list[Outcome]:
        """Draw the next token of `rows` from the logits of `slots`, (S,) each."""
        table = self.table
        if self.leaders:
            rows, slots = self._join_followers(rows, slots)
        at = table.length[rows]
        if len(slots) < len(logits_TV) or (slots[1:] <= slots[:-1]).any():
            logits_TV = logits_TV.index_select(0, self._index(slots))
        drawn = draw(
            logits_TV,
            table.rules(rows),
            noise(table.streams[rows], at.astype(np.uint64)),
        )
        table.tokens[rows, at] = drawn.tokens
        table.logprobs[rows, at] = drawn.logprobs
        table.truncated[rows, at] = drawn.truncated
        table.versions[rows, at] = self.version
        table.length[rows] = at + 1
        self.sampled += len(rows)
        stopped = (drawn.tokens[:, None] == table.stops[rows]).any(1)
        broken = ~np.isfinite(drawn.logprobs)
        over = np.flatnonzero(stopped | broken | (at + 1 >= table.limit[rows]))
        ended: list[Outcome] = []
        for index in over.tolist():
            row = int(rows[index])
            job = table.jobs[row]
            if broken[index]:
                ended.append((job, self._not_finite(job, int(at[index]))))
            else:
                finish = "stop" if stopped[index] else "length"
                ended.append((job, table.completion(job, finish)))
            table.release(row, step=self.steps)
        if broken.any():  # a masked key is multiplied by 0, which only finite numbers survive
            self.cache.clear()
            self.forget()
        return ended

    def _not_finite(self, job: Job, at: int) -> EngineError:
        return EngineError(
            f"engine torch: request {job.request.id!r}: logits are not finite at token {at} under "
            f"version {self.version}"
        )

    def _join_followers(self, rows: Array, slots: Array) -> tuple[Array, Array]:
        """Rows that were waiting for a prompt computed just now sample from the same logits."""
        table = self.table
        first = table.length[rows] == table.prompt[rows]
        sources: list[int] = []
        shared: list[int] = []
        followers: list[Job] = []
        for row, slot in zip(rows[first].tolist(), slots[first].tolist(), strict=True):
            job = table.jobs[row]
            if self.leaders.get(job.key) is not job:
                continue
            del self.leaders[job.key]
            followers += job.followers
            sources += [row] * len(job.followers)
            shared += [slot] * len(job.followers)
            job.followers = []
        if not followers:
            return rows, slots
        targets = [job.row for job in followers]
        lengths = table.filled[sources]
        self._copy(sources, targets, int(lengths.max()))
        table.filled[targets] = lengths
        table.old[targets] = table.old[sources]
        table.held_back[targets] = False
        table.used[targets] = self.steps
        for job in followers:
            job.cached = len(job.tokens)
        self.cached_tokens += int(lengths.sum())
        return np.concatenate([rows, targets]), np.concatenate([slots, shared])
