"""The `shared` evaluator: plays held-out tasks on the engines that training uses.

It starts no engine and moves no weights, and it never scores a mixture of versions. How sets are
played and judged is `sets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from miles_plugins.evaluator.sets import Keys, Playing

__all__ = ["Shared"]


class Shared(Playing):
    """Held-out tasks on the rollout engines, greedy by default; new groups wait for the score.

    Nothing in flight is aborted. With `max_lag` the trainer goes on meanwhile, and the next publish
    waits for the score, `timeout_s` at most. Every version sees the same tasks with the same seeds.
    """

    place: ClassVar[Literal["rollout", "apart", "directory"]] = "rollout"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(Keys):
        """Which sets, and how they are attempted."""
