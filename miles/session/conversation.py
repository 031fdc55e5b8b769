"""A linear, in-process conversation that keeps the very ids that were sampled.

It renders and extends through a tito handler, asks an engine, and builds the sample. It does not
branch, match foreign histories or serve a network, and it decides nothing about rewards or
freshness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from miles.errors import EngineError, EpisodeError, GenerationAborted, PromptTooLong
from miles.protocols import Engine, Reply, Tito, Tool
from miles.seeds import derive_seed
from miles.types import Array, Completion, Message, Request, Sample, Sampling, Span, Trajectory

__all__ = ["LinearConversation"]


class LinearConversation:
    """One attempt's conversation: a first prompt, then assistant turns, each appended to the one
    before.

    The first turn renders messages (or encodes raw text); every later prompt is the stored ids plus
    what `tito.extend` adds, so a sampled token is never tokenized again. A turn that raises leaves
    the conversation as it was: the caller may still ask for `trajectory`.
    """

    __slots__ = (
        "_chunks",
        "_completions",
        "_engine",
        "_history",
        "_key",
        "_max_len",
        "_offsets",
        "_sampling",
        "_seed",
        "_size",
        "_solution",
        "_text",
        "_tito",
    )

    def __init__(
        self,
        *,
        key: str,
        tito: Tito,
        engine: Engine,
        sampling: Sampling,
        seed: int,
        solution: str | tuple[Message, ...] | None = None,
        max_len: int | None = None,
    ) -> None:
        """`sampling` gets the handler's stop ids unless it brings its own; `solution` is what an
        engine that replays demonstrations says in the first turn; `max_len` is the model's context
        in tokens."""
        if not key:
            raise EpisodeError("conversation: the routing key is empty")
        self._key = key
        self._tito = tito
        self._engine = engine
        self._sampling = sampling if sampling.stop_ids else _with_stop(sampling, tito.stop_ids)
        self._seed = seed
        self._solution = solution
        self._max_len = max_len
        self._history: tuple[Message, ...] | None = None  # None: the first prompt was raw text
        self._chunks: list[Array] = []  # prompt, completion, extension, completion, ...
        self._offsets: list[int] = []  # where each completion begins
        self._completions: list[Completion] = []
        self._size = 0
        self._text = ""

    async def turn(self, messages: str | Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Append messages (or, first, raw text) and sample one assistant turn.

        Raises `PromptTooLong`, `GenerationAborted`, whatever the engine and the tito handler raise,
        and `EpisodeError` for raw text after the first turn or after a raw first turn.
        """
        chunk, history = self._prompt(messages, tools)
        size = self._size + len(chunk)
        if not size:
            raise EpisodeError(f"conversation {self._key}: the prompt is empty")
        tokens = (
            np.concatenate([*self._chunks, chunk]) if self._chunks else chunk
        )  # (tokens,) int32
        turn = len(self._completions)
        completion = await self._engine.generate(
            Request(
                id=f"{self._key}/{turn}",
                key=self._key,
                tokens=tokens,
                sampling=self._room(size),
                seed=derive_seed(self._seed, turn),
                demonstration=self._demonstration(turn),
            )
        )
        if completion.finish == "abort":
            raise GenerationAborted(
                f"conversation {self._key}: turn {turn} was aborted by the engine"
            )
        message = self._tito.parse(completion.tokens, tools=tools)
        self._chunks += (chunk, completion.tokens)
        self._offsets.append(size)
        self._completions.append(completion)
        self._size = size + len(completion.tokens)
        self._history = None if history is None else (*history, message)
        self._text = self._tito.decode(self._spoken(completion.tokens))
        return Reply(
            text=self._text,
            message=message,
            finish=completion.finish,
            tokens=len(completion.tokens),
        )

    def trajectory(
        self, *, reward: float, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Everything so far, as the trajectory to train on. Raises `EpisodeError` before the first
        turn and `SampleError` when an engine's completions contradict themselves."""
        if not self._completions:
            raise EpisodeError(
                f"conversation {self._key}: nothing was sampled, so there is nothing to train on"
            )
        return Trajectory(
            id=self._key,
            samples=(self._sample(),),
            reward=reward,
            text=self._text,
            metrics={} if metrics is None else metrics,
        )

    def _prompt(
        self, messages: str | Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Array, tuple[Message, ...] | None]:
        """(new tokens,) int32 to append before the next completion, and the history up to there."""
        if isinstance(messages, str):
            if self._completions:
                raise EpisodeError(
                    f"conversation {self._key}: raw text can only be the first turn; give messages"
                )
            return self._tito.encode(messages), None
        added = tuple(messages)
        if not self._completions:
            return self._tito.render(added, tools=tools), added
        if self._history is None:
            raise EpisodeError(
                f"conversation {self._key}: it began as raw text, so no messages can follow; begin "
                "with messages"
            )
        stored = np.concatenate(self._chunks)
        return self._tito.extend(stored, self._history, added, tools=tools), (
            *self._history,
            *added,
        )

    def _room(self, size: int) -> Sampling:
        """The sampling, with no more new tokens than the context still holds."""
        if self._max_len is None or size + self._sampling.max_new_tokens <= self._max_len:
            return self._sampling
        room = self._max_len - size
        if room < 1:
            raise PromptTooLong(
                f"conversation {self._key}: a prompt of {size} tokens leaves no room in a context "
                f"of {self._max_len}"
            )
        return replace(self._sampling, max_new_tokens=room)

    def _demonstration(self, turn: int) -> Array | None:
        """(tokens,) int32 for an engine that replays; only the first turn has a solution."""
        if self._engine.samples:
            return None
        if self._solution is None or turn:
            what = (
                "the task has no solution"
                if self._solution is None
                else "a solution is one turn long"
            )
            raise EpisodeError(
                f"conversation {self._key}: nothing to demonstrate in turn {turn}: {what}"
            )
        return self._tito.demonstrate(self._solution)

    def _spoken(self, tokens: Array) -> Array:
        """The completion without the stop token it ended with."""
        return tokens[:-1] if len(tokens) and int(tokens[-1]) in self._sampling.stop_ids else tokens

    def _sample(self) -> Sample:
        completions, offsets = self._completions, self._offsets
        sampled = np.zeros(self._size, np.bool_)  # (tokens,) bool
        spans: list[Span] = []
        for start, completion in zip(offsets, completions, strict=True):
            sampled[start : start + len(completion.tokens)] = True
            spans += [
                Span(start=start + s.start, stop=start + s.stop, version=s.version)
                for s in completion.spans
            ]
        cut = any(c.truncated_logprobs is not None for c in completions)
        return Sample(
            tokens=np.concatenate(self._chunks),  # (tokens,) int32
            sampled=sampled,
            trainable=sampled,
            logprobs=self._scatter([c.logprobs for c in completions]),
            spans=tuple(spans),
            finish=completions[-1].finish,
            truncated_logprobs=self._scatter(
                [
                    c.logprobs if c.truncated_logprobs is None else c.truncated_logprobs
                    for c in completions
                ]
            )
            if cut
            else None,
            experts=self._scatter([c.experts for c in completions]),
        )

    def _scatter(self, parts: Sequence[Array | None]) -> Array | None:
        """(tokens, ...) with each completion's rows in their place and 0 elsewhere; None if any has
        none."""
        out: Array | None = None
        for start, completion, part in zip(self._offsets, self._completions, parts, strict=True):
            if part is None:
                return None
            size = len(completion.tokens)
            if len(part) != size:
                raise EngineError(
                    f"conversation {self._key}: {len(part)} per-token values for {size} sampled "
                    "tokens"
                )
            if out is None:
                out = np.zeros((self._size, *part.shape[1:]), part.dtype)
            out[start : start + size] = part
        return out


@lru_cache(maxsize=64)  # a run has few samplings and one handler, and a conversation per attempt
def _with_stop(sampling: Sampling, stop_ids: tuple[int, ...]) -> Sampling:
    return replace(sampling, stop_ids=stop_ids)
