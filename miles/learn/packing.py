"""Packing: which samples share a micro-batch, and how their tokens lie in one row.

Samples lie end to end, so that linear layers do no work on padding, and a prompt that several
samples begin with can lie there once. Plans are numpy and the same in every process; what attention
does with a row is in `attention`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.learn.sequence_split import Split

__all__ = [
    "Bucket",
    "Layout",
    "Stretches",
    "layout",
    "micro_batches",
    "prompt_families",
    "shares",
    "token_index",
]

UNPADDED = ("varlen", "flex")
"""Ways to compute attention that take stretches of unlike lengths."""
BUCKET_RATIO = 0.7
BUCKET_SLACK = 16
"""A shorter sample joins a bucket when it fills this share of its length, or lacks at most this
many tokens."""


def micro_batches(
    lengths_S: np.ndarray, budget: int, families_S: np.ndarray | None = None
) -> list[np.ndarray]:
    """Split samples into micro-batches of at most `budget` tokens each; a longer sample gets one of
    its own.

    Returns arrays of sample indices, (samples,) int64, every sample in exactly one. Samples are
    taken longest first (ties by index), so that those of a micro-batch are alike; with
    `families_S`, (S,) int64, members of a family follow each other, at the place of their longest.
    The result depends on nothing but the arguments.
    """
    if budget < 1:
        raise ValueError(f"token budget is {budget}; it must be at least 1")
    lengths_S = np.asarray(lengths_S, np.int64)
    if families_S is None:
        order = np.argsort(-lengths_S, kind="stable")  # (S,) int64
    else:
        _, of = np.unique(families_S, return_inverse=True)
        longest = np.zeros(len(lengths_S), np.int64)
        np.maximum.at(longest, of, lengths_S)
        order = np.lexsort((-lengths_S, of, -longest[of]))
    cuts, room = [], 0
    for place, length in enumerate(lengths_S[order].tolist()):
        if place == 0 or length > room:
            cuts.append(place)
            room = budget
        room -= length
    return np.split(order, cuts[1:]) if len(order) else []


def shares(
    lengths_S: np.ndarray, ranks: int, costs_S: np.ndarray | None = None
) -> list[np.ndarray]:
    """Deal samples to ranks so that the ranks' costs, token counts by default, are near equal.

    Returns `ranks` arrays of sample indices in rising order, some empty when samples are few; every
    rank computes the same answer. Of two deals the better is taken: the largest differencing method
    (Karmarkar and Karp 1982), which joins the partial deals that differ most, heaviest part with
    lightest; and longest first, each to the lightest rank, whose heaviest share is at most 4/3 of
    the best possible (Graham 1969).
    """
    if ranks == 1:
        return [np.arange(len(lengths_S))]
    costs = [float(c) for c in (lengths_S if costs_S is None else costs_S)]
    deals = _longest_first(costs, ranks), _differencing(costs, ranks)
    best = min(deals, key=lambda deal: max(sum(costs[i] for i in part) for part in deal))
    return [np.array(sorted(part), np.int64) for part in best]


def _longest_first(costs: list[float], ranks: int) -> list[list[int]]:
    load = [0.0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for sample in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lightest = load.index(min(load))
        load[lightest] += costs[sample]
        dealt[lightest].append(sample)
    return dealt


def _differencing(costs: list[float], ranks: int) -> list[list[int]]:
    # Partial deals as (minus the spread, number, [(load, samples)] heaviest first).
    empty: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(ranks - 1)]
    heap = [(-cost, i, [(cost, [i]), *empty]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [samples for _, samples in heap[0][2]] if heap else [[] for _ in range(ranks)]


def token_index(lengths_S: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """(tokens,) int64: where the tokens of `samples`, in that order, lie in the flat arrays of a
    batch."""
    starts_S = np.cumsum(lengths_S, dtype=np.int64) - lengths_S
    chosen = np.asarray(lengths_S, np.int64)[samples]
    packed = np.cumsum(chosen) - chosen
    shift = np.repeat(starts_S[samples] - packed, chosen)  # (tokens,) int64
    index: np.ndarray = np.arange(len(shift)) + shift
    return index


def prompt_families(
    tokens_T: np.ndarray, lengths_S: np.ndarray, sampled_T: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which samples begin with the same prompt, all tokens before the first sampled one.

    Returns (S,) int64 families, the index of the first sample with that prompt, and (S,) int64
    prompt lengths.
    """
    ends_S = np.cumsum(lengths_S, dtype=np.int64)
    starts_S = ends_S - lengths_S
    drawn = np.append(np.flatnonzero(sampled_T), len(tokens_T))
    prompts_S = np.minimum(drawn[np.searchsorted(drawn, starts_S)], ends_S) - starts_S
    families_S = np.empty(len(lengths_S), np.int64)
    first: dict[bytes, int] = {}
    data, width = np.ascontiguousarray(tokens_T).data.cast("B"), tokens_T.itemsize
    spans = zip((starts_S * width).tolist(), ((starts_S + prompts_S) * width).tolist(), strict=True)
    for sample, (start, stop) in enumerate(spans):
        families_S[sample] = first.setdefault(bytes(data[start:stop]), sample)
    return families_S, prompts_S


