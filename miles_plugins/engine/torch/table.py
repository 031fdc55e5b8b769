"""The rows of a batch: which request holds each, what is known of it, and how far it is computed.

Arrays by row and the questions that they answer; nothing here runs a forward or touches the cache.

A row knows `length` tokens, of which the first `filled` have keys and values in the cache. Whatever
lies between is due, be it a prompt, a freshly sampled token, or everything again after new weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles import Array, Completion, EngineError, Finish, Request, Span
from miles_plugins.engine.torch.sampling import Rules, mix

__all__ = ["FREE", "SAMPLING", "SCORING", "Job", "Outcome", "Table"]

FREE, SAMPLING, SCORING = 0, 1, 2
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
    told: int = 0
    """Sampled tokens that a listener has been given."""
    followers: list[Job] = field(default_factory=list)
    """Jobs with the same prompt, waiting for this one to have computed it."""

    @property
    def key(self) -> bytes:
        """Equal for equal tokens."""
        return self.tokens.tobytes()


Outcome = tuple[Job, Completion | Array | EngineError]
"""A job that ended: a completion, the log-probs of a score, or what went wrong."""


class Table:
    """Everything known of every row. Arrays are (rows,) or (rows, max_len)."""

    def __init__(self, *, rows: int, max_len: int, score_temperature: float) -> None:
        self.rows, self.max_len = rows, max_len
        self.score_temperature = score_temperature
        self.jobs: list[Job | None] = [None] * rows
        self.state = np.full(rows, FREE, np.int8)
        self.held_back = np.zeros(rows, bool)  # waits for another row to compute its prompt
        self.tokens = np.zeros((rows, max_len), np.int64)
        self.length = np.zeros(rows, np.int64)
        self.filled = np.zeros(rows, np.int64)
        self.old = np.zeros(rows, bool)  # keys and values are of earlier weights
        self.prompt = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.used = np.zeros(rows, np.int64)  # the step in which the row was last computed or freed
        self.arrival = np.zeros(rows, np.int64)
        self.logprobs = np.zeros((rows, max_len), np.float32)
        self.truncated = np.zeros((rows, max_len), np.float32)
        self.versions = np.zeros((rows, max_len), np.int32)
        self.streams = np.zeros(rows, np.uint64)
        self.temperature = np.ones(rows, np.float32)
        self.greedy = np.zeros(rows, bool)
        self.top_p = np.ones(rows, np.float64)
        self.top_k = np.zeros(rows, np.int64)
        self.stops = np.full((rows, 1), -1, np.int64)  # (rows, most stop ids of a request)
        self._newest = 0

    @property
    def active(self) -> int:
        """Rows in use."""
        return int(np.count_nonzero(self.state))

    def free(self) -> list[int]:
        """Free rows; those whose keys and values could be of use come last, the stalest first."""
        rows = np.flatnonzero(self.state == FREE)
        return rows[np.lexsort((rows, self.used[rows], self.filled[rows] > 0))].tolist()

    def occupy(self, job: Job, row: int, *, share: int, step: int) -> None:
        """Give a row to a job that finds `share` of its tokens in the cache."""
        job.row, job.cached = row, share
        self.jobs[row] = job
        size = len(job.tokens)
        self.tokens[row, :size] = job.tokens
        self.length[row] = self.prompt[row] = size
        self.filled[row] = share
        self.old[row] = False
        self._newest += 1
        self.arrival[row] = self._newest
        self.used[row] = step
        if job.request is None:
            self.state[row] = SCORING
            self.temperature[row] = self.score_temperature
            return
        sampling = job.request.sampling
        self.state[row] = SAMPLING
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

    def seed(self, rows: Sequence[int]) -> None:
        """Set the noise streams of rows just occupied from their requests' seeds."""
        requests = [self.jobs[row].request for row in rows]
        seeds = [request.seed & (2**64 - 1) if request else 0 for request in requests]
        self.streams[rows] = mix(mix(np.array(seeds, np.uint64)) + np.uint64(1))

    def release(self, row: int, *, step: int) -> None:
        """Free a row; what it has in the cache may serve later prompts."""
        job = self.jobs[row]
        if job is not None:
            job.row = -1
        self.jobs[row] = None
        self.state[row] = FREE
        self.used[row] = step
        if self.old[row]:
            self.filled[row], self.old[row] = 0, False

    def grow_old(self) -> None:
        """New weights: rows that sample keep their keys and values, all others lose them."""
        sampling = self.state == SAMPLING
        self.filled[~sampling] = 0
        self.old = sampling & (self.filled > 0)

    def resident(self, tokens: Array, pending: Sequence[int]) -> tuple[int, int]:
        """The row that shares the longest computed prefix with a prompt, and how long it is.

        The last prompt token is never counted: it is computed for its logits. Rows in `pending` are
        yet to receive what they share, and are left out.
        """
        size = len(tokens) - 1
        if size < 1 or not self.filled.any():
            return -1, 0
        differs = self.tokens[:, :size] != tokens[:size]
        share = np.where(differs.any(1), differs.argmax(1), size)
        share = np.minimum(share, np.where(self.old, 0, self.filled))
        share[pending] = 0
        # Among equals a free row, which need not be copied.
        row = int(np.argmax(2 * share + (self.state == FREE)))
        best = int(share[row])
        return (row, best) if best >= min(size, _WORTH_COPYING) else (-1, 0)

    def rules(self, rows: Array) -> Rules:
        """How these rows are drawn."""
        return Rules(
            temperature=self.temperature[rows],
            greedy=self.greedy[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
        )

    def scores(self, row: int) -> Array:
        """(tokens,) float32 of a scoring row, 0 for the first."""
        values = self.logprobs[row, : self.length[row]].copy()
        values[0] = 0
        return values

    def drawn(self, job: Job) -> Array:
        """(new tokens,) int32 that a running job has sampled since the last call."""
        if job.row < 0:
            return np.zeros(0, np.int32)
        start, stop = int(self.prompt[job.row]) + job.told, int(self.length[job.row])
        job.told += stop - start
        return self.tokens[job.row, start:stop].astype(np.int32)

    def completion(self, job: Job, finish: Finish) -> Completion:
        """What a job has sampled so far; nothing if it still waits."""
        sampling = job.request.sampling
        cut = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
        row = max(job.row, 0)
        stop = int(self.length[row]) if job.row >= 0 else 0
        part = slice(int(self.prompt[row]) if job.row >= 0 else 0, stop)
        return Completion(
            tokens=self.tokens[row, part].astype(np.int32),
            logprobs=self.logprobs[row, part].copy(),
            spans=_spans(self.versions[row, part]),
            finish=finish,
            truncated_logprobs=self.truncated[row, part].copy() if cut else None,
            cached_tokens=job.cached,
        )


def _spans(versions: Array) -> tuple[Span, ...]:
    """Runs of equal values, which never decrease."""
    if not len(versions):
        return ()
    first, last = int(versions[0]), int(versions[-1])
    if first == last:
        return (Span(start=0, stop=len(versions), version=first),)
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(
        Span(start=a, stop=b, version=int(versions[a])) for a, b in itertools.pairwise(edges)
    )
