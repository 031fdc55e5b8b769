"""One refusal for trackers whose library is an optional dependency.

It imports nothing of theirs: installed or not is read from metadata.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from miles import ConfigError


def require(tracker: str, *, distribution: str) -> None:
    """Raise `ConfigError` with the line to install when the distribution is missing."""
    try:
        version(distribution)
    except PackageNotFoundError:
        error = ConfigError(f"tracker {tracker}: needs {distribution}, which is not installed")
        error.add_note(f'pip install "miles[{tracker}]"')
        raise error from None
