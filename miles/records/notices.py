"""Warnings that would come at every step for the same reason, told to people once.

The driver's log has every one of them; how many there were is a metric's to count.
"""

from __future__ import annotations

import logging
import re

__all__ = ["Notices"]

_log = logging.getLogger(__name__)


_QUOTED = r"'[^']*'|\"[^\"]*\""
_NAMED = "engine|host|request|session|task|worker"
_SAME = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (rf"(\[Errno \d+\] [^:]*: )(?:{_QUOTED})(?: -> (?:{_QUOTED}))?", r"\1@"),  # files
        (r"[^\s'\"(]*/[^\s'\"),;]*", "@"),  # addresses and paths
        (rf"\b({_NAMED}) (?:{_QUOTED})", r"\1 @"),
        (r"\b(engine|session) [\w.-]+(?=:)", r"\1 @"),  # as miles' own errors begin
        (r"\b[\w.-]+:\d+\b", "@"),  # a host and its port
        (r"\b(?:0x[0-9a-f]+|(?=[a-f]*\d)[0-9a-f]{8,})\b", "#"),  # in memory, or an id
        (r"(?<!HTTP )(?<!Errno )(?<!\d)\d+(?:\.\d+)?", "#"),
    )
)
"""What the same reason names differently each time: where, and how much. What an operating system
or a server answers with tells reasons apart, and stays."""


class Notices:
    """What people were told of already; a reason with other numbers or places is the same one."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warn(self, what: str, reason: str) -> None:
        """Log `what: reason`: as a warning the first time, and for the file alone after that."""
        kind = f"{what}: {reason}"
        for pattern, by in _SAME:
            kind = pattern.sub(by, kind)
        if kind in self._told:
            _log.info("%s: %s", what, reason)
            return
        self._told.add(kind)
        _log.warning("%s: %s (told once; logs/driver.log has every one)", what, reason)
