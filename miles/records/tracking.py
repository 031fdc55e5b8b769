"""Moments on their way to trackers: a bounded queue and one thread, so that no tracker can hold up
the loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from miles.errors import MilesError
from miles.protocols import Tracker

__all__ = ["Tracking"]

log = logging.getLogger("miles.records.tracking")


class Tracking:
    """Tells every tracker of every moment, in order.

    A tracker that raises is reported once and told nothing more. When trackers fall `limit` moments
    behind, further ones are counted and left out, and a `warned` moment says how many.
    """

    def __init__(self, trackers: Mapping[str, Tracker], *, limit: int = 4096) -> None:
        self._trackers = dict(trackers)
        # a SimpleQueue hands over in C; bounded by looking at its size, which only this side grows
        self._queue: queue.SimpleQueue[tuple[str, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._limit = limit
        self._left_out = 0
        self._closed = False
        self._thread = threading.Thread(target=self._tell, name="trackers", daemon=True)
        self._thread.start()

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        """Queue one moment; never waits."""
        room = self._limit - self._queue.qsize()
        if room > 1 and self._left_out:
            text = f"trackers fell behind: {self._left_out} moments left out"
            self._queue.put(("warned", {"text": text}))
            self._left_out = 0
        if room > 0:
            self._queue.put((name, data))
        else:
            self._left_out += 1

    def _tell(self) -> None:
        while (item := self._queue.get()) is not None:
            name, data = item
            for key in list(self._trackers):
                self._try(key, name, data)
        for key in list(self._trackers):
            self._try(key, "close", {})

    def _try(self, key: str, name: str, data: Mapping[str, Any]) -> None:
        tracker = self._trackers[key]
        try:
            if name == "close":
                tracker.close()
            else:
                tracker.moment(name, data)
        except Exception as error:  # a tracker is other people's code; the run goes on without it
            said = error.detail if isinstance(error, MilesError) else ""  # needs no traceback
            text = "tracker %s failed at %s and is told nothing more" + (": %s" if said else "%s")
            log.error(text, key, name, said, exc_info=not said)
            del self._trackers[key]

    def close(self, timeout: float = 30.0) -> Sequence[str]:
        """Deliver what is queued and close the trackers; names of those that did not end in
        time."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout)
        return list(self._trackers) if self._thread.is_alive() else ()
