"""The table of routing keys: each is bound to one engine and one data-parallel rank of it.

It counts what is in flight and bounds itself; it calls no engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from miles.errors import RoutingError
from miles.router.upstream import Upstream

__all__ = ["Binding", "Bindings", "InFlight", "place"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Binding:
    """Where a key's KV cache is."""

    upstream: Upstream
    """The engine."""
    rank: int
    """Its data-parallel rank."""
    active: int = 0
    """Requests of this key in flight, there or where the key was before."""
    moved: bool = False
    """Just bound anew: the next prompt is prefilled again, and counted."""


class InFlight:
    """Around one attempt: counts it where the key is bound as it begins, wherever the key moves."""

    __slots__ = ("_binding", "_rank", "_upstream")

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._upstream, self._rank = binding.upstream, binding.rank

    def __enter__(self) -> None:
        self._upstream.active[self._rank] += 1
        self._binding.active += 1

    def __exit__(self, *_: object) -> None:
        self._upstream.active[self._rank] -= 1
        self._binding.active -= 1


def place(key: str, upstreams: Iterable[Upstream]) -> tuple[Upstream, int]:
    """The engine with the fewest active requests and its least busy rank, ties by the key's
    hash."""
    point = int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
    upstream = _fewest({u: u.load for u in upstreams}, point)
    ranks = upstream.active
    # other bits than chose the engine, or the keys of an engine would share one rank
    return upstream, _fewest(dict(enumerate(ranks)), point >> 32) if len(ranks) > 1 else 0


def _fewest(loads: Mapping[T, int], point: int) -> T:
    least = min(loads.values())
    tied: Sequence[T] = [one for one, load in loads.items() if load == least]
    return tied[point % len(tied)]


class Bindings:
    """At most `max_keys` keys; beyond that the one used longest ago expires, unless it is in
    use."""

    def __init__(self, upstreams: Sequence[Upstream], *, max_keys: int) -> None:
        self._upstreams = upstreams
        self._max_keys = max_keys
        self._keys: OrderedDict[str, Binding] = OrderedDict()  # least recently used first
        self.rebinds = 0
        """Keys that moved because their engine was drained."""
        self.expired = 0
        """Keys forgotten because the table was full."""
        self.released = 0
        """Keys that their trajectory gave back."""

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> Binding | None:
        """Where the key is bound, without touching it."""
        return self._keys.get(key)

    def bind(self, key: str) -> Binding | None:
        """Where the key is bound, now and until its engine is drained; None when no engine serves.

        Raises `RoutingError` when the table is full of keys in use.
        """
        found = self._keys.get(key)
        if found is not None and not found.upstream.drained:
            self._keys.move_to_end(key)
            return found
        serving = [u for u in self._upstreams if not u.drained]
        if not serving:
            return None
        upstream, rank = place(key, serving)
        if found is None:
            self._make_room(key)
            found = self._keys[key] = Binding(upstream, rank)
        else:
            found.upstream, found.rank, found.moved = upstream, rank, True
            self.rebinds += 1
            self._keys.move_to_end(key)
        return found

    def release(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        if self._keys.pop(key, None) is None:
            return False
        self.released += 1
        return True

    def bound(self, keys: Iterable[str]) -> dict[Upstream, list[str]]:
        """The given keys that are bound, by engine."""
        found: dict[Upstream, list[str]] = {}
        for key in keys:
            if (binding := self._keys.get(key)) is not None:
                found.setdefault(binding.upstream, []).append(key)
        return found

    def _make_room(self, key: str) -> None:
        if len(self._keys) < self._max_keys:
            return
        idle = next((k for k, binding in self._keys.items() if not binding.active), None)
        if idle is None:
            raise RoutingError(
                f"router: no room for the key {key!r}: all {self._max_keys} keys that the table "
                "holds (max_keys) have a request in flight"
            )
        del self._keys[idle]
        self.expired += 1
