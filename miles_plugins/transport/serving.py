"""An engine as transports see it: given weights, asked what it serves, stopped when that is wrong.

How tensors came here is each transport's own affair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from miles import Engine, WeightsDiffer, WeightSyncError

__all__ = ["Serving"]

Entries = Sequence[Mapping[str, Any]]


class Serving:
    """The engine of one worker, on behalf of transport `name`."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self._name = name
        self._stopped = False  # by us, because what it serves was wrong

    async def load(
        self,
        version: int,
        entries: Entries,
        *,
        tensors: Callable[[], Iterable[tuple[str, Any]]],
        compare: bool,
    ) -> None:
        """Have the engine serve these tensors as `version`."""
        async with self._comparing(entries, compare=compare):
            await self.engine.load(version, tensors())

    async def load_directory(
        self,
        version: int,
        directory: Path,
        entries: Entries,
        *,
        tensors: Callable[[], Iterable[tuple[str, Any]]],
        compare: bool,
    ) -> None:
        """Have the engine serve a snapshot, which it reads itself if it can. Raises
        `WeightSyncError` when it then says another version."""
        async with self._comparing(entries, compare=compare):
            if (own := getattr(self.engine, "load_directory", None)) is None:
                await self.engine.load(version, tensors())
            else:
                await own(version, directory)
            if (found := await self.engine.version()) != version:
                raise WeightSyncError(
                    f"transport {self._name}: the engine serves version {found} after loading "
                    f"{version} from {directory}"
                )

    @asynccontextmanager
    async def _comparing(self, entries: Entries, *, compare: bool) -> AsyncIterator[None]:
        """Hold the engine still, where contents are compared, until they are; it stays stopped
        when they differ. An engine whose server has tensors of its own proves itself what that
        makes of the update."""
        if compare and (prove_next := getattr(self.engine, "prove_next", None)) is not None:
            prove_next()
        asks = getattr(self.engine, "digests", None) if compare else None
        if asks is not None and not self._stopped:
            await self.engine.pause()
        stays = self._stopped
        try:
            yield
            if asks is not None:
                self._compare(entries, await asks())
            stays = False
        except WeightsDiffer:
            stays = True
            raise
        finally:  # after any other fault it serves what it served
            before, self._stopped = self._stopped, stays
            if (asks is not None or before) and not stays:
                await self.engine.resume()

    def _compare(self, entries: Entries, served: Mapping[str, str]) -> None:
        wanted = {entry["name"]: entry["content"] for entry in entries}
        differ = [name for name, content in served.items() if wanted.get(name) != content]
        if differ:
            raise WeightsDiffer(
                f"transport {self._name}: {len(differ)} of {len(served)} tensors that the engine "
                f"serves differ from what the trainer sent: {', '.join(sorted(differ)[:8])}; it is "
                "stopped"
            )
