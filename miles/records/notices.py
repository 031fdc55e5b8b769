"""Warnings that would come at every step for the same reason, told to people once.

The driver's log has every one of them; how many there were is a metric's to count.
"""

from __future__ import annotations

import logging
import re

__all__ = ["Notices"]

_log = logging.getLogger(__name__)


class Notices:
    """What people were told of already; a reason with other numbers is the same one."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warn(self, what: str, reason: str) -> None:
        """Log `what: reason`: as a warning the first time, and for the file alone after that."""
        kind = re.sub(r"\d+", "#", f"{what}: {reason}")
        if kind in self._told:
            _log.info("%s: %s", what, reason)
            return
        self._told.add(kind)
        _log.warning("%s: %s (told once; logs/driver.log has every one)", what, reason)
