"""What a provider of remote boxes must be able to do, and how its failures are judged and asked
again.

It knows no provider: each is a module beside this one that speaks through its vendor's SDK. What a
box then does is `remote_box`, opening and listing them `remote_sandbox`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from miles import SandboxError

__all__ = ["Fault", "FileTooLarge", "Found", "Machine", "Provider", "RemoteConfig", "ask"]

_log = logging.getLogger("miles.sandbox")

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_LONGEST_ASKED_WAIT_S = 120.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Keys that every remote sandbox has."""

    network: bool = False
    """Whether boxes reach the internet."""
    workdir: str = ""
    """Directory in the box that commands start in, made when it is not there; empty is the image's
    own."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables of every command. Nothing of this machine's is passed on."""
    timeout_s: float = 60.0
    """Seconds a command may run when it is not given a time of its own."""
    output_kb: int = 64
    """KiB kept of each of a command's streams, half from its beginning and half from its end."""
    file_mb: int = 64
    """MiB of the largest file that `read` and `write` move."""
    lifetime_s: int = 3600
    """Seconds after which the provider itself ends a box: the last guard against leaked ones."""
    open_timeout_s: float = 300.0
    """Seconds one attempt at creating a box may take."""
    request_timeout_s: float = 60.0
    """Seconds one request may take, beside what a command is given."""
    attempts: int = 5
    """How often a request that may succeed later is made before it counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What an error of a provider's SDK means."""

    retryable: bool = False
    """The same request may succeed later."""
    refused: bool = False
    """Nothing has happened: the request was turned away, so repeating it cannot do it twice."""
    gone: bool = False
    """The box does not exist any more."""
    after_s: float | None = None
    """Seconds the provider asks to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A box as a provider lists it."""

    id: str
    """The provider's id."""
    labels: Mapping[str, str]
    """What it was labelled with."""
    created: float = 0.0
    """Seconds since the epoch; 0 when unknown."""
    state: str = "running"
    """The provider's word."""


class FileTooLarge(Exception):
    """A file is not to be read whole."""

    def __init__(self, most: int) -> None:
        super().__init__(f"larger than the {most >> 20} MiB that may be read at once (file_mb)")


class Machine(Protocol):
    """One box, as a provider's SDK offers it."""

    id: str
    """The provider's id."""

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> tuple[int, bytes]:
        """Exit code and standard output of a command that has no input; standard error is not
        needed."""

    async def read(self, path: str, *, most: int) -> bytes:
        """Content of the file at an absolute path. Raises `FileTooLarge` beyond `most` bytes,
        without holding all of them."""

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace the file at an absolute path, and the folders above it."""


class Provider(Protocol):
    """A vendor's service. Its methods raise what the SDK raises; `explain` says what that means."""

    title: str
    """`sandbox NAME`, as messages begin."""

    async def create(self, labels: Mapping[str, str]) -> Machine:
        """A running box with these labels."""

    async def find(self, labels: Mapping[str, str]) -> Sequence[Found]:
        """Every box that has all of these labels and still exists."""

    async def delete(self, id: str) -> None:
        """Stop a box and all in it; one that is gone is no error."""

    def explain(self, error: BaseException) -> Fault:
        """What an error raised by any of these, or by a machine, means."""

    async def close(self) -> None:
        """Let go of connections."""


async def ask(
    provider: Provider,
    what: str,
    call: Callable[[], Awaitable[T]],
    *,
    limit_s: float,
    attempts: int,
    only_refused: bool = False,
) -> T:
    """The answer to a call, made again with growing, jittered waits while that may help and
    attempts are left; each wait is logged.

    `only_refused` repeats only what the provider turned away untouched (for what must not happen
    twice). Raises `SandboxError`, with `retryable` as the last fault was.
    """
    number = 1
    while True:
        try:
            async with asyncio.timeout(limit_s):
                return await call()
        except SandboxError:
            raise
        except Exception as error:  # an SDK raises anything, from HTTP's errors to JSON's
            fault = judged(provider, error)
            said = f"{provider.title}: cannot {what}: {words(error, limit_s)}"
            again = fault.retryable and (fault.refused or not only_refused)
            if not again or number >= attempts:
                tried = f" (after {number} attempts)" if number > 1 else ""
                raise SandboxError(said + tried, retryable=fault.retryable) from error
        wait = pause(number, fault)
        _log.warning("%s; attempt %d of %d, again in %.1f s", said, number, attempts, wait)
        await asyncio.sleep(wait)
        number += 1


def judged(provider: Provider, error: BaseException) -> Fault:
    """What an error means: a time limit or a broken connection may pass; of others the provider
    knows."""
    if isinstance(error, TimeoutError | ConnectionError):
        return Fault(retryable=True)
    return provider.explain(error)


def pause(number: int, fault: Fault) -> float:
    """Seconds to wait after attempt `number`: what the provider asks for, or twice as long each
    time; jittered, so that many boxes do not come back at once."""
    if fault.after_s is not None:
        return min(fault.after_s, _LONGEST_ASKED_WAIT_S) + random.uniform(0.0, 0.5)
    longest = min(_FIRST_WAIT_S * 2 ** (number - 1), _LONGEST_WAIT_S)
    return random.uniform(longest / 2, longest)


def words(error: BaseException, limit_s: float) -> str:
    """An error of an SDK as one line."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {limit_s:g} s"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__