class _Rows(NamedTuple):
    """Stretches of samples that attend, (rows,) int64 each."""

    start: np.ndarray
    """First token among the N: keys begin here."""
    length: np.ndarray
    """Keys."""
    skip: np.ndarray
    """Keys before the first query."""
    own: np.ndarray
    """Position from which on results are used; before it another row's are."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples, or stretches of them, of like length, which attention pads to one."""

    rows: int
    """How many, S."""
    width: int
    """Keys of the longest, L."""
    queries: int
    """Queries of that with most, Q; as many as keys unless shared prompts are left out."""
    at: Tensor | None = None
    """(S, Q) int64: each query's position in its sample; None when query and key positions are the
    same."""
    masks: dict[Any, Tensor] = field(default_factory=dict)
    """What attention derives from these once and uses in every layer."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """The same without padding, for kernels that take sequences of unlike lengths end to end: the
    packed row is the queries, cut into stretches that each see the end of their own keys."""

    queries: Tensor
    """(S + 1,) int32: where each stretch of the row begins, and the row's end."""
    keys: Tensor
    """(S + 1,) int32: the same among the keys."""
    gather: Tensor | None
    """(keys,) int64: the packed token that each key is; None when they are the row."""
    longest_query: int
    """Queries of the longest stretch."""
    longest_key: int
    """Keys of the longest stretch. A stretch of q queries and k keys: query i sees keys up to i + k
    - q."""
    masks: dict[Any, Any] = field(default_factory=dict)
    """What a kernel derives from these once and uses in every layer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the N tokens of some samples lie in one packed row of T ≤ N tokens, and in padded
    places."""

    positions: Tensor
    """(1, T) int64: position of each packed token in its sample."""
    source: np.ndarray
    """(T,) int64: which of the N tokens, laid end to end, each packed token is."""
    place: np.ndarray
    """(N,) int64: where in the row each of the N tokens is; tokens of a shared prompt are in one
    place."""
    buckets: tuple[Bucket, ...]
    """For attention, in the order of the samples; their places lie one bucket after the other."""
    queries: Tensor | None
    """(places,) int64: the packed token whose query is at each padded place; None when they are the
    same."""
    keys: Tensor | None
    """(places,) int64: the packed token whose key and value are at each padded place; None
    likewise."""
    pick: Tensor | None
    """(T,) int64: the place among `queries` whose result each packed token takes; None likewise."""
    shared: bool
    """Whether some packed token is at several places."""
    way: str = "padded"
    """How attention is computed: a name of `attention.choose_attention`."""
    stretches: Stretches | None = None
    """Instead of buckets, for ways that need no padding."""
    split: Split | None = None
    """How ranks share the row; `positions` are then this rank's. None where one has it all."""


def _prompts_apart(
    starts_S: np.ndarray,
    lengths_S: np.ndarray,
    owner_S: np.ndarray,
    borrowed_S: np.ndarray,
    prompts_S: np.ndarray,
) -> list[_Rows]:
    """Each lent prompt once, and the samples without the queries of theirs."""
    lender_S = np.unique(owner_S[borrowed_S > 0])
    skip_S = np.where(np.isin(owner_S, lender_S), prompts_S, 0)
    zeros = np.zeros_like(lender_S)
    return [
        _Rows(starts_S[lender_S], prompts_S[lender_S], zeros, zeros),
        _Rows(starts_S, lengths_S, skip_S, skip_S),
    ]


