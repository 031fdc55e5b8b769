"""What outlives the stages of a run: processes, trackers, the ledger, and where the run stands.

Data, the ending of rollouts that have no process of their own, and the texts kept of all stages;
what a stage does with it is `miles.stage`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from miles.protocols import Handle
from miles.records.ledger import Ledger
from miles.records.notices import Notices
from miles.records.tracking import Tracking
from miles.types import Group
from miles.workers.engines import Engines
from miles.workers.here import Here

__all__ = ["Shared"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Shared:
    """What outlives a stage: processes, trackers, the ledger, and where the run stands."""

    directory: Path
    registry: Any
    runtime: Any
    ledger: Ledger
    tracking: Tracking
    config: Mapping[str, Any]
    """Resolved configuration of all stages, for checkpoints."""
    version: int = 0
    """Trainer steps since the run began."""
    next_group: int = 0
    """Id of the next group."""
    evaluated: int = -1
    """Last version that was scored."""
    notices: Notices = field(default_factory=Notices)
    """What people are told once, however many steps it is true of."""
    handles: dict[str, tuple[Handle, Any]] = field(default_factory=dict)
    """Running workers by role, with what they were built for."""
    engines: Engines | None = None
    """Engine workers, once there are any."""
    here: Here | None = None
    """Rollouts in the driver, where there are no workers for them."""

    async def end_rollouts(self) -> None:
        """Close what rollouts in the driver left open."""
        old, self.here = self.here, None
        if old is not None:
            await old.rollouts.end()

    def keep_text(self, step: int, stage: str, group: Group, tito: Any) -> None:
        """Append a group's best attempt to `samples.jsonl`, for people to read."""
        best = max(group.trajectories, key=lambda t: t.reward)
        line = {
            "step": step,
            "stage": stage,
            "task": msgspec.to_builtins(group.task),
            "text": best.text,
            "reward": best.reward,
        }
        whole = max(best.samples, key=lambda sample: len(sample.tokens))
        if np.count_nonzero(np.diff(whole.sampled.astype(np.int8)) > 0) > 1:  # several turns
            line["conversation"] = tito.decode(whole.tokens)
        try:
            with (self.directory / "samples.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a text for people; no step ends for it
            _log.warning("samples.jsonl: cannot be written: %s", error.strerror)
