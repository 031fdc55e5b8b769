"""How many groups are where: in flight, buffered, in training, trained, dropped.

Numbers only. Who moves a group from one to the next is `miles.buffer`; what is written down of it,
`miles.records.ledger`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Accounts"]


@dataclass(slots=True)
class Accounts:
    """Where every started group is; the parts always add up to `started`."""

    started: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    buffered: int = 0
    training: int = 0
    retried: int = 0  # of those that ended, whose task is attempted again
    attempts: int = 0  # of groups that came back
    truncated: int = 0  # of those, ended by a length limit

    @property
    def balanced(self) -> bool:
        """Whether nothing was lost or counted twice."""
        held = self.in_flight + self.buffered + self.training
        return self.started == self.trained + self.dropped.total() + held