def _padded(
    parts: list[_Rows], place: np.ndarray, tokens: int, device: torch.device | str
) -> tuple[list[Bucket], list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Buckets of what attends, and `Layout`'s queries (a part a bucket), keys and pick."""
    buckets, queries, keys = [], [], []
    pick = np.empty(tokens, np.int64)
    places = 0
    for part in parts:
        for a, b in _runs(part.length.tolist()):
            start, length, skip = (x[a:b, None] for x in (part.start, part.length, part.skip))
            width, count = int(length.max()), max(1, int((length - skip).max()))
            # A padded place repeats the last token: it lies after every real one, so causality
            # hides it.
            at = np.minimum(skip + np.arange(count), length - 1)
            queries.append(place[(start + at).ravel()])
            keys.append(place[(start + np.minimum(np.arange(width), length - 1)).ravel()])
            own = (at >= part.own[a:b, None]) & (skip + np.arange(count) < length)
            pick[place[(start + at)[own]]] = places + np.flatnonzero(own)
            places += own.size
            where = torch.from_numpy(at).to(device) if skip.any() else None
            buckets.append(Bucket(rows=b - a, width=width, queries=count, at=where))
    return buckets, queries, keys, pick


def layout(
    lengths_S: np.ndarray,
    device: torch.device | str = "cpu",
    *,
    families_S: np.ndarray | None = None,
    prompts_S: np.ndarray | None = None,
    trim: int = 0,
    way: str = "padded",
) -> Layout:
    """Lay samples of these lengths out in this order. Few buckets result when like lengths are
    neighbours.

    With `prompt_families`' answers for these samples, a prompt is laid down for the first of its
    family only. The others need its keys, not its queries; when no sample is longer than `trim`
    these are left out, at the price of a mask: prompts then attend by themselves.
    """
    lengths_S = np.asarray(lengths_S, np.int64)
    total = int(lengths_S.sum())
    starts_S = np.cumsum(lengths_S) - lengths_S
    positions_N = np.arange(total) - np.repeat(starts_S, lengths_S)
    source = place = np.arange(total)
    borrowed_S = np.zeros_like(lengths_S)
    owner_S = np.arange(len(lengths_S))
    if families_S is not None and prompts_S is not None:
        _, first, of = np.unique(families_S, return_index=True, return_inverse=True)
        owner_S = first[of]
        borrowed_S = np.where(owner_S == np.arange(len(lengths_S)), 0, prompts_S)
    shared = bool(borrowed_S.any())
    if shared:
        own_N = positions_N >= np.repeat(borrowed_S, lengths_S)
        source = np.flatnonzero(own_N)
        place = np.cumsum(own_N) - 1
        lent_N = np.repeat(starts_S[owner_S], lengths_S) + positions_N
        place = np.where(own_N, place, place[np.minimum(lent_N, total - 1)])
    if way in UNPADDED:
        return Layout(
            positions=torch.from_numpy(positions_N[source])[None].to(device),
            source=source,
            place=place,
            buckets=(),
            queries=None,
            keys=None,
            pick=None,
            shared=shared,
            way=way,
            stretches=_stretches(lengths_S, borrowed_S, place if shared else None, device),
        )
    parts = [_Rows(starts_S, lengths_S, np.zeros_like(lengths_S), borrowed_S)]
    if prompts_S is not None and shared and int(lengths_S.max()) <= trim:
        parts = _prompts_apart(starts_S, lengths_S, owner_S, borrowed_S, prompts_S)
    buckets, queries, keys, pick = _padded(parts, place, len(source), device)
    plain = sum(map(len, queries)) == total and not shared

    def tensor(parts: list[np.ndarray]) -> Tensor | None:
        return None if plain else torch.from_numpy(np.concatenate(parts)).to(device)

    return Layout(
        positions=torch.from_numpy(positions_N[source])[None].to(device),
        source=source,
        place=place,
        buckets=tuple(buckets),
        queries=tensor(queries),
        keys=tensor(keys),
        pick=tensor([pick]),
        shared=shared,
        way=way,
    )


def _stretches(
    lengths_S: np.ndarray,
    borrowed_S: np.ndarray,
    place_N: np.ndarray | None,
    device: torch.device | str,
) -> Stretches:
    """A sample's own tokens are the queries of a stretch, all its tokens the keys; a sample with no
    token of its own asks nothing."""
    own_S = lengths_S - borrowed_S
    asks_S = own_S > 0

    def edges(counts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *counts], dtype=np.int32)).to(device)

    gather = None
    if place_N is not None:
        kept_N = place_N[np.repeat(asks_S, lengths_S)]
        gather = torch.from_numpy(kept_N).to(device)
    return Stretches(
        queries=edges(own_S[asks_S]),
        keys=edges(lengths_S[asks_S]),
        gather=gather,
        longest_query=int(own_S.max(initial=0)),
        longest_key=int(lengths_S[asks_S].max(initial=0)),
    )


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive samples that are alike enough for one bucket."""
    runs, first, low, high = [], 0, 0, 0
    for sample, length in enumerate(lengths):
        new_low, new_high = min(low, length), max(high, length)
        if sample == first:
            low = high = length
        elif new_low >= BUCKET_RATIO * new_high or new_high - new_low <= BUCKET_SLACK:
            low, high = new_low, new_high
        else:
            runs.append((first, sample))
            first, low, high = sample, length, length
    return [*runs, (first, len(lengths))] if lengths else []
