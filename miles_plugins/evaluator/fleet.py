"""The `fleet` evaluator: plays held-out tasks on engines of its own, beside the training.

The run takes the snapshot, starts the engines and loads them; how sets are played and judged is
`sets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from miles import ConfigError, Context
from miles_plugins.evaluator.sets import Keys, Playing

__all__ = ["Fleet"]


class Fleet(Playing):
    """Held-out tasks on engines of its own, loaded from a snapshot of the policy and verified.

    Training goes on meanwhile; a score lands at the step of its snapshot, whenever it comes.
    """

    place: ClassVar[Literal["rollout", "apart", "directory"]] = "apart"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(Keys):
        """Which sets, how they are attempted, and by how many engines."""

        workers: int = 1
        """Engine processes, each with all the weights."""
        snapshots: int = 2
        """Snapshots that may exist at once: one being scored, the others waiting. Each is deleted
        when its score is in."""
        overflow: Literal["wait", "skip"] = "skip"
        """When a version is due and all snapshots are taken: training waits, or that version is
        skipped."""

    def __init__(self, config: Config, context: Context) -> None:
        super().__init__(config, context)
        for key in ("workers", "snapshots"):
            if getattr(config, key) < 1:
                raise ConfigError(f"evaluator fleet: {key}: {getattr(config, key)} is below 1")
        self.workers = config.workers
        self.snapshots = config.snapshots
        self.overflow = config.overflow
