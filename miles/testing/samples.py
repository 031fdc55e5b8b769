"""Builders of small, valid samples, groups and contexts with every field given a value on purpose.

They sample nothing: tokens and log-probs are seeded noise of the right shape and type.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles.protocols import Context
from miles.seeds import derive_seed
from miles.settings import Settings
from miles.types import Group, Sample, Span, Task, Trajectory

__all__ = ["context", "make_group", "make_sample"]


def make_sample(
    prompt: int = 3,
    completion: int = 4,
    *,
    versions: Sequence[int] = (0,),
    logprobs: bool = True,
    trainable: bool = True,
    vocab_size: int = 256,
    seed: int = 0,
) -> Sample:
    """A prompt and one completion of seeded noise.

    `versions` are spread over the completion in order, one span each, so `(0, 1)` lived through a
    weight update; there may be no more of them than completion tokens. Log-probs lie in (-4, 0) on
    sampled tokens.
    """
    if len(versions) > completion and completion:
        raise ValueError(f"make_sample: {len(versions)} versions for {completion} sampled tokens")
    rng = np.random.default_rng(derive_seed("sample", seed, prompt, completion))
    size = prompt + completion
    sampled = np.arange(size) >= prompt  # (tokens,) bool
    edges = np.linspace(prompt, size, len(versions) + 1).round().astype(int)
    spans = tuple(
        Span(start=int(start), stop=int(stop), version=version)
        for start, stop, version in zip(edges[:-1], edges[1:], versions, strict=True)
        if stop > start
    )
    noise = -4 * rng.random(size)  # (tokens,) float64
    return Sample(
        tokens=rng.integers(0, vocab_size, size).astype(np.int32),
        sampled=sampled,
        trainable=sampled & trainable,
        logprobs=np.where(sampled, noise, 0).astype(np.float32) if logprobs else None,
        spans=spans,
    )


def make_group(
    id: int = 0,
    *,
    rewards: Sequence[float] = (1.0, 0.0),
    lengths: Sequence[int] = (),
    prompt: int = 3,
    versions: Sequence[int] = (0,),
    logprobs: bool = True,
    task: Task | None = None,
    seed: int = 0,
) -> Group:
    """A group with one single-sample trajectory for every reward; `lengths` are their completions'
    (default 4)."""
    sizes = tuple(lengths) or (4,) * len(rewards)
    task = task or Task(id=f"task-{id}", prompt="2+2=", answer=4, solution="4")
    trajectories = tuple(
        Trajectory(
            id=f"g{id}/{index}",
            samples=(
                make_sample(
                    prompt,
                    size,
                    versions=versions,
                    logprobs=logprobs,
                    seed=derive_seed(seed, id, index),
                ),
            ),
            reward=float(reward),
            text="4" if reward else "5",
        )
        for index, (reward, size) in enumerate(zip(rewards, sizes, strict=True))
    )
    return Group(id=id, task=task, trajectories=trajectories)


def context(directory: Path | str, *, settings: Settings | None = None, **fields: Any) -> Context:
    """A context for building one component in a test; `fields` are those of `Context`.

    The directory is made if it is not there.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    return Context(directory=path, settings=settings or Settings(), **fields)
