"""The embedded engine: continuous batching over miles' own decoder forward, on a CPU or one GPU.

This module holds the asynchronous surface and no arithmetic; torch is imported when an engine is
built. It serves any model family whose registration gives a `Decoder` and canonical tensor names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from miles import Array, Completion, ConfigError, Context, EngineError, Request, WeightSyncError
from miles_plugins.engine.torch import checks

__all__ = ["Torch"]

_BRIEF = 64 << 20  # bytes of weights that are taken between two forwards; more in a thread


class Torch:
    """Embedded engine: continuous batching, prefix reuse, reproducible sampling; its own process.

    Every forward has the same number of token slots, so on a CPU a request's tokens and log-probs
    are bit-equal alone, together, shuffled and with or without prefix reuse. Sampling noise is a
    function of the request's seed and the token's position.

    Log-probs are under the whole distribution at the sampling temperature; a greedy request
    (temperature 0) reports them at temperature 1. New weights take effect between two forwards:
    running requests go on under the new version, with their keys and values computed again
    (`pause=retract`), kept as they are (`in_place`), or they end (`abort`); their spans say which
    token is from which version.
    """

    samples = True
    process = "worker"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How large batches are and where they run."""

        workers: int = 1
        """Engine processes, each with all the weights; a conversation stays with one of them."""
        rows: int = 64
        """Requests that decode together; more wait."""
        chunk: int = 0
        """Token slots of every forward, shared by prompts and decoding rows; at least 4; 0 is as
        many as rows."""
        max_len: int = 0
        """Longest prompt and completion together; 0 is the model's own, at most 2048."""
        key_block: int = 32
        """Keys that attention reads at a time."""
        prefix_reuse: bool = True
        """Compute equal prompts and prefixes once."""
        max_waiting: int = 4096
        """Requests that may wait for a row; one more is refused."""
        threads: int = 1
        """Torch threads of the process."""
        device: Literal["cpu", "cuda"] = "cpu"
        """Where weights and cache live."""

    check = classmethod(checks.check)
    claims = classmethod(checks.claims)

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        self.model = context.model
        self.decoder = context.model.decoder()
        if wrong := checks.faults(config, self.decoder):
            raise ConfigError(f"engine torch: {'; '.join(wrong)}")
        self.max_len = config.max_len or min(self.decoder.max_len, checks.LONGEST)
        self.slots = config.chunk or config.rows
        import torch

        from miles_plugins.engine.torch.batching import Batching
        from miles_plugins.engine.torch.cache import Cache
        from miles_plugins.engine.torch.decoder import Forward
        from miles_plugins.engine.torch.table import Table
        from miles_plugins.engine.torch.taking import size

        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("engine torch: device is cuda, but torch sees no GPU; use device=cpu")
        torch.set_num_threads(config.threads)
        self._device = torch.device(config.device)
        self._dtype = getattr(torch, context.precision.engine)
        self._export = context.precision.export
        shape = {
            "max_len": self.max_len,
            "key_block": config.key_block,
            "dtype": self._dtype,
            "device": self._device,
        }
        wide = context.precision.logits == "float32"
        self._make_cache = lambda: Cache(self.decoder, rows=config.rows, **shape)
        self._batching = Batching(
            forward=Forward(self.decoder, slots=self.slots, wide=wide, **shape),
            cache=self._make_cache(),
            table=Table(
                rows=config.rows,
                max_len=self.max_len,
                score_temperature=context.settings.temperature or 1.0,
            ),
            reuse=config.prefix_reuse,
        )
        self._listeners: dict[Any, asyncio.Queue[Array | None]] = {}
        self._names: dict[str, str] = {}  # canonical to the name under which it came
        self._origins: dict[str, tuple[str, str]] = {}  # see `taking.Origins`
        self._pause = context.settings.pause
        self._paused = self._asleep = False
        self._turn = asyncio.Lock()  # weights come, or move, one at a time
        self._large = size(self.decoder, self._dtype) > _BRIEF
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ requests

    async def generate(self, request: Request) -> Completion:
        """Sample one completion; see `miles.Engine`.

        A completion ends at a stop id, at `max_new_tokens`, or where prompt and completion reach
        `max_len`. Raises `EngineError` for a request that cannot be served or a full queue.
        """
        self._accept(request)
        return await self._submit(request.tokens, request)

    async def stream(self, request: Request) -> AsyncIterator[Array | Completion]:
        """As `generate`: (new tokens,) int32 after every forward that gave some, last the
        completion. Leaving early ends the request."""
        self._accept(request)
        new: asyncio.Queue[Array | None] = asyncio.Queue(self.max_len + 1)
        task = asyncio.create_task(self._submit(request.tokens, request, new))
        task.add_done_callback(lambda _: new.put_nowait(None))
        given = 0
        try:
            while (tokens := await new.get()) is not None:
                given += len(tokens)
                yield tokens
            completion: Completion = await task
            if given < len(completion.tokens):
                yield completion.tokens[given:]
            yield completion
        finally:
            task.cancel()

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32: log-prob of each token given those before it, 0 for the first.

        At the run's sampling temperature (1 if that is 0), as the trainer computes them; bit-equal
        to what sampling these tokens at that temperature would have reported.
        """
        self._accept_tokens("score", tokens, room=0)
        return await self._submit(tokens, None)

    async def _submit(
        self,
        tokens: Array,
        request: Request | None,
        listener: asyncio.Queue[Array | None] | None = None,
    ) -> Any:
        from miles_plugins.engine.torch.table import Job

        batching = self._batching
        if len(batching.waiting) >= self.config.max_waiting:
            raise EngineError(
                f"engine torch: {len(batching.waiting)} requests wait for {self.config.rows} rows, "
                f"max_waiting is {self.config.max_waiting}"
            )
        future = asyncio.get_running_loop().create_future()
        job = Job(tokens=np.asarray(tokens, np.int64), request=request, future=future)
        batching.waiting.append(job)
        if listener is not None:
            self._listeners[job] = listener
        self._start()
        try:
            return await future
        except asyncio.CancelledError:
            batching.remove(job)
            raise
        finally:
            self._listeners.pop(job, None)

    def _tell(self) -> None:
        """Give listeners what the last forward drew; a request that ended gives the rest itself."""
        for job, listener in self._listeners.items():
            if len(tokens := self._batching.table.drawn(job)):
                listener.put_nowait(tokens)

    def _accept(self, request: Request) -> None:
        name, sampling = f"request {request.id!r}", request.sampling
        if not request.key:
            raise EngineError(f"engine torch: {name} has no routing key")
        self._accept_tokens(name, request.tokens, room=1)
        if sampling.max_new_tokens < 1:
            self._refuse(name, f"max_new_tokens is {sampling.max_new_tokens}, not at least 1")
        if not 0 <= sampling.temperature < float("inf"):
            self._refuse(name, f"temperature is {sampling.temperature}, not 0 or a positive number")
        if not 0 < sampling.top_p <= 1:
            self._refuse(name, f"top_p is {sampling.top_p}, not in (0, 1]")
        if sampling.top_k < 0:
            self._refuse(name, f"top_k is {sampling.top_k}, not 0 or a positive number")

    def _accept_tokens(self, name: str, tokens: Array, *, room: int) -> None:
        if not len(tokens):
            self._refuse(name, "there are no tokens")
        if len(tokens) + room > self.max_len:
            left = f", and at least {room} must be left to sample" if room else ""
            self._refuse(name, f"{len(tokens)} tokens do not fit: max_len is {self.max_len}{left}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.decoder.vocab_size:
            self._refuse(
                name,
                f"token {low if low < 0 else high} is outside the vocabulary of "
                f"{self.decoder.vocab_size}",
            )

    def _refuse(self, name: str, why: str) -> None:
        raise EngineError(f"engine torch: {name}: {why}")

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these routing keys (None: all) with what they have; how many there
        were."""
        outcomes = self._batching.abort(keys)
        self._resolve(outcomes)
        return len(outcomes)

    # ------------------------------------------------------------ weights and life cycle

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Serve (Hugging Face name, tensor) weights as `version` from the next forward on.

        All or nothing: raises `WeightSyncError` naming what is missing, unknown, misshapen or not
        finite, and then the old weights stay.
        """
        from miles_plugins.engine.torch.taking import taken

        async with self._turn:
            where = self._device if not self._asleep else "cpu"
            how: dict[str, Any] = {"dtype": self._dtype, "device": where}
            take = partial(taken, self.decoder, self.model.engine_name, weights, **how)
            names, origins, made = await asyncio.to_thread(take) if self._large else take()
            batching = self._batching
            if version < batching.version and batching.table.active:
                raise WeightSyncError(
                    f"engine torch: version {version} is older than {batching.version}, and "
                    f"{batching.table.active} requests are running; their versions would fall"
                )
            if self._pause == "abort":
                await self.abort()
            batching.load(version, made, keep=self._pause == "in_place")
            self._names, self._origins = names, origins
        self._start()

    async def load_directory(self, version: int, directory: Path) -> None:
        """As `load`, from the safetensors of a Hugging Face directory. Raises `WeightSyncError`
        naming a file that cannot be read."""
        import torch

        from miles_plugins.engine.torch.reading import read_weights

        await self.load(version, read_weights(directory, export=getattr(torch, self._export)))

    async def digests(self) -> Mapping[str, str]:
        """By Hugging Face name, `miles.learn.digest.contents` of the tensors that are served; where
        the engine's type rounds them, of those that they were rounded from."""
        import torch

        from miles_plugins.engine.torch.served import digests

        served = self._batching.parameters
        if served is None:
            return {}
        export = getattr(torch, self._export)
        given = self.decoder, served, self._names, self._origins
        return await asyncio.to_thread(digests, *given, export=export)

    async def version(self) -> int:
        """The version being served; -1 before the first load."""
        return self._batching.version

    async def pause(self) -> None:
        """Stop between two forwards; requests wait."""
        self._paused = True

    async def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._start()

    async def sleep(self) -> None:
        """Stop, free the cache, and move weights off the GPU; running requests go on after
        `wake`."""
        async with self._turn:
            if self._asleep:
                return
            self._asleep = True
            self._batching.forget()
            self._batching.cache = None
            await self._move("cpu")

    async def wake(self) -> None:
        """Take memory back and go on."""
        async with self._turn:
            if not self._asleep:
                return
            self._batching.cache = self._make_cache()
            await self._move(self._device)
            self._asleep = False
        self._start()

    async def _move(self, device: Any) -> None:
        from miles_plugins.engine.torch.decoder import moved

        held = self._batching.parameters
        if held is not None and self._device.type != "cpu":
            self._batching.parameters = await asyncio.to_thread(moved, held, device)

    async def health(self) -> Mapping[str, float]:
        """`active` and `waiting` requests now; since start: `tokens` sampled, `busy_s`,
        `prompt_tokens`, and `cached_tokens` of them whose keys and values were reused. `max_len` is
        the longest prompt and completion together."""
        batching = self._batching
        return {
            "active": batching.table.active,
            "waiting": len(batching.waiting),
            "tokens": batching.sampled,
            "busy_s": batching.busy_s,
            "prompt_tokens": batching.prompt_tokens,
            "cached_tokens": batching.cached_tokens,
            "max_len": self.max_len,
        }

    # ------------------------------------------------------------ the batching loop

    def _ready(self) -> bool:
        return not self._paused and not self._asleep and self._batching.due()

    def _start(self) -> None:
        if self._task is None and self._ready():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        # Requests that arrive together should be admitted together: let the rest of them in first.
        await asyncio.sleep(0)
        while self._ready():
            self._resolve(self._batching.step())
            if self._listeners:
                self._tell()
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A forward that raised (out of memory, a bug) fails every request instead of hanging
        it."""
        self._task = None
        fault = None if task.cancelled() else task.exception()
        if fault is None:
            if not task.cancelled():
                self._start()
            return
        batching = self._batching
        for job in batching.jobs():
            batching.remove(job)
            error = EngineError(f"engine torch: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
            self._resolve([(job, error)])

    def _resolve(self, outcomes: Iterable[tuple[Any, Any]]) -> None:
        for job, outcome in outcomes:
            if job.future.done():
                continue
            if isinstance(outcome, EngineError):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)
