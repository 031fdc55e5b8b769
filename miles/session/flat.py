"""Growable arrays: what a session stores of its tokens, appended and never copied per turn.

A column knows nothing of turns, branches or log-probs; `miles.session.tree` says what its rows
mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles.types import Array

__all__ = ["Column"]

_SPARE = 8  # a buffer is made an eighth larger than needed: 12.5 % of memory, 8 copies of a row


class Column:
    """Rows of one dtype and shape, appended at the end and cut off there.

    Appending keeps a reference until somebody reads, so that a short conversation is copied once.
    A view that was handed out never changes: rows that would be written over it go to a new buffer.
    """

    __slots__ = ("_data", "_filled", "_parts", "_seen", "_size")

    def __init__(self) -> None:
        self._data: Array | None = None
        self._filled = 0  # rows in the buffer
        self._parts: list[Array] = []  # rows after those, not copied yet
        self._size = 0
        self._seen = 0  # rows of the buffer that views may show

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes held, spare room included."""
        held = 0 if self._data is None else self._data.nbytes
        return held + sum(part.nbytes for part in self._parts)

    def append(self, rows: Array) -> None:
        """Add (rows, ...) at the end; the caller no longer writes to them. All rows have the dtype
        and shape of the first."""
        if len(rows):
            self._parts.append(rows)
            self._size += len(rows)

    def cut(self, size: int) -> None:
        """Keep the first `size` rows."""
        excess = self._size - size
        while excess > 0 and self._parts:
            last = self._parts.pop()
            if len(last) > excess:
                self._parts.append(last[: len(last) - excess])
            excess -= min(excess, len(last))
        self._filled -= excess
        self._size = size

    def view(self, start: int, stop: int) -> Array:
        """(stop - start, ...) read-only, without copying what was read before; it stays as it is
        whatever happens to the column."""
        data = self._read(stop)[start:stop]
        data.setflags(write=False)
        if self._data is not None and stop > self._seen:
            self._seen = stop
        return data

    def copy(self, pieces: Sequence[tuple[int, int]]) -> Array:
        """The `[start, stop)` pieces end to end, in an array of their own."""
        if len(pieces) == 1 and self._data is None and pieces[0] == (0, self._size):
            return np.concatenate(self._parts)
        if len(pieces) == 1:
            return self._read(pieces[0][1])[slice(*pieces[0])].copy()
        read = self._read(max(stop for _, stop in pieces))
        return np.concatenate([read[start:stop] for start, stop in pieces])

    def rows(self, start: int, stop: int) -> Array:
        """(stop - start, ...) to read at once and forget: no promise like that of `view`."""
        if self._data is None and len(self._parts) == 1 and stop - start == self._size:
            return self._parts[0]
        return self._read(stop)[start:stop]

    def _read(self, stop: int) -> Array:
        """An array whose first `stop` rows are the column's."""
        if stop > self._filled:
            if self._data is None and len(self._parts) == 1:
                return self._parts[0]
            self._gather()
        if self._data is None:
            raise IndexError("column: nothing was ever appended")
        return self._data

    def _gather(self) -> None:
        data = self._data
        if data is None or self._size > len(data) or self._filled < self._seen:
            like = self._parts[0]
            grown = np.empty((self._size + self._size // _SPARE, *like.shape[1:]), like.dtype)
            if data is not None:
                grown[: self._filled] = data[: self._filled]
            self._data = data = grown
            self._seen = 0
        for part in self._parts:
            data[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
        self._parts = []
