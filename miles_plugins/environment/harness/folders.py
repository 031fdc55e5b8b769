"""A folder for one attempt of an agent, and what becomes of it.

Whatever an agent leaves there, clearing it away ends no attempt and no run.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from miles import EpisodeError

__all__ = ["attempt_folder"]

_WHERE = "environment harness"
_log = logging.getLogger(__name__)


@contextmanager
def attempt_folder(task: bytes) -> Iterator[Path]:
    """A folder with `task.json` and an empty folder `work`, deleted afterwards; what cannot be
    deleted is left, with a warning that names it. Raises `EpisodeError` when there can be none."""
    folder = ""
    try:
        try:
            folder = tempfile.mkdtemp(prefix="miles-agent-")
            Path(folder, "task.json").write_bytes(task)
            Path(folder, "work").mkdir()
        except OSError as error:
            raise EpisodeError(f"{_WHERE}: cannot make a folder for the agent: {error}") from error
        yield Path(folder)
    finally:
        if folder:
            _delete(folder)


def _delete(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        return
    for path, names, _ in os.walk(folder):  # the agent may have locked its folders, as caches do
        for each in (path, *(os.path.join(path, name) for name in names)):
            if not os.path.islink(each):
                with suppress(OSError):
                    os.chmod(each, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        _log.warning(
            "%s: what an agent left in %s cannot all be deleted (is it another user's?); it stays "
            "there",
            _WHERE,
            folder,
        )
