"""The host's end of a channel to a box's supervisor: frames out, frames in, answers to those who
wait for them.

What comes in is checked as if the box had written it: whatever is wrong with it ends the channel.
What the frames mean is `supervised`'s business, and `inside`'s.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from miles import SandboxError

__all__ = ["ERROR", "Channel", "Reply"]

_REPLY = struct.Struct("!IIBBiQQI")
ERROR = 4
"""The last of the kinds of a reply, as `inside.supervisor` numbers them."""


class Reply(NamedTuple):
    """One answer."""

    kind: int
    flags: int
    code: int
    out_total: int
    err_total: int
    split: int
    body: bytes


class Channel(asyncio.Protocol):
    """Frames out, frames in, answers to those who wait for them."""

    def __init__(self, failure: Callable[[str], SandboxError], limit: int) -> None:
        self._failure, self._limit = failure, limit
        self._received = bytearray()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._transport: Any = None
        self.lost: SandboxError | None = None
        """Why there will be no more answers."""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def send(self, data: bytes) -> None:
        """One frame."""
        self._transport.writelines((len(data).to_bytes(4, "big"), data))

    def expect(self, number: int) -> asyncio.Future[Reply]:
        """The answer to an order that is about to be sent. Raises `SandboxError` when the box is
        gone."""
        if self.lost is not None:
            raise self.lost
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        return future

    def forget(self, number: int) -> None:
        """Nobody waits for an answer any more."""
        self._waiting.pop(number, None)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._received += data
        while len(self._received) >= 4 and self.lost is None:
            size = int.from_bytes(self._received[:4], "big")
            if not _REPLY.size - 4 <= size <= self._limit:
                self.fail(f"its supervisor announced {size} bytes")
                return
            if len(self._received) < size + 4:
                return
            frame = bytes(self._received[: size + 4])
            del self._received[: size + 4]
            self._answer(frame)

    def _answer(self, frame: bytes) -> None:
        _, number, *rest = _REPLY.unpack_from(frame)
        reply = Reply(*rest, frame[_REPLY.size :])
        if reply.kind > ERROR or reply.split > len(reply.body):
            self.fail(f"its supervisor answered with a frame of kind {reply.kind}")
            return
        future = self._waiting.pop(number, None)
        if future is not None and not future.done():  # else nobody waits for it any more
            future.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self.fail("it ended" if error is None else f"it cannot be reached: {error}")
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, why: str) -> None:
        """End the box; whoever waits is told why."""
        if self.lost is None:
            self.lost = self._failure(why)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(self.lost)
        self.hang_up()

    def hang_up(self) -> None:
        """Close our end; the supervisor ends the box for it."""
        if self._transport is not None:
            self._transport.abort()
        elif not self.ended.done():
            self.ended.set_result(None)
