"""Protocols of who learns, who samples, and how weights pass between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from miles.batch import Batch, Receipt, Tokens, Update
from miles.types import Array, Completion, Group, Request

__all__ = ["Algorithm", "Engine", "Handle", "Receiver", "Sender", "Trainer", "Transport"]


@runtime_checkable
class Trainer(Protocol):
    """Who updates the weights. Lives in worker processes (one a rank); the driver holds an async
    mirror.

    Blocking methods; the worker runs them one at a time.

    Optional: `replays_experts`, of the class, true when `step` and `logprobs` route tokens by
    `Tokens.experts`. A trainer that does not say so raises `TrainerError` for tokens that have
    experts, and `miles check` refuses `session.experts` with it.
    """

    version: int
    """Trainer steps completed since the run began."""

    def step(self, batch: Batch) -> Update:
        """One optimizer step over the whole batch. Raises `TrainerError` and leaves the weights
        alone when the loss or gradient is not finite or a mismatch budget of `fail` is exceeded."""

    def logprobs(self, tokens: Tokens, source: str) -> Array:
        """(T,) float32 log-prob of every token given those before it in its sample, 0 for first
        tokens. `source` is `current` or `reference`."""

    def export(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, tensor in the precision's export type), whole tensors, in a fixed
        order."""

    def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """Write `model/` (safetensors and config that `transformers` loads) and, unless
        `weights_only`, `trainer/` (all other state)."""

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """Continue from what `save` wrote; `weights_only` takes the model and version, not the
        optimizer."""

    def sleep(self) -> None:
        """Free device memory."""

    def wake(self) -> None:
        """Take it back."""


@runtime_checkable
class Engine(Protocol):
    """Who samples tokens. Async; lives in a process of its own, or in every rollout worker when
    `process` is "rollout".

    Optional: `stream(request)`, an async generator of (new tokens,) int32 arrays as they are
    decoded and last the whole `Completion`; `dp_ranks`, how many data-parallel ranks a routing
    key can be bound to; `load_directory(version, directory)`, as `load` from the safetensors of a
    Hugging Face directory, which an evaluation fleet needs; the class method `awaits(config)`,
    what its first answer waits for, in words for people; `digests()`, by Hugging Face name
    `miles.learn.digest.contents` of the tensors that it serves, which transports compare; and
    `updating(version)`, of an engine whose own server takes weights on SGLang's routes: an async
    context manager, paused inside, that gives a channel: `post(path, body) -> reply`, raising
    `WeightSyncError` for a refusal, `end()` after the last write, `checksums() -> {tensor:
    checksum}`, `ranks`, how many tensor-parallel ranks the server has, and `first_gpu`, which of
    the GPUs that are shown there the first of them has. Left without an error it serves `version`;
    otherwise the old one, or nothing any more.
    """

    samples: ClassVar[bool]
    """False for an engine that replays demonstrations and needs no weights."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `EngineError` when it cannot (a prompt that does not
        fit). Cancelling it ends the request in the engine."""

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32: own log-prob of each token given those before it, 0 for the first."""

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these routing keys (None: all) with finish `abort`; how many there
        were."""

    async def pause(self) -> None:
        """Stop decoding; requests wait."""

    async def resume(self) -> None:
        """Go on."""

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Take (Hugging Face name, tensor) weights as `version`; missing or unknown names raise
        `WeightSyncError`."""

    async def version(self) -> int:
        """The version being served; -1 before the first load."""

    async def health(self) -> Mapping[str, float]:
        """Plain numbers: `active`, `waiting`, `tokens`, `busy_s`, `prompt_tokens`, `cached_tokens`
        since start; and `max_len`, when prompt and completion together may be no longer."""

    async def sleep(self) -> None:
        """Free device memory."""

    async def wake(self) -> None:
        """Take it back."""


class Handle(Protocol):
    """The driver's end of the worker processes of one component.

    Optional: `owed() -> (target, seconds)` of every call that has no answer yet, from which errors
    tell who waits for what; `where()`, a coroutine: what each rank is at, in words, by its stacks,
    which are in its log then.
    A runtime of several machines adds `bind`, the address of rank 0's host at which what is started
    there may listen for other workers (127.0.0.1 without it), and `hosts`, where each rank is.
    """

    name: str
    """Process name, as in `logs/<name>.log`."""
    world: int
    """How many ranks."""

    async def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call `part.method` in one rank; plain values, arrays and this module's dataclasses only.
        Errors raised there are raised here; a dead or silent worker is a `WorkerError`."""

    async def call_all(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """The same in every rank at once."""

    def stream(self, target: str, *args: Any, rank: int = 0) -> AsyncIterator[Any]:
        """Call an async generator method in one rank; its items as they come."""


class Sender(Protocol):
    """Half of a transport that lives in trainer workers; public methods are called as
    `sender.<method>`."""


class Receiver(Protocol):
    """Half of a transport that lives in engine workers; public methods are called as
    `receiver.<method>`."""


@runtime_checkable
class Transport(Protocol):
    """How weights move. Built in the driver and in every worker, each using its own half.

    Optional: `brings`, of the class, in which ways it can reach an engine: `tensors` (its `load`,
    the default), `directory` (`load_directory`), `native` (`updating`).
    """

    def sender(self, trainer: Trainer) -> Sender:
        """The half for a trainer worker."""

    def receiver(self, engine: Engine) -> Receiver:
        """The half for an engine worker."""

    async def publish(self, version: int, *, trainer: Handle, engines: Sequence[Handle]) -> Receipt:
        """Move the trainer's weights to every engine; names and sizes pass here, never tensors.
        Raises `WeightSyncError` when a digest differs; engines are then left stopped or on the old
        version."""


@runtime_checkable
class Algorithm(Protocol):
    """What to learn from groups."""

    def needs(self) -> tuple[str, ...]:
        """Log-prob passes wanted before `prepare`: of `current`, `reference`."""

    def terms(self) -> Mapping[str, str]:
        """Loss term names to `module:function`."""

    def prepare(self, groups: Sequence[Group], passes: Mapping[str, Array]) -> Batch:
        """Advantages and terms. `passes` holds a (T,) float32 array for each of `needs()`, over
        `flatten([s for g in groups for s in g.samples])`. Pure; runs in a worker thread."""
