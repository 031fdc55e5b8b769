"""What the router counts, and the metrics that follow from the counts.

Counts only grow and may be added over several routers; a share is computed from sums, at the end.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from miles.errors import RoutingError
from miles.router.bindings import Binding
from miles.types import Completion, Request

__all__ = ["ACTIVE", "Account", "Accounts", "summarize"]

ACTIVE = "active/"
"""Prefix of the counts that are levels: requests in flight on the engine whose name follows."""

_PLAIN = (
    "requests", "completed", "failed", "cancelled", "retries", "refused", "rebinds",
    "rebind_prefill_tokens", "drained", "readmitted", "keys_released", "keys_expired",
)  # fmt: skip


@dataclass(slots=True)
class Accounts:
    """Sums since the router was made. `requests` is `completed` + `failed` + `cancelled` + those in
    flight."""

    requests: int = 0
    """Accepted: they had a routing key."""
    completed: int = 0
    """Answered by an engine."""
    failed: int = 0
    """Ended by an error, after every attempt."""
    cancelled: int = 0
    """Given up by whoever asked."""
    refused: int = 0
    """Not accepted: no routing key."""
    retries: int = 0
    """Attempts after the first."""
    drained: int = 0
    """Times an engine was taken out."""
    readmitted: int = 0
    """Times one was taken back."""
    prompt_tokens: int = 0
    """In prompts of completed requests."""
    cached_tokens: int = 0
    """Of those, what the engine had in its prefix cache."""
    rebind_prefill_tokens: int = 0
    """Prompt tokens computed again because a key moved: not cached in the first request after."""


class Account:
    """Around one request: it ends in exactly one of `completed`, `failed` and `cancelled`."""

    __slots__ = ("_accounts", "_done", "_request")

    def __init__(self, accounts: Accounts, request: Request) -> None:
        self._accounts = accounts
        self._request = request
        self._done = False

    def __enter__(self) -> Self:
        if not self._request.key:
            self._accounts.refused += 1
            raise RoutingError(
                f"router: request {self._request.id!r} has no routing key, so its trajectory cannot"
                " stay with the engine that holds its cache; set `Request.key` to the trajectory's "
                "id"
            )
        self._accounts.requests += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._done:
            return
        if kind is not None and issubclass(kind, (CancelledError, GeneratorExit)):
            self._accounts.cancelled += 1
        else:
            self._accounts.failed += 1

    def complete(self, completion: Completion, binding: Binding) -> None:
        """The engine answered."""
        self._done = True
        accounts = self._accounts
        prompt, cached = len(self._request.tokens), completion.cached_tokens
        accounts.completed += 1
        accounts.prompt_tokens += prompt
        accounts.cached_tokens += cached
        if binding.moved:
            binding.moved = False
            accounts.rebind_prefill_tokens += prompt - cached


def summarize(
    counts: Iterable[Mapping[str, float]], before: Iterable[Mapping[str, float]] = ()
) -> dict[str, float]:
    """`router/...` metrics from the counts of one or several routers, since their counts `before`.

    `router/prefix_hit_rate` is there only when prompts were. Counts are differences; `active/*` and
    `keys` are as they are now.
    """
    now, then = _sum(counts), _sum(before)
    since = {name: value - then.get(name, 0) for name, value in now.items()}
    metrics = {f"router/{name}": since.get(name, 0.0) for name in _PLAIN}
    metrics["router/keys"] = now.get("keys", 0.0)
    metrics |= {f"router/{name}": value for name, value in now.items() if name.startswith(ACTIVE)}
    if since.get("prompt_tokens", 0) > 0:
        metrics["router/prefix_hit_rate"] = since["cached_tokens"] / since["prompt_tokens"]
    return metrics


def _sum(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in counts:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total
