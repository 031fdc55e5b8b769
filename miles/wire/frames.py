"""What crosses a process boundary: plain values, numpy arrays and miles' own dataclasses, as
msgpack frames.

Nothing here can name a class of the other side's choosing or run code while decoding: only the
dataclasses listed in `_WIRE` are rebuilt, with their types checked. There is no pickle.
"""

from __future__ import annotations

import asyncio
import struct
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import msgspec
import numpy as np

from miles import errors
from miles.batch import Batch, Receipt, Score, Skipped, Term, Tokens, Update
from miles.protocols import Spec
from miles.settings import Settings
from miles.types import (
    Array,
    Completion,
    Drop,
    Group,
    Request,
    Sample,
    Sampling,
    Span,
    Task,
    Trajectory,
)

__all__ = ["Connection", "decode", "encode", "error_from_wire", "error_to_wire"]

_ARRAY = 0  # extension codes: an array of any shape; `_WIRE` has those from 1 on
_FLAT = 64  # and from here on: arrays of one dimension, by dtype, nothing but their items
_WIRE: tuple[type, ...] = (
    Request,
    Completion,
    Batch,
    Tokens,
    Update,
    Receipt,
    Spec,
    Settings,
    Sample,
    Trajectory,
    Group,
    Task,
    Term,
    Span,
    Sampling,
    Drop,
    Score,
    Skipped,
)
_CODES = {cls: code for code, cls in enumerate(_WIRE, start=1)}
_DTYPES = tuple(
    np.dtype(d)
    for d in ("bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float32", "float64")
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_HEADS = tuple(struct.Struct(f"<BB{dims}Q") for dims in range(8))  # type, dimensions, shape
_AS_IT_IS = frozenset((str, int, float, bool, type(None), bytes, np.ndarray))


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = _DTYPE_CODES.get(value.dtype)
        if kind is None:
            raise TypeError(
                f"wire: an array of {value.dtype} cannot cross a process; cast it first"
            )
        if value.ndim == 1:  # most of them, and short ones: every microsecond counts
            return msgspec.msgpack.Ext(_FLAT + kind, value.tobytes())
        head = _HEADS[value.ndim].pack(kind, value.ndim, *value.shape)
        return msgspec.msgpack.Ext(_ARRAY, head + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):  # a frozen one
        return dict(value)
    raise TypeError(f"wire: a {type(value).__name__} cannot cross a process")


def _decode_ext(code: int, data: memoryview) -> Any:
    if 0 <= (kind := code - _FLAT) < len(_DTYPES):
        return np.frombuffer(data, _DTYPES[kind]).copy()  # the frame's buffer goes away
    if code == _ARRAY:
        return _decode_array(data)
    if 1 <= code <= len(_DECODERS):
        return _DECODERS[code - 1].decode(data)
    raise ValueError(f"wire: unknown extension {code}")


def _decode_array(data: memoryview) -> Array:
    if len(data) < 2 or data[0] >= len(_DTYPES) or data[1] >= len(_HEADS):
        raise ValueError("wire: an array's header is malformed")
    head = _HEADS[data[1]]
    if len(data) < head.size:
        raise ValueError("wire: an array's header is malformed")
    shape = head.unpack_from(data)[2:]
    flat = np.frombuffer(data, _DTYPES[data[0]], offset=head.size)
    return flat.reshape(shape).copy()  # the frame's buffer goes away, and receivers may write


def _accept(expected: type, value: Any) -> Any:
    if expected is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise ValueError(f"wire: expected {expected}, found {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_ext)
_DECODERS: list[msgspec.msgpack.Decoder[Any]] = [
    msgspec.msgpack.Decoder(cls, ext_hook=_decode_ext, dec_hook=_accept) for cls in _WIRE
]


def _wrap(value: Any) -> Any:
    """Mark dataclasses with their code, so that the other side rebuilds the same class."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if (code := _CODES.get(kind)) is not None:
        return msgspec.msgpack.Ext(code, _encoder.encode(value))
    if kind is list or kind is tuple:
        return _wrap_all(value)
    if kind is dict:
        return _wrap_values(value)
    if is_dataclass(value):
        raise TypeError(f"wire: a {kind.__name__} cannot cross a process")
    if isinstance(value, list | tuple):
        return _wrap_all(value)
    return _wrap_values(value) if isinstance(value, Mapping) else value


def _wrap_all(values: Iterable[Any]) -> list[Any]:
    # most items need nothing, and a call costs more than the question
    return [item if type(item) in _AS_IT_IS else _wrap(item) for item in values]


def _wrap_values(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: item if type(item) in _AS_IT_IS else _wrap(item) for k, item in values.items()}


def _frame(value: Sequence[Any]) -> bytes:
    """`encode` for the calls and answers of a connection: a short list whose items are wrapped."""
    return _encoder.encode(_wrap_all(value))


def encode(value: Any) -> bytes:
    """Bytes of plain values, arrays and known dataclasses. Raises `TypeError` for anything else."""
    return _encoder.encode(_wrap(value))


def decode(data: bytes | memoryview) -> Any:
    """The inverse of `encode`; tuples come back as lists. Raises `ValueError` on anything
    malformed."""
    return _decoder.decode(data)


def error_to_wire(error: BaseException) -> list[Any]:
    """An exception as plain values: class name, message, notes, traceback text; whatever it is, it
    can be sent. Of a group, the first that is in it, with the traceback of all. A plugin's own kind
    of one of miles' errors goes as that one, which the other end knows."""
    text = "".join(traceback.format_exception(error))
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        message = str(error)
    except Exception as fault:  # noqa: BLE001 - its own code failed to put it into words
        message = f"(no message: its __str__ raised {type(fault).__name__})"
    notes = [_sendable(str(note)) for note in getattr(error, "__notes__", ())]
    own = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return [next(own, _foreign(type(error))), _sendable(message), notes, _sendable(text)]


def _foreign(kind: type[BaseException]) -> str:
    """What tracebacks call it, by which it passes for none of miles' (torch has a
    `CheckpointError` too)."""
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return where + kind.__qualname__


def _sendable(text: str) -> str:
    """With lone surrogates, which UTF-8 has no bytes for, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_from_wire(plain: list[Any], where: str) -> errors.MilesError:
    """The same error if it is one of miles', otherwise a `WorkerError` that carries the remote
    traceback."""
    name, message, notes, text = plain
    cls = getattr(errors, name, None) if name in errors.__all__ else None
    if isinstance(cls, type) and issubclass(cls, errors.MilesError):
        error: errors.MilesError = cls(message)
        for note in notes:
            error.add_note(note)
        return error
    error = errors.WorkerError(f"{where}: {name}: {message}")
    error.add_note(text.rstrip())
    return error


class Connection(asyncio.Protocol):
    """Length-prefixed frames over a stream socket; frames sent in one turn of the event loop leave
    together."""

    def __init__(self, on_frame: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """That of the connection, once there is one."""
        self._incoming = bytearray()
        self._outgoing: list[bytes] = []
        self.limit: int | None = None
        """Bytes one frame may have; a longer one ends the connection. None: any length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.loop = asyncio.get_running_loop()

    def send(self, value: list[Any]) -> None:
        """Queue one frame. Raises `TypeError` when the value cannot cross, before anything is
        queued."""
        data = _frame(value)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing += (struct.pack("<Q", len(data)), data)

    def flush(self) -> None:
        """Hand queued frames to the socket."""
        if self._outgoing and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(self._outgoing)
        self._outgoing = []

    def data_received(self, data: bytes) -> None:
        buffer = self._incoming
        buffer += data
        at = 0
        while len(buffer) - at >= 8:
            (size,) = struct.unpack_from("<Q", buffer, at)
            if self.limit is not None and size > self.limit:
                self.close()
                return
            if len(buffer) - at - 8 < size:
                break
            self._on_frame(decode(bytes(memoryview(buffer)[at + 8 : at + 8 + size])))
            at += 8 + size
        if at:
            del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._transport is not None:
            self._transport.close()
