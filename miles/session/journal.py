"""What survives a restart: every session's turns in an append-only file of its own.

A file is a sequence of frames, `length, CRC-32, payload`, the payload msgpack; the first opens the
session, each later one is a turn or a mark. A frame is written with one `write` before the turn is
answered, and not fsynced: it survives the process being killed at any moment, but the last seconds
may be lost with the machine's power. Reading stops at the first frame that is not whole; what
follows it is cut off, and said. A directory belongs to one process at a time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from miles.errors import JournalError
from miles.plain import of_json, to_json
from miles.session.tree import Session
from miles.session.turns import Counters, Prompt
from miles.types import Array, Completion, Finish, Message, Span

__all__ = ["Journal"]

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<II")  # bytes of the payload, its CRC-32
_SUFFIX = ".journal"
_COUNTED = {one.name for one in fields(Counters)}  # other versions may count other things


class _Rows(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: Array | None) -> _Rows | None:
        if array is None:
            return None
        return cls(array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())

    def array(self) -> Array:
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)


class _Opened(msgspec.Struct, array_like=True, tag="opened"):
    id: str
    data: bytes  # JSON


class _Turned(msgspec.Struct, array_like=True, tag="turned"):
    counters: dict[str, int]  # before it
    index: int
    parent: int
    replaces: int
    fresh: bool
    raw: bool
    said: bytes  # JSON: appended messages, the reply, tools if they are not the parent's
    images: tuple[bytes, ...]
    added: _Rows
    tokens: _Rows
    logprobs: _Rows | None
    truncated_logprobs: _Rows | None
    experts: _Rows | None
    spans: tuple[tuple[int, int, int], ...]
    finish: Finish
    cached_tokens: int


class _Marked(msgspec.Struct, array_like=True, tag="marked"):
    counters: dict[str, int]
    what: str
    value: int | str


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Opened | _Turned | _Marked)


class Journal:
    """A `Recorder` that writes to a directory."""

    def __init__(self, directory: Path) -> None:
        """Raises `JournalError` when the directory cannot be written, or another process has it."""
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise JournalError(
                f"journal {directory}: another process writes here; give each its own directory"
            ) from error
        except OSError as error:
            raise JournalError(f"journal {directory}: cannot be used: {error}") from error

    def close(self) -> None:
        """Let another process have the directory; safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- writing

    def opened(self, session: Session) -> None:
        """Begin a session's file."""
        path = self._path(session.id)
        path.unlink(missing_ok=True)
        self._append(session.id, _Opened(session.id, to_json(session.data).encode()))

    def turn(
        self, session: Session, prompt: Prompt, completion: Completion, message: Message
    ) -> None:
        """Write a turn. Raises `JournalError` when it could not be written whole."""
        tools = None if session.offers(prompt.parent) is prompt.tools else list(prompt.tools)
        self._append(
            session.id,
            _Turned(
                counters=session.counters.plain(),
                index=prompt.index,
                parent=prompt.parent,
                replaces=prompt.replaces,
                fresh=prompt.fresh,
                raw=prompt.raw,
                said=to_json([list(prompt.new), message, tools]).encode(),
                images=prompt.own_images,
                added=_rows(prompt.added),
                tokens=_rows(completion.tokens),
                logprobs=_Rows.of(completion.logprobs),
                truncated_logprobs=_Rows.of(completion.truncated_logprobs),
                experts=_Rows.of(completion.experts),
                spans=tuple((s.start, s.stop, s.version) for s in completion.spans),
                finish=completion.finish,
                cached_tokens=completion.cached_tokens,
            ),
        )

    def mark(self, session: Session, what: str, value: Any) -> None:
        """Write a mark."""
        self._append(session.id, _Marked(session.counters.plain(), what, value))

    def forget(self, id: str) -> None:
        """A session was closed: its file goes."""
        self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self.directory / (quote(id, safe="") + _SUFFIX)

    def _append(self, id: str, record: msgspec.Struct) -> None:
        payload = _encode(record)
        frame = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            file = os.open(self._path(id), flags, 0o600)
            try:
                before = os.fstat(file).st_size
                written = os.write(file, frame)
                if written != len(frame):
                    os.ftruncate(file, before)  # later frames must not follow a torn one
                    raise OSError(f"{written} of {len(frame)} bytes were written")
            finally:
                os.close(file)
        except OSError as error:
            raise JournalError(f"journal {self.directory}: session {id}: {error}") from error

    # ---- reading

    def replay(self, build: Callable[[str, Mapping[str, Any]], Session]) -> list[Session]:
        """Every session as its last whole frame left it, oldest file first; `build` makes an empty
        one from an id and its data. A torn end is cut off the file."""
        files = sorted(self.directory.glob(f"*{_SUFFIX}"), key=lambda p: (p.stat().st_ctime, p))
        found = (self._replay_file(path, build) for path in files)
        return [session for session in found if session is not None]

    def _replay_file(
        self, path: Path, build: Callable[[str, Mapping[str, Any]], Session]
    ) -> Session | None:
        data = path.read_bytes()
        session: Session | None = None
        good = 0
        for record, end in _frames(data):
            if session is None:
                if not isinstance(record, _Opened):
                    break
                session = build(record.id, of_json(record.data))
            elif not _restore(session, record):
                break
            good = end
        if good < len(data):
            _log.warning(
                "journal %s: the last %d of %d bytes are no whole frame; the session continues "
                "from what is before them",
                path, len(data) - good, len(data),
            )  # fmt: skip
        if session is None:
            path.rename(path.with_suffix(".damaged"))
        elif good < len(data):
            os.truncate(path, good)
        return session


def _frames(data: bytes) -> Iterator[tuple[Any, int]]:
    """Whole records from the beginning, each with where it ends."""
    at = 0
    while len(data) - at >= _HEAD.size:
        size, crc = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + size
        payload = memoryview(data)[at + _HEAD.size : end]
        if end > len(data) or zlib.crc32(payload) != crc:
            return
        try:
            yield _decoder.decode(payload), end
        except (msgspec.MsgspecError, ValueError):
            return  # whole, but written by another version of this module
        at = end


def _restore(session: Session, record: Any) -> bool:
    """Do again what a record says; False when it does not fit what came before it."""
    if isinstance(record, _Opened):
        return False
    counters = Counters(**{k: n for k, n in record.counters.items() if k in _COUNTED})
    if isinstance(record, _Marked):
        session.counters = counters
        session.mark(record.what, record.value)
        return True
    if not (session.has(record.parent) and session.has(record.replaces)):
        return False
    new, message, tools = of_json(record.said)
    prompt = Prompt(
        index=record.index,
        parent=record.parent,
        tokens=record.added.array(),  # the rest of it is stored already
        added=record.added.array(),
        new=tuple(new),
        tools=session.offers(record.parent) if tools is None else tuple(tools),
        images=record.images,
        fresh=record.fresh,
        raw=record.raw,
        replaces=record.replaces,
        own_images=record.images,
    )
    session.counters = counters
    session.store(prompt, _completion(record), message)
    return True


def _completion(record: _Turned) -> Completion:
    return Completion(
        tokens=record.tokens.array(),
        logprobs=_array(record.logprobs),
        spans=tuple(Span(start=a, stop=b, version=v) for a, b, v in record.spans),
        finish=record.finish,
        truncated_logprobs=_array(record.truncated_logprobs),
        cached_tokens=record.cached_tokens,
        experts=_array(record.experts),
    )


def _rows(array: Array) -> _Rows:
    return _Rows(array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())


def _array(rows: _Rows | None) -> Array | None:
    return None if rows is None else rows.array()
