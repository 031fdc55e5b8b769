"""Protocols of what surrounds the loop: evaluators, runtimes, trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles.batch import Score, Skipped
from miles.protocols.context import Context, Spec
from miles.protocols.train import Handle
from miles.types import Group, Sampling, Task

__all__ = ["Attempt", "Evaluator", "Runtime", "Tracker"]


class Attempt(Protocol):
    """Plays a task the way training does, for evaluators."""

    directory: Path | None
    """The checkpoint being scored, for evaluators whose `place` is not `rollout`; `model/` in it is
    a Hugging Face directory."""

    async def __call__(
        self, task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        """Several attempts at one task. `of` names the set, which may have its own environment."""


@runtime_checkable
class Evaluator(Protocol):
    """How a policy version is scored.

    Optional attributes, of the class or the object: `place` is where attempts are played, on the
    engines that train (`rollout`, the default), on engines of its own that are loaded from a
    snapshot (`apart`), or nowhere, since it wants a checkpoint directory (`directory`);
    `timeout_s`, the seconds after which it is given up; and, where snapshots are taken, `workers`
    (of its own engines), `snapshots` (how many may exist) and `overflow` (`wait` or `skip`, when
    all are taken). A classmethod `environments(config)` gives, by set, `name` and keys of
    environments that are not the run's; they are in `context.environments`.
    """

    async def evaluate(self, version: int, attempt: Attempt) -> Sequence[Score | Skipped]:
        """Score one version on every set. Any failure is a `Skipped`; never raises `RolloutError`.
        The run records a `Score` only if it is of that version, and if every sample played for it
        was."""


@runtime_checkable
class Runtime(Protocol):
    """Where processes live."""

    async def start(
        self, name: str, parts: Sequence[Spec], context: Context, *, world: int = 1
    ) -> Handle:
        """Start `world` workers that build `parts` in order; returns when all have answered."""

    async def rebuild(self, handle: Handle, parts: Sequence[Spec], context: Context) -> None:
        """Build other parts in running workers, for the next stage."""

    async def end(self, handle: Handle) -> None:
        """End one handle's processes and their children at once, whatever they are doing."""

    async def stop(self) -> None:
        """End every process started here, with its children; safe to call twice."""


@runtime_checkable
class Tracker(Protocol):
    """Where metrics go. Called from one thread of its own, never from the loop.

    Optional: a classmethod `records(config) -> bool` says whether it writes `metrics.jsonl`, which
    reports are made of; without it, it does not.
    """

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        """One moment: `run_started`, `stage_started`, `step_finished` (data is the flat metrics),
        `step_restored` (the same of the step that a resumed run goes on from, as it was at its
        checkpoint; it may have been told before), `evaluated`, `weights_published`,
        `checkpoint_saved`, `waited` (a start takes long), `warned`, `run_finished`. Plain values
        only."""

    def close(self) -> None:
        """Flush; safe to call twice."""
