"""What the driver's halves of all transports share: asking every engine, cleaning up, deciding when
contents are compared, and looking at folders before a run.

It knows no transport; tensors never pass here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from miles import Handle, MilesError, WeightSyncError, places_here, unwritable

__all__ = ["CLEANUP_S", "Verifying", "everywhere", "folder_faults", "quietly", "same"]

_log = logging.getLogger(__name__)
CLEANUP_S = 10.0  # a worker that hangs must not hold up the fault that is being raised


class Verifying:
    """When the content that engines report is compared: at the first publish, every `every` after
    it, and whenever an engine is there that was not at the last publish."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._publishes = 0
        self._known: tuple[Handle, ...] = ()  # held, or another could come to lie where one was

    def due(self, engines: Sequence[Handle]) -> bool:
        """Whether the publish that begins now has to be compared."""
        return not same(engines, self._known) or self._publishes % self._every == 0

    def published(self, engines: Sequence[Handle]) -> None:
        """The publish that began last has succeeded."""
        self._publishes += 1
        self._known = tuple(engines)

    def failed(self) -> None:
        """It has not; the next one is compared, whatever it finds."""
        self._known = ()


def folder_faults(config: Any, planned: Any, *keys: str) -> list[str]:
    """Those of a config's folders that cannot be written, as far as this machine can tell: workers
    that a runtime places on others may see what it does not."""
    if planned is None or not places_here(planned):
        return []
    named = ((key, getattr(config, key)) for key in keys)
    return [f"{key}: {why}" for key, value in named if value and (why := unwritable(value))]


def same(some: Sequence[Handle], others: Sequence[Handle]) -> bool:
    """Whether these are the same handles: a worker that was started again has another."""
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )


async def everywhere(
    engines: Sequence[Handle], name: str, target: str, *args: Any, **how: Any
) -> list[list[Any]]:
    """Call every rank of every engine and wait for all; each engine's answers.

    Raises `WeightSyncError` in the name of transport `name`, with every engine that failed and its
    fault.
    """
    answers = await asyncio.gather(
        *(engine.call_all(target, *args, **how) for engine in engines), return_exceptions=True
    )
    faults = [
        (engine.name, answer)
        for engine, answer in zip(engines, answers, strict=True)
        if isinstance(answer, BaseException)
    ]
    for _, fault in faults:
        if not isinstance(fault, MilesError):
            raise fault
    if faults:
        said = "; ".join(f"{engine}: {fault}" for engine, fault in faults)
        error = WeightSyncError(f"transport {name}: {target} failed: {said}")
        for engine, fault in faults:
            for note in getattr(fault, "__notes__", ()):
                error.add_note(f"{engine}: {note}")
        raise error from faults[0][1]
    return list(answers)


async def quietly(calls: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Clean up after a fault that is already being raised; a worker that is gone has nothing to
    clean."""
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            _log.info("while cleaning up after a failed publish: %s", answer)
