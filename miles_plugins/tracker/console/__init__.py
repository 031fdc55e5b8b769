"""The `console` tracker: what a person watching a run wants to see, on standard output.

A live panel on a terminal, plain lines elsewhere. It keeps no history beyond what it draws.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from miles import ConfigError, Context
from miles_plugins.tracker.console.lines import evaluation, start_line, step_line, summary
from miles_plugins.tracker.console.progress import Progress


class Console:
    """Shows the run on standard output: a live panel on a terminal, otherwise a line now and then.

    The panel holds stage and step, a bar with the time left, the reward's course, evaluations,
    mismatch, speeds, where the time goes, the buffer and the drops. Stage changes, evaluations and
    warnings are always printed; steps are not, beyond one line every `every_s` seconds.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        live: Literal["auto", "always", "never"] = "auto"
        """Draw the panel; auto does when standard output is a terminal that can move its cursor."""
        refresh_s: float = 1.0
        """Seconds between two drawings of the panel; one takes about 2 ms of a core."""
        every_s: float = 10.0
        """Seconds between two plain step lines, and between two showings of the same warning."""

    def __init__(self, config: Config, context: Context) -> None:
        for key in ("refresh_s", "every_s"):
            if getattr(config, key) <= 0:
                raise ConfigError(f"tracker console: {key}: {getattr(config, key)} is not above 0")
        self._config = config
        self._progress = Progress()
        self._panel: Any = None
        # The panel is drawn by a thread of rich's while moments arrive on the tracker's.
        self._lock = threading.Lock()
        self._next_line = 0.0
        self._warned: dict[str, tuple[float, int]] = {}
        self._skips: set[tuple[str, str]] = set()

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        """Take one moment in; print what should not be missed."""
        with self._lock:
            self._progress.take(name, data)
        if name == "run_started":
            self._open()
        elif name == "stage_started":
            self._say(start_line(self._progress))
            self._next_line = time.monotonic() + self._config.every_s
        elif name == "step_finished":
            self._step()
        elif name == "evaluated":
            self._evaluated(data)
        elif name == "warned":
            self._warn(str(data["text"]))
        elif name == "waited":
            self._say(str(data["text"]))
        elif name == "run_finished":
            self.close()
            self._say(summary(self._progress))

    def close(self) -> None:
        """Leave the terminal as it was; safe to call twice."""
        if self._panel is not None:
            panel, self._panel = self._panel, None
            panel.stop()

    def _open(self) -> None:
        if self._config.live == "never":
            return
        # Imported here: listing plugins and plain runs pay nothing for it.
        from miles_plugins.tracker.console.panel import Panel

        panel = Panel(self._progress, self._lock, refresh_s=self._config.refresh_s)
        if self._config.live == "always" or panel.can_draw:
            self._panel = panel
            panel.start()

    def _step(self) -> None:
        now = time.monotonic()
        if self._panel is None and (now >= self._next_line or self._progress.stage_done):
            self._say(step_line(self._progress))
            self._next_line = now + self._config.every_s

    def _evaluated(self, data: Mapping[str, Any]) -> None:
        if "skipped" in data:  # each reason once; the summary counts them
            if (skip := (str(data["set"]), _kind(str(data["skipped"])))) in self._skips:
                return
            self._skips.add(skip)
        self._say(evaluation(self._progress, data))

    def _warn(self, text: str) -> None:
        kind = _kind(text)
        now = time.monotonic()
        last, hidden = self._warned.get(kind, (-float("inf"), 0))
        if now - last < self._config.every_s:
            self._warned[kind] = (last, hidden + 1)
            return
        self._warned[kind] = (now, 0)
        self._say(f"warning: {text}" + (f" ({hidden} like it not shown)" if hidden else ""))

    def _say(self, text: str) -> None:
        if self._panel is not None:
            self._panel.print(text)
        else:
            print(text, file=sys.stdout, flush=True)


def _kind(text: str) -> str:
    """What the same text with other numbers is as well."""
    return "".join(c for c in text if not c.isdigit())
