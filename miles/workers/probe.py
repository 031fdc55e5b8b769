"""A few sequences that an engine scores, for steps whose own tokens are all of older weights.

Trainer and rollout then still have log-probs of the same weights to compare, so that numerics are
measured on every step. What is compared, and against which budget, is the trainer's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from miles.batch import Tokens, flatten
from miles.types import Array, Group, Sample, Span, WeightVersion

__all__ = ["FEW", "few_tokens", "probe", "wants_probe"]

FEW = 64
"""With fewer tokens of the trainer's version than this, a step wants a probe."""
_SEQUENCES = 4
_TOKENS = 2048  # of all its sequences, at most


def wants_probe(groups: Sequence[Group], version: WeightVersion) -> bool:
    """Whether a step on these groups has too few sampled tokens of the trainer's version."""
    if any(sample.logprobs is None for group in groups for sample in group.samples):
        return False  # a demonstration: there is no rollout to agree with
    return few_tokens(groups, version)


def few_tokens(groups: Sequence[Group], version: WeightVersion) -> bool:
    """Whether fewer than `FEW` tokens of these groups were sampled under this version."""
    count = 0
    for group in groups:
        for sample in group.samples:
            count += sum(s.stop - s.start for s in sample.spans if s.version == version)
            if count >= FEW:
                return False
    return True


async def probe(
    groups: Sequence[Group],
    version: WeightVersion,
    score: Callable[[Array], Awaitable[Array]],
) -> Tokens | None:
    """Sequences of these groups with the log-probs that `score`, an engine at `version`, gives
    them; None when all are too long."""
    chosen: list[Array] = []
    room = _TOKENS
    for group in groups:
        shortest = min(group.samples, key=lambda s: len(s.tokens), default=None)
        if shortest is None or not 1 < len(shortest.tokens) <= room:
            continue
        room -= len(shortest.tokens)
        chosen.append(shortest.tokens)
        if len(chosen) == _SEQUENCES:
            break
    if not chosen:
        return None
    scores = await asyncio.gather(*map(score, chosen))  # the trainer waits: all at once
    return flatten([_scored(t, s, version) for t, s in zip(chosen, scores, strict=True)])


def _scored(tokens: Array, logprobs: Array, version: WeightVersion) -> Sample:
    after_first = np.ones(len(tokens), np.bool_)  # (tokens,) bool: nothing predicts the first
    after_first[0] = False
    return Sample(
        tokens=tokens,
        sampled=after_first,
        trainable=np.zeros(len(tokens), np.bool_),
        logprobs=np.where(after_first, logprobs, 0).astype(np.float32),
        spans=(Span(start=1, stop=len(tokens), version=version),),
    )
