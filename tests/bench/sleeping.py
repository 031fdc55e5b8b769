"""A local miles plugin whose engine and trainer only sleep: `async_throughput.py` runs the real
loop, workers, sessions and publishes over them.

The engine answers each request after a time drawn from a named distribution by the request's seed,
and says which weights were served meanwhile, as an engine with `pause=in_place` would. The trainer
takes a fixed time a step and publishes one tensor. Nothing is learnt and nothing is judged here.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from miles import Array, Batch, Completion, Context, Request, Span, Tokens, Update


def seconds(config: Any, seed: int) -> float:
    """How long the request with this seed takes. The mean is `config.mean_s` whatever the kind,
    except `instant`; `uniform` spreads lengths over a factor of ten."""
    rng, mean, spread = Random(seed), config.mean_s, config.spread
    if config.kind == "instant":
        return 0.0
    if config.kind == "lognormal":
        return rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    if config.kind == "pareto":
        return min(rng.paretovariate(spread) * mean * (spread - 1) / spread, 100 * mean)
    return rng.uniform(1.0, 10.0) * mean / 5.5


class SleepingEngine:
    """Answers after a drawn time; writes how many requests it held, for how long, to
    `occupancy.jsonl` whenever it is given weights."""

    samples = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How long requests take."""

        mean_s: float = 0.5
        """Mean seconds of a request."""
        kind: Literal["lognormal", "pareto", "uniform", "instant"] = "lognormal"
        """The distribution."""
        spread: float = 1.0
        """Standard deviation of the logarithm (lognormal), or the exponent (pareto)."""

    def __init__(self, config: Config, context: Context) -> None:
        self._config = config
        self._file = Path(context.directory) / "occupancy.jsonl"
        self._version = -1
        self._loads: list[tuple[float, int]] = []  # (when, version)
        self._active = self._tokens = 0
        self._busy_s = 0.0
        self._held: Counter[int] = Counter()  # microseconds by number of active requests
        self._since = time.monotonic()

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._held[self._active] += round((now - self._since) * 1e6)
        self._busy_s += (now - self._since) * (self._active > 0)
        self._since = now
        self._active += change

    async def generate(self, request: Request) -> Completion:
        """As many tokens as are allowed, spread evenly over the time that it took."""
        size = request.sampling.max_new_tokens
        wait, began = seconds(self._config, request.seed), time.monotonic()
        at_first = self._version
        self._count(+1)
        try:
            await asyncio.sleep(wait)
        finally:
            self._count(-1)
        self._tokens += size
        return Completion(
            tokens=np.full(size, 65, np.int32),
            logprobs=np.full(size, -1.0, np.float32),
            spans=self._spans(size, began, at_first),
            finish="length",
        )

    def _spans(self, size: int, began: float, version: int) -> tuple[Span, ...]:
        lasted = max(time.monotonic() - began, 1e-9)
        spans, start = [], 0
        for at, loaded in self._loads:
            if at < began:
                continue
            stop = min(size, round(size * (at - began) / lasted))
            if stop > start:
                spans.append(Span(start=start, stop=stop, version=version))
                start = stop
            version = loaded
        if start < size:
            spans.append(Span(start=start, stop=size, version=version))
        return tuple(spans)

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Serve them from now on."""
        for _ in weights:
            pass
        self._version = version
        self._loads = [*self._loads[-255:], (time.monotonic(), version)]
        self._count(0)
        line = {"version": version, "at": time.time(), "held_us": dict(self._held)}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._held.clear()

    async def score(self, tokens: Array) -> Array:
        """Always the same."""
        return np.full(len(tokens), -1.0, np.float32)  # (tokens,) float32

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """Cancelled requests end by themselves."""
        return 0

    async def pause(self) -> None:
        """Nobody asks for it here."""

    async def resume(self) -> None:
        """Nobody asks for it here."""

    async def version(self) -> int:
        """What is served."""
        return self._version

    async def health(self) -> Mapping[str, float]:
        """Counters since the start."""
        self._count(0)
        return {
            "active": self._active, "waiting": 0, "tokens": self._tokens, "busy_s": self._busy_s,
            "prompt_tokens": 0, "cached_tokens": 0, "max_len": 4096,
        }  # fmt: skip

    async def sleep(self) -> None:
        """There is nothing to free."""

    async def wake(self) -> None:
        """There is nothing to take back."""


class SleepingTrainer:
    """Takes `step_s` seconds a step."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How long a step takes."""

        step_s: float = 1.0
        """Seconds."""

    def __init__(self, config: Config, context: Context) -> None:
        self._step_s = config.step_s
        self.version = 0

    def step(self, batch: Batch) -> Update:
        """Sleep."""
        time.sleep(self._step_s)
        self.version += 1
        return Update(version=self.version, metrics={"lr": 0.0, "grad_norm": 0.0})

    def logprobs(self, tokens: Tokens, source: str) -> Array:
        """What the engine says, at once."""
        return np.where(tokens.sampled, -1.0, 0.0).astype(np.float32)  # (T,) float32

    def export(self) -> Iterator[tuple[str, Any]]:
        """One small tensor, through the real transport."""
        import torch

        yield "weight", torch.full((64,), float(self.version))

    def save(self, directory: Path | str, *, weights_only: bool = False) -> None:
        """The version alone."""
        model = Path(directory) / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "version").write_text(str(self.version))

    def load(self, directory: Path | str, *, weights_only: bool = False) -> None:
        """What `save` wrote."""
        self.version = int((Path(directory) / "model" / "version").read_text())

    def sleep(self) -> None:
        """There is nothing to free."""

    def wake(self) -> None:
        """There is nothing to take back."""


miles_components = {
    "engine": {"sleeping": SleepingEngine},
    "trainer": {"sleeping": SleepingTrainer},
}
