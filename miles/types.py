"""The data that flows through a run: frozen, slotted, keyword-only dataclasses over numpy arrays.

Nothing here computes a loss, moves a tensor or touches a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from miles.errors import SampleError

__all__ = [
    "Array", "Completion", "Drop", "Finish", "Group", "Message", "Request", "Sample", "Sampling",
    "Span", "Task", "Trajectory", "WeightVersion",
]  # fmt: skip

Array = np.ndarray
Message = Mapping[str, Any]
Finish = Literal["stop", "length", "abort"]

IMAGE_PARTS = ("image", "image_url")
"""Types of the content parts of a message that are images."""

WeightVersion = int
"""Trainer steps completed since the run began, across stages and resumes; 0 as loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of consecutive tokens sampled under one weight version: `[start, stop)`."""

    start: int
    """Index of the first token."""
    stop: int
    """Index after the last token."""
    version: WeightVersion
    """Weight version that sampled every token in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to attempt."""

    id: str
    """Unique in its environment and the same in every process and resume."""
    prompt: str | tuple[Message, ...]
    """Text to continue as it is, or chat messages for the model's template."""
    answer: Any = None
    """What the reward compares with."""
    solution: str | tuple[Message, ...] | None = None
    """A demonstration, which the `demonstration` engine replays turn by turn: the text of a single
    turn, or the messages that follow the prompt, of which the assistant's are said and the others
    (tool results) may be replayed by the environment."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Anything else the environment wants back, plain JSON values only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int = 256
    """At most this many tokens are sampled."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 keeps all."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; it is part of the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion asked of an engine."""

    id: str
    """Unique in the run."""
    key: str
    """Routing key: the trajectory this belongs to. Never empty."""
    tokens: Array
    """(prompt tokens,) int32."""
    sampling: Sampling
    """How to draw."""
    seed: int
    """The completion's tokens are a function of weights, tokens, sampling and this, of nothing
    else."""
    demonstration: Array | None = None
    """(tokens,) int32: the task's own solution, for an engine that replays; others ignore it."""
    images: tuple[bytes, ...] = ()
    """Encoded images in the order of their placeholders in `tokens`; empty for text."""
    dp_rank: int | None = None
    """Data-parallel rank inside the engine that holds this key's KV cache; set by the router."""
    want_experts: bool = False
    """Return the experts that were chosen, for replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled."""

    tokens: Array
    """(tokens,) int32, the stop token included."""
    logprobs: Array | None
    """(tokens,) float32 under the full distribution at the sampling temperature; None if nothing
    was sampled from a distribution (a demonstration)."""
    spans: tuple[Span, ...]
    """Tile [0, tokens) exactly, versions never decreasing."""
    finish: Finish
    """Why it ended: a stop id, the length limit, or an abort."""
    truncated_logprobs: Array | None = None
    """(tokens,) float32 under the distribution cut by top-p/top-k; None when nothing was cut."""
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused."""
    experts: Array | None = None
    """(tokens, layers, top_k) narrow unsigned ints: the routing to replay; None for dense
    models.
    """


_INT32, _BOOL, _FLOAT32 = np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float32)


def _not(dtype: np.dtype[Any], values: Array) -> bool:
    """Whether an array is of another type; being the same object answers five times sooner than
    being equal, and a step makes hundreds of samples."""
    return values.dtype is not dtype and values.dtype != dtype


def _fail(what: str) -> None:
    raise SampleError(f"sample: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One root-to-leaf token sequence; it checks itself when made.

    Raises `SampleError` unless: lengths are equal; spans tile exactly the sampled tokens; trainable
    tokens are sampled; versions never decrease; log-probs of sampled tokens are finite.
    """

    tokens: Array
    """(tokens,) int32, prompt and completions."""
    sampled: Array
    """(tokens,) bool: drawn by an engine (or demonstrated)."""
    trainable: Array
    """(tokens,) bool: may carry loss; a subset of `sampled`."""
    logprobs: Array | None
    """(tokens,) float32: full-distribution log-prob of each sampled token, 0 elsewhere; None for
    demonstrations."""
    spans: tuple[Span, ...]
    """Weight version of every sampled token, by position in `tokens`."""
    finish: Finish = "stop"
    """Why the last completion ended."""
    truncated_logprobs: Array | None = None
    """(tokens,) float32: as `logprobs`, under the distribution cut by top-p/top-k; None when
    nothing was cut."""
    experts: Array | None = None
    """(tokens, layers, top_k) routing to replay; None for dense models."""
    images: tuple[bytes, ...] = ()
    """Encoded images in the order of their placeholders in `tokens`."""

    def __post_init__(self) -> None:
        tokens, sampled, trainable = self.tokens, self.sampled, self.trainable
        size = len(tokens)
        if _not(_INT32, tokens):
            _fail(f"tokens are {tokens.dtype}, not int32")
        if len(sampled) != size or len(trainable) != size:
            found = f"{len(sampled)} sampled and {len(trainable)} trainable bits"
            _fail(f"{size} tokens, {found}")
        if _not(_BOOL, sampled) or _not(_BOOL, trainable):
            _fail(f"sampled is {sampled.dtype} and trainable {trainable.dtype}, not bool")
        differ = trainable is not sampled and trainable.tobytes() != sampled.tobytes()
        if differ and (wrong := trainable > sampled).any():
            _fail(f"token {int(np.argmax(wrong))} is trainable but was not sampled")
        for name in ("logprobs", "truncated_logprobs"):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != size or _not(_FLOAT32, values):
                _fail(f"{name} has {len(values)} {values.dtype} values for {size} tokens")
            if np.count_nonzero(finite := np.isfinite(values)) != size:
                _fail(f"{name} is not finite at token {int(np.argmin(finite))}")
        if self.experts is not None and len(self.experts) != size:
            _fail(f"{len(self.experts)} rows of experts for {size} tokens")
        self._check_spans()

    def _check_spans(self) -> None:
        end = version = covered = 0
        for span in self.spans:
            if span.start < end or span.stop <= span.start or span.stop > len(self.tokens):
                _fail(f"span [{span.start}, {span.stop}) is empty, overlaps or leaves the sample")
            if span.version < version:
                _fail(f"version falls from {version} to {span.version} at token {span.start}")
            if np.count_nonzero(self.sampled[span.start : span.stop]) != span.stop - span.start:
                _fail(f"span [{span.start}, {span.stop}) covers tokens that were not sampled")
            covered += span.stop - span.start
            end, version = span.stop, span.version
        if covered != (sampled := np.count_nonzero(self.sampled)):
            _fail(f"spans cover {covered} of {sampled} sampled tokens")

    @property
    def oldest(self) -> WeightVersion | None:
        """Oldest version of a trainable token; None when nothing is trainable."""
        for span in self.spans:
            some = self.trainable[span.start]  # the first of them, as a rule
            if some or np.count_nonzero(self.trainable[span.start : span.stop]):
                return span.version
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Why something was not trained on: a short machine word and a sentence."""

    reason: str
    """One word with underscores; it becomes `groups/dropped/<reason>`."""
    detail: str = ""
    """For a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a task: one sample, or several when its history branched."""

    id: str
    """Unique in the run; also the routing key."""
    samples: tuple[Sample, ...]
    """One per kept leaf; empty only with a failure."""
    reward: float = 0.0
    """What the environment says it was worth; always finite unless there is a failure."""
    text: str = ""
    """The last completion, decoded, for people to read."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers the environment wants logged, averaged over a step under `env/<name>`."""
    failure: Drop | None = None
    """Set when the attempt went wrong; its group is then dropped for that reason."""

    def __post_init__(self) -> None:
        if self.failure is None and not self.samples:
            _fail(f"trajectory {self.id!r} has no samples and no failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one task that are compared with each other."""

    id: int
    """Order in which groups were started, from 0; never reused except by a resume."""
    task: Task
    """What was attempted."""
    trajectories: tuple[Trajectory, ...]
    """The attempts, in order of their index."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Every sample of every trajectory, in order."""
        return tuple(s for t in self.trajectories for s in t.samples)

    @property
    def oldest(self) -> WeightVersion | None:
        """Oldest version of a trainable token anywhere in the group; None when nothing is
        trainable."""
        found = [v for t in self.trajectories for s in t.samples if (v := s.oldest) is not None]
        return min(found, default=None)

    @property
    def truncated(self) -> int:
        """How many of its trajectories a length limit ended."""
        return sum(bool(t.samples) and t.samples[-1].finish == "length" for t in self.trajectories)

    @property
    def failure(self) -> Drop | None:
        """The first failure among its trajectories."""
        return next((t.failure for t in self.trajectories if t.failure is not None), None)
