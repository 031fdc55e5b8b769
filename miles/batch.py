"""What a step is made of: samples laid end to end, loss terms over them, and what came of it.

Frozen, slotted, keyword-only dataclasses over numpy arrays, as in `miles.types`; nothing here
computes a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from miles.errors import SampleError
from miles.types import Array, Sample, Trajectory, WeightVersion

__all__ = [
    "Batch",
    "Receipt",
    "Score",
    "Skipped",
    "Term",
    "Tokens",
    "Update",
    "flatten",
    "version_fault",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Samples laid end to end; T tokens in all, S samples."""

    tokens: Array
    """(T,) int32."""
    lengths: Array
    """(S,) int32, adding up to T."""
    sampled: Array
    """(T,) bool."""
    trainable: Array
    """(T,) bool."""
    versions: Array
    """(T,) int32: version of each sampled token, -1 elsewhere."""
    logprobs: Array | None = None
    """(T,) float32 as in `Sample`; None when any sample has none."""
    truncated_logprobs: Array | None = None
    """(T,) float32, falling back to `logprobs` where a sample was not cut; None when none was."""
    experts: Array | None = None
    """(T, layers, top_k) routing to replay, or None; a trainer that does not replay refuses it."""


def flatten(samples: Sequence[Sample]) -> Tokens:
    """Lay samples end to end in the given order.

    Raises `SampleError` when there are none, for images, which no trainer takes yet, and for
    experts that only some have.
    """
    if not samples:
        raise SampleError("flatten: no samples")
    _refuse_untold(samples)
    versions = np.full(sum(len(s.tokens) for s in samples), -1, np.int32)  # (T,) int32
    offset = 0
    for sample in samples:
        for span in sample.spans:
            versions[offset + span.start : offset + span.stop] = span.version
        offset += len(sample.tokens)
    logprobs = [s.logprobs for s in samples]
    have_logprobs = all(x is not None for x in logprobs)
    cut = have_logprobs and any(s.truncated_logprobs is not None for s in samples)
    have_experts = samples[0].experts is not None
    return Tokens(
        tokens=np.concatenate([s.tokens for s in samples]),
        lengths=np.array([len(s.tokens) for s in samples], np.int32),  # (S,) int32
        sampled=np.concatenate([s.sampled for s in samples]),
        trainable=np.concatenate([s.trainable for s in samples]),
        versions=versions,
        logprobs=_join(logprobs) if have_logprobs else None,
        truncated_logprobs=(
            _join(
                s.logprobs if s.truncated_logprobs is None else s.truncated_logprobs
                for s in samples
            )
            if cut
            else None
        ),
        experts=_join(s.experts for s in samples) if have_experts else None,
    )


def _refuse_untold(samples: Sequence[Sample]) -> None:
    """What `Tokens` cannot tell a trainer, which would train as if it had not been there."""
    images = [len(s.images) for s in samples]
    if any(images):
        at = next(i for i, count in enumerate(images) if count)
        raise SampleError(
            f"flatten: {sum(images)} images in {np.count_nonzero(images)} of {len(samples)} "
            f"samples, the first in sample {at}: no trainer takes images yet, and the text alone "
            "is not what was sampled from; train on tasks without images (an evaluator may play "
            "those with them)"
        )
    routed = sum(s.experts is not None for s in samples)
    if routed not in (0, len(samples)):
        raise SampleError(
            f"flatten: {routed} of {len(samples)} samples have experts to replay; all must, or "
            "none (session.experts=false)"
        )


def _join(parts: Iterable[Array | None]) -> Array:
    return np.concatenate([p for p in parts if p is not None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One named loss term: the step's loss is the sum over terms and tokens of `weight × value`.

    Weights arrive normalised over the whole step, so a trainer only sums; how it cuts micro-batches
    cannot change the loss.
    """

    name: str
    """Logged as `loss/<name>`."""
    function: str
    """`module:function`, imported by the trainer workers; see `miles.learn.losses` for the
    signature."""
    weights: Array
    """(T,) float32; 0 where the term does not apply."""
    inputs: Mapping[str, Array] = field(default_factory=dict)
    """Per-token float32 arrays of shape (T,) handed to the function by name."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Numbers handed to the function by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a trainer executes in one step."""

    tokens: Tokens
    """The samples."""
    terms: tuple[Term, ...]
    """The loss."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers the algorithm wants logged, under their full names."""
    probe: Tokens | None = None
    """Sequences scored by an engine at the trainer's version, to measure `mismatch/*` on when
    `tokens` has too few of that version; they carry no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a trainer did."""

    version: WeightVersion
    """The version the weights now have."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`loss/<term>`, `grad_norm`, `lr`, `mismatch/*`, `off_policy/*`, `tokens/trained`, under their
    full names."""
    warnings: tuple[str, ...] = ()
    """Sentences a person should see, such as a mismatch over its budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Proof that weights arrived."""

    version: WeightVersion
    """What the engines now serve."""
    digest: str
    """Hex digest of names, shapes, types and bytes; equal on both sides. Empty when nothing was
    moved."""
    bytes: int
    """Payload size."""
    seconds: float
    """Wall-clock from call to readiness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a policy version did on one evaluation set."""

    set: str
    """Name of the set."""
    version: WeightVersion
    """The version that produced every sample of it."""
    score: float
    """Mean reward."""
    samples: int
    """How many attempts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Anything else, logged under `eval/<set>/<name>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """An evaluation that gave no score."""

    set: str
    """Name of the set."""
    reason: str
    """Why."""


def version_fault(trajectories: Iterable[Trajectory], version: int) -> str:
    """Why these do not show what `version` can do, empty when they do: every sample must be served
    by that version alone."""
    samples = [s for t in trajectories for s in t.samples if s.spans]
    mixed = [s for s in samples if len({span.version for span in s.spans}) > 1]
    if mixed:
        names = ", ".join(map(str, sorted({x.version for s in mixed for x in s.spans})))
        return f"{len(mixed)} of {len(samples)} samples were served by mixed versions: {names}"
    found = {s.spans[0].version for s in samples}
    if found <= {version}:
        return ""
    mean = sum(s.spans[0].version for s in samples) / len(samples)
    names = ", ".join(map(str, sorted(found)))
    return f"samples of version {names}, on average {mean:g}, are not of version {version}"
