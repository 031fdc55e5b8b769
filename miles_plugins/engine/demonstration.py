"""The engine of supervised stages: it answers with what the task already contains.

Runs in rollout workers, holds no weights and draws nothing, so its completions have no log-probs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles import Array, Completion, Context, EngineError, Request, Span

__all__ = ["Demonstration"]


class Demonstration:
    """Replays the task's own solution as if it had been sampled; no process and no weights.

    Solutions longer than `max_new_tokens` are cut there and finish as `length`.
    """

    samples = False
    process = "rollout"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing to choose."""

    def __init__(self, config: Config, context: Context) -> None:
        self._version = -1
        self._tokens = 0

    async def generate(self, request: Request) -> Completion:
        """The request's demonstration. Raises `EngineError` when the task has none."""
        tokens = request.demonstration
        if tokens is None or not len(tokens):
            raise EngineError(
                f"engine demonstration: request {request.id!r}: the task has no solution; give "
                "Task.solution, or choose an engine that samples"
            )
        size, limit = len(tokens), request.sampling.max_new_tokens
        finish = "stop"
        if size > limit:
            tokens, size, finish = tokens[:limit], limit, "length"
        self._tokens += size
        spans = (Span(start=0, stop=size, version=self._version),)
        return Completion(tokens=tokens, logprobs=None, spans=spans, finish=finish)

    async def score(self, tokens: Array) -> Array:
        """Always raises `EngineError`: there is no model here."""
        raise EngineError("engine demonstration: it has no weights and cannot score")

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """Nothing is ever running."""
        return 0

    async def pause(self) -> None:
        """Nothing is ever running."""

    async def resume(self) -> None:
        """Nothing is ever running."""

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Take the version that completions carry; weights are not looked at."""
        self._version = version

    async def version(self) -> int:
        """The version that completions carry; -1 before the first load."""
        return self._version

    async def health(self) -> Mapping[str, float]:
        """Only `tokens` ever grows."""
        return {
            "active": 0,
            "waiting": 0,
            "tokens": self._tokens,
            "busy_s": 0.0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
        }

    async def sleep(self) -> None:
        """There is nothing to free."""

    async def wake(self) -> None:
        """There is nothing to take back."""
