"""The `tensorboard` tracker: metrics as TensorBoard event files in the run directory.

Scalars and the configuration as text; no histograms, no weights. It uses TensorBoard's own
writer, which needs neither torch nor TensorFlow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import msgspec

from miles import ConfigError, Context
from miles_plugins.tracker.extra import require


class Tensorboard:
    """Writes every number of every step and evaluation under its metric name.

    Look at it with `tensorboard --logdir <run directory>/tensorboard`. A resumed run tells
    TensorBoard to forget what came after the step it continues from, and writes that step again, in
    case the run before was killed too early to. Needs the `tensorboard` extra.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        flush_s: float = 10.0
        """Seconds between two flushes to disk."""

    def __init__(self, config: Config, context: Context) -> None:
        require("tensorboard", distribution="tensorboard")
        if config.flush_s <= 0:
            raise ConfigError(f"tracker tensorboard: flush_s: {config.flush_s} is not above 0")
        self._config = config
        self._directory = context.directory / "tensorboard"
        self._writer: Any = None

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        """Write what a moment carries."""
        if name == "run_started":
            self._start(data)
        elif name == "stage_started":
            self._text("stage", str(data["stage"]), step=int(data["version"]))
        elif name in ("step_finished", "step_restored"):
            self._scalars("", data, step=int(data["step"]))
        elif name == "evaluated":
            self._scalars(f"eval/{data['set']}/", data, step=int(data["step"]))
        elif name == "warned":
            self._text("warning", str(data["text"]))

    def close(self) -> None:
        """Flush and close the event file; safe to call twice."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _start(self, data: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        resumed = data.get("resumed")
        if resumed is not None:
            # Readers drop events at or after the step of a START; those of `resumed` are good.
            self._add(resumed + 1, session_log=SessionLog(status=SessionLog.START))
        self._text("config", _block(data.get("config", {})), step=resumed or 0)

    def _scalars(self, prefix: str, data: Mapping[str, Any], *, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=prefix + key, simple_value=float(value))
            for key, value in data.items()
            if key not in ("step", "stage_step") and _finite(value)
        ]
        if values:
            self._add(step, summary=Summary(value=values))

    def _text(self, tag: str, text: str, *, step: int = 0) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, summary=text_pb(tag, text))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            flush = self._config.flush_s
            self._writer = EventFileWriter(str(self._directory), flush_secs=flush)
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


def _finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _block(config: Any) -> str:
    """A mapping as an indented Markdown block, which TensorBoard shows as it is."""
    text = msgspec.json.format(msgspec.json.encode(config), indent=2).decode()
    return "".join(f"    {line}\n" for line in text.splitlines())
