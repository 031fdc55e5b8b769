"""What is said of a trainer that waits too long for groups: who waits for what, since when.

Only words; what is counted, and when it is too long, is `miles.buffer`'s affair. An engine or a
worker that stopped answering is found and named by who watches it (`miles.workers.weights`,
`miles.workers.pool`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from miles.errors import BufferStarved

__all__ = ["Standstill", "starved"]

_MANY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """What the buffer saw since the trainer began to wait."""

    wanted: int
    """Groups that it waits for."""
    ready: int
    """Groups that are there."""
    seconds: float
    """How long it has waited."""
    dropped: Counter[str]
    """Groups that came back meanwhile and are of no use, by reason."""
    attempts: int
    """Attempts of all groups that came back meanwhile."""
    truncated: int
    """Those of them that a length limit ended."""
    in_flight: int
    """Groups under way."""
    longest: tuple[int, str, float] | None
    """Of these, the one that is under way longest: group, task, seconds."""
    blocked: str
    """Why no further group starts; empty when one may."""

    def __str__(self) -> str:
        by_reason = ", ".join(f"{why} {n}" for why, n in self.dropped.most_common()) or "none"
        text = (
            f"{self.ready} of {self.wanted} groups in {self.seconds:.0f} s; "
            f"{self.dropped.total()} dropped: {by_reason}; {self.in_flight} in flight"
        )
        if self.longest is not None:
            group, task, seconds = self.longest
            text += f", longest group {group} (task {task!r}), for {seconds:.0f} s"
        if self.blocked:
            text += f"; no further group starts: {self.blocked}"
        return text

    def share(self, reason: str) -> float:
        """Of the dropped groups, those for that reason; 0 when none were dropped."""
        return self.dropped[reason] / max(1, self.dropped.total())


def starved(seen: Standstill) -> BufferStarved:
    """The error that ends a run, with what may be done about it."""
    error = BufferStarved(f"the trainer starved: {seen}")
    if (share := seen.share("zero_variance")) > _MANY:
        error.add_note(
            f"{share:.0%} of the dropped groups had equal rewards: the tasks are too hard or too "
            "easy for this policy; try a higher samples_per_group, other tasks, a warm-up stage, "
            "or selector.admit=[none]"
        )
    if seen.truncated > _MANY * seen.attempts:
        error.add_note(
            f"{seen.truncated} of {seen.attempts} attempts were truncated by a length limit; try a "
            "higher max_new_tokens, or the model's context is too short"
        )
    if seen.share("stale") > _MANY:
        error.add_note(
            f"{seen.share('stale'):.0%} of the dropped groups were too old: they take longer than "
            "the steps that max_lag allows; try a higher max_lag or groups_per_step"
        )
    if not seen.dropped:
        error.add_note("no group came back: see logs/ for the engine, or raise starved_after_s")
    return error
