"""What a program needs that serves until it is told to stop: a secret for its clients, and the
signals that end it.

What it serves is its own affair.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from contextlib import suppress
from pathlib import Path

from miles.errors import ConfigError

__all__ = ["asked_to_stop", "secret_in"]


def secret_in(path: Path) -> str:
    """The secret in a file that only its owner reads; made at the first start, so that clients of
    before a restart still have the right one. Raises `ConfigError` when the file is empty, or
    others could have read it."""
    if not path.exists():
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(made, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # of another that starts at this moment
            os.link(new, path)  # whole, or not at all
        new.unlink()
    found = path.stat()
    if found.st_mode & 0o077 or found.st_uid != os.getuid():
        raise ConfigError(
            f"{path} is not its owner's alone (mode {found.st_mode & 0o777:o}); remove it, and a "
            "new token is made"
        )
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:
        raise ConfigError(f"{path} is empty; remove it, and a new token is made")
    return secret


async def asked_to_stop() -> None:
    """Wait for SIGINT or SIGTERM, however long."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
