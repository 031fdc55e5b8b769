"""A local plugin: attempts whose lengths are log-normal and known, sampled by a real engine.

`simulator_fit.py` holds the simulator against it; nothing is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from miles import Context, Request, Sample, Span, Task, Trajectory


class Lengths:
    """One turn an attempt, of a drawn number of tokens."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How long attempts are."""

        mean: float = 48.0
        """Mean tokens."""
        sigma: float = 0.8
        """Standard deviation of their logarithm."""
        most: int = 200
        """No attempt is longer."""

    def __init__(self, config: Config, context: Context) -> None:
        self._config = config

    def tasks(self, split: str) -> Sequence[Task]:
        """Numbers to start from."""
        return [Task(id=f"{split}-{i}", prompt=f"{i:04d}: count") for i in range(4096)]

    async def play(self, task: Task, seed: int, tools: Any) -> Trajectory:
        """Sample as many tokens as were drawn."""
        rng, config = Random(seed), self._config
        location = math.log(config.mean) - config.sigma**2 / 2
        size = min(config.most, max(1, round(rng.lognormvariate(location, config.sigma))))
        prompt = tools.tito.encode(str(task.prompt)).astype(np.int32)
        completion = await tools.engine.generate(
            Request(
                id=tools.id,
                key=tools.id,
                tokens=prompt,
                sampling=replace(tools.sampling, max_new_tokens=size, stop_ids=()),
                seed=seed,
            )
        )
        before = len(prompt)
        tokens = np.concatenate([prompt, completion.tokens])
        sampled = np.arange(len(tokens)) >= before  # (tokens,) bool
        logprobs = np.concatenate([np.zeros(before, np.float32), completion.logprobs])
        spans = tuple(
            Span(start=s.start + before, stop=s.stop + before, version=s.version)
            for s in completion.spans
        )
        sample = Sample(
            tokens=tokens, sampled=sampled, trainable=sampled, logprobs=logprobs, spans=spans,
            finish=completion.finish,
        )  # fmt: skip
        return Trajectory(id=tools.id, samples=(sample,), reward=float(rng.random() < 0.5))


miles_components = {"environment": {"lengths": Lengths}}
