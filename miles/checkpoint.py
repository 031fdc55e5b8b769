"""Checkpoints: one directory a step, complete or absent, every file with its digest.

Written under a temporary name, synced, and renamed. What the files mean belongs to whoever wrote
them.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from miles.errors import CheckpointError, ConfigError

__all__ = ["find", "newest", "prune", "read_state", "set_aside", "verify", "write"]

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{6,})")


async def write(
    folder: Path, step: int, fill: Callable[[Path], Awaitable[Mapping[str, Any]]]
) -> Path:
    """Create `folder/step_<step>`: `fill` writes files into the directory it is given and returns
    the state that becomes `state.json`. Raises `CheckpointError` naming what could not be written;
    nothing half-made is left."""
    final = folder / f"step_{step:06d}"
    partial = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        state = await fill(partial)
        await asyncio.to_thread(_seal, partial, state)  # every byte is read: not in the event loop
        replaced = folder / f".{final.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():  # the same step again, after a resume
            final.rename(replaced)
        partial.rename(final)
        _sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        where = error.filename or partial
        raise CheckpointError(
            f"checkpoint {final}: cannot write {where}: {error.strerror or error}"
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _seal(partial: Path, state: Mapping[str, Any]) -> None:
    """Add `state.json` and the manifest, and bring everything to the disk."""
    (partial / "state.json").write_text(json.dumps(state, indent=1))
    digests = {name: _digest(partial / name) for name in _files(partial)}
    (partial / _MANIFEST).write_text(json.dumps(digests, indent=1))
    for path in (*partial.rglob("*"), partial):
        _sync(path)


_GOOD: dict[Path, tuple[Any, ...]] = {}
"""Checkpoints that this process found good, by what `_stamp` saw."""


def verify(checkpoint: Path) -> None:
    """Check every file against the manifest. Raises `CheckpointError` naming the first file that is
    missing, extra or damaged, and the newest good checkpoint beside it. A checkpoint that this
    process found good is read again only when a file of it changed since."""
    state = _stamp(checkpoint)
    if state and _GOOD.get(checkpoint.resolve()) == state:
        return
    if (fault := _fault(checkpoint)) is None:
        _GOOD[checkpoint.resolve()] = state
        return
    error = CheckpointError(f"checkpoint {checkpoint}: {fault}")
    good = next(
        (c for c in reversed(find(checkpoint.parent)) if c != checkpoint and not _fault(c)), None
    )
    error.add_note(f"newest good one: {good}" if good else "no other checkpoint there is good")
    raise error


def _stamp(checkpoint: Path) -> tuple[Any, ...]:
    """Name, size, and time of the last change of every file."""
    stats = ((name, (checkpoint / name).stat()) for name in _files(checkpoint))
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats)


def _fault(checkpoint: Path) -> str | None:
    manifest = checkpoint / _MANIFEST
    if not manifest.is_file():
        return f"{_MANIFEST} is missing: it was never completed"
    try:
        digests = json.loads(manifest.read_text())
    except ValueError:
        return f"{_MANIFEST} is damaged"
    present = {name for name in _files(checkpoint) if name != _MANIFEST}
    if missing := sorted(digests.keys() - present):
        return f"{missing[0]} is missing"
    if extra := sorted(present - digests.keys()):
        return f"{extra[0]} does not belong to it"
    damaged = (name for name in sorted(digests) if _digest(checkpoint / name) != digests[name])
    if (name := next(damaged, None)) is not None:
        return f"{name} is damaged (its digest differs)"
    return None


def find(folder: Path) -> list[Path]:
    """Checkpoints in a folder by step, complete or not."""
    if not folder.is_dir():
        return []
    return sorted(
        (p for p in folder.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)),
        key=lambda p: int(p.name[5:]),
    )


def newest(path: Path, *, runs: Path | None = None) -> Path:
    """The checkpoint that `resume=path` means: itself, or the newest of a run directory. Raises
    `ConfigError` when there is none, with those of a close name there and in the folder `runs`."""
    if not path.exists():
        close = " or ".join(_close(path, runs))
        guess = f"; did you mean {close}?" if close else ""
        raise ConfigError(f"resume={path}: there is no such directory{guess}")
    if _NAME.fullmatch(path.name):
        return path
    found = find(path / "checkpoints") or _replaced(path / "checkpoints")
    if not found:
        raise ConfigError(
            f"resume={path}: no checkpoint in {path / 'checkpoints'}; a run that ended before its "
            "first one is started again under another run.name (checkpoint_every=N writes one "
            "every N steps, not only at the end of a stage)"
        )
    return found[-1]


def _close(path: Path, runs: Path | None) -> list[str]:
    """Runs, or checkpoints of one, that may be meant by a path that leads nowhere."""
    while not path.parent.exists():
        path = path.parent
    found = {
        each.name: each
        for folder in (runs, path.parent)
        if folder is not None and os.access(folder, os.R_OK) and folder.is_dir()
        for each in folder.iterdir()
        # os.path: in one that may not be entered, pathlib raises
        if _NAME.fullmatch(each.name) or os.path.isdir(each / "checkpoints")
    }
    begun = sorted((name for name in found if name.startswith(path.name)), reverse=True)
    similar = difflib.get_close_matches(path.name, found, n=3, cutoff=0.6)
    return [str(found[name]) for name in dict.fromkeys([*begun, *similar])][:3]


def _replaced(folder: Path) -> list[Path]:
    """The one that was about to be written anew when its run was killed, put back."""
    for old in folder.glob(".step_*.replaced"):
        final = old.with_name(old.name[1:].removesuffix(".replaced"))
        old.rename(final)
        return [final]
    return []


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`; 0 keeps all."""
    for old in find(folder)[:-keep] if keep else ():
        shutil.rmtree(old)


def set_aside(folder: Path, after: int) -> None:
    """Rename checkpoints of steps beyond `after` to `step_<step>.rolled_back`: a run that continues
    from `after` comes to other weights, and the newest must be its own."""
    for later in find(folder):
        if int(later.name[5:]) > after:
            aside = later.with_name(f"{later.name}.rolled_back")
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """`state.json` of a verified checkpoint."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return state


def _files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
