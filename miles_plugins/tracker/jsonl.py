"""The `jsonl` tracker: every moment of a run as one line of JSON in the run directory.

It neither aggregates nor draws; `miles report` reads what it writes. The configuration is not
repeated here: it has a file of its own.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from miles import ConfigError, Context, RunError

# Publishes are part of every step's metrics; the configuration is in `config.yaml`.
_SKIPPED_MOMENTS = {"weights_published"}
_SKIPPED_KEYS = {"config", "directory"}


class Jsonl:
    """Appends one JSON object a moment to `metrics.jsonl`.

    A line holds `moment` (`step_finished`, `evaluated`, `stage_started`, ...), `at` (seconds since
    the epoch), `step` once known, and the moment's own values; an evaluation's are named as in the
    metrics table (`eval/<set>/score`), and `evaluator` tells the configuration that it was made
    with from others. Numbers that are not finite are written as null. A resumed run first removes
    what came after the step it continues from, and adds that step as it was at its checkpoint where
    it is missing: every step is there once, and so is an evaluation that is made again with the
    same evaluator.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        file: str = "metrics.jsonl"
        """Name of the file, in the run directory."""

    @classmethod
    def records(cls, config: Config) -> bool:
        """Whether it writes the file that `miles report` reads."""
        return config.file == "metrics.jsonl"

    def __init__(self, config: Config, context: Context) -> None:
        if Path(config.file).name != config.file or not config.file:
            raise ConfigError(
                f"tracker jsonl: file: {config.file!r} is not a file name in the run directory"
            )
        self._path = context.directory / config.file
        self._file: BinaryIO | None = None
        self._step: int | None = None
        self._told: dict[tuple[Any, ...], Any] = {}  # rows of before a resume, by whom at last
        self._evaluators: dict[str, str] = {}  # by stage
        self._evaluator = ""  # of this stage
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        """Append one line. Raises `RunError` when it cannot be written."""
        if name in _SKIPPED_MOMENTS:
            return
        again = name in ("step_restored", "evaluated")  # what a resumed run may tell again
        name = "step_finished" if name == "step_restored" else name
        try:
            if data.get("resumed") is not None:
                self._rewind(int(data["resumed"]))
            if name == "run_started":
                self._evaluators = _fingerprints(data.get("config", {}))
            elif name == "stage_started":
                self._evaluator = self._evaluators.get(data["stage"], "")
            if name != "evaluated" or (self._step or 0) < data["step"]:  # scores may come late
                self._step = data.get("step", self._step)
            at = data.get("step", self._step)
            step = {} if at is None else {"step": at}
            line = {"moment": name, "at": round(time.time(), 3), **step, **_values(name, data)}
            if name == "evaluated" and self._evaluator:
                line["evaluator"] = self._evaluator
            if not (again and self._told.get(_row(line), "") == line.get("evaluator")):
                self._append(line)
        except OSError as error:
            message = f"tracker jsonl: cannot write {self._path}: {error.strerror}"
            raise RunError(message) from error

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _end_last_line(self._path)
            self._file = self._path.open("ab")
        self._file.write(self._encoder.encode(line) + b"\n")
        self._file.flush()

    def _rewind(self, version: int) -> None:
        """Forget what the weights do not remember: lines of later steps, and torn ones."""
        self._step = version
        kept, torn_or_later = [], False
        for line in _lines(self._path) if self._path.exists() else ():
            if (found := _read(line, version)) is None:
                torn_or_later = True
                continue
            kept.append(line)
            self._told[_row(found)] = found.get("evaluator")
        if not torn_or_later:
            return
        self.close()
        new = self._path.with_name(self._path.name + ".rewind")
        with new.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


def _fingerprints(config: Mapping[str, Any]) -> dict[str, str]:
    """By stage, a word that is the same for the same evaluator, sets and values included."""
    encode = msgspec.json.Encoder(order="deterministic").encode
    return {
        stage: hashlib.sha256(encode(values.get("evaluator"))).hexdigest()[:8]
        for stage, values in config.get("stages", {}).items()
    }


def _values(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    if name == "evaluated":
        return {
            k if k in ("step", "stage", "set") else f"eval/{data['set']}/{k}": v
            for k, v in data.items()
        }
    return {k: v for k, v in data.items() if k not in _SKIPPED_KEYS}


def _row(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a line another one than those before, but for its evaluator."""
    why = line.get(f"eval/{line.get('set')}/skipped")
    return line.get("moment"), line.get("step"), line.get("set"), why


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _read(line: bytes, version: int) -> dict[str, Any] | None:
    """What a line says; None when it is torn, or of a step after `version`."""
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and found.get("step", 0) <= version else None


def _end_last_line(path: Path) -> None:
    """A process that died while writing leaves a torn line; the next must not be glued to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _plain(value: Any) -> Any:
    """numpy scalars as Python's; anything else is said to be what it is."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"tracker jsonl: a {type(value).__name__} is not a plain value")
