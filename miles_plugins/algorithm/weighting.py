"""How a loss is averaged: per-token weights that add up to the mean an algorithm asks for.

Shared by the built-in algorithms; it knows nothing of rewards or loss terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from miles import Array, Group, Sample

__all__ = ["Aggregation", "samples_of", "token_weights"]

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def samples_of(groups: Sequence[Group]) -> tuple[list[Sample], Array]:
    """Every sample in order, and (samples,) int64: which trajectory, counted over all groups, each
    is from."""
    samples, owners, count = [], [], 0
    for group in groups:
        for trajectory in group.trajectories:
            samples += trajectory.samples
            owners += [count] * len(trajectory.samples)
            count += 1
    return samples, np.array(owners, np.int64)


def token_weights(
    trainable_T: Array, owners_T: Array, trajectories: int, how: Aggregation, length: int
) -> Array:
    """(T,) float32 weights of trainable tokens, 0 elsewhere; `owners_T` (T,) is each token's
    trajectory.

    With n trainable tokens in N trajectories, n_i of them in the i-th:

    - `token_mean`: 1 / n. Every token counts the same (DAPO, arXiv:2503.14476). - `sequence_mean`:
    1 / (N n_i). Every trajectory counts the same, however long (GRPO, arXiv:2402.03300).
      Trajectories without a trainable token are not counted in N.
    - `fixed_length`: 1 / (N `length`). A token's weight does not depend on how long answers are
    (Dr. GRPO,
      arXiv:2503.20783).
    """
    counts = np.bincount(owners_T[trainable_T], minlength=trajectories)  # (N,) int64
    if how == "token_mean":
        weight = 1.0 / max(1, int(counts.sum()))
    elif how == "fixed_length":
        weight = 1.0 / (max(1, trajectories) * length)
    else:
        share = 1.0 / (max(1, np.count_nonzero(counts)) * np.maximum(counts, 1))  # (N,) float64
        return np.where(trainable_T, share[owners_T], 0.0).astype(np.float32)
    return trainable_T.astype(np.float32) * np.float32(weight)
