"""A run's directory: made once, locked while in use, and found again to resume.

`config.json` holds what the run was asked for and what that resolved to.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from miles import checkpoint
from miles.errors import CheckpointError, ConfigError
from miles.settings import Settings

__all__ = ["Directory", "differences", "recorded"]

_MAY_CHANGE = (
    "steps", "run", "resume", "tracker", "checkpoint_every", "keep_checkpoints", "eval_every",
    "evaluator", "starved_after_s", "silent_after_s", "step_timeout_s", "publish_timeout_s",
    "worker_timeout_s", "episode_timeout_s", "interrupt_grace_s", "max_restarts", "runtime",
    "stages", "experiment",
)  # fmt: skip
"""Top-level keys that cannot change what is learned from the same data, so a resume may set them
anew."""


class Directory:
    """One run's directory, held by this process until `close`."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, settings: Settings, *, stem: str) -> Directory:
        """A new one; without `run.name` it is called by `stem`, date and time. Raises `ConfigError`
        when it already holds a run."""
        parent = path = Path(settings.run.dir).expanduser()
        try:
            if settings.run.name:
                (path := parent / settings.run.name).mkdir(parents=True, exist_ok=True)
            else:
                path = _fresh(parent, stem)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot create {path}: {error.strerror}") from None
        found = cls._locked(path)
        if (path / "config.json").exists():
            found.close()
            raise ConfigError(
                f"run.name: {path} already holds a run; continue it with resume={path}, "
                "or choose another run.name"
            )
        return found

    @classmethod
    def reopen(cls, path: Path) -> Directory:
        """An existing one, to resume."""
        return cls._locked(path)

    @classmethod
    def _locked(cls, path: Path) -> Directory:
        lock = (path / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                f"run.name: {path.resolve()} is in use by another run (process {owner}); "
                "wait for it, or choose another run.name"
            ) from None
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"run.dir: {path.resolve()} cannot be locked ({error.strerror}), so two runs could "
                "write there; choose a file system with flock"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        return cls(path.resolve(), lock)

    def record(self, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Write `config.json`, `config.yaml` (for people) and `plugins.json`."""
        from omegaconf import OmegaConf

        self._write("config.json", json.dumps(config, indent=1))
        self._write(
            "config.yaml", OmegaConf.to_yaml(OmegaConf.create(json.loads(json.dumps(config))))
        )
        self._write("plugins.json", json.dumps(provenance, indent=1))

    def _write(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(text)
        partial.rename(self.path / name)

    def close(self) -> None:
        """Let others have it; safe to call twice."""
        self._lock.close()


def _fresh(parent: Path, stem: str) -> Path:
    """A directory that nobody else has, however many start in this second."""
    base = f"{stem.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = parent / base, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = parent / f"{base}-{number}"
        else:
            return path


def recorded(resume: str, *, runs: str | None = None) -> tuple[Path, Path, dict[str, Any]]:
    """(run directory, checkpoint, config.json) that `resume` means; the checkpoint is verified.
    Raises `ConfigError` when there is none, with those in the folder `runs` that may be meant, and
    `CheckpointError` for a damaged one."""
    folder = None if runs is None else Path(runs).expanduser()
    chosen = checkpoint.newest(Path(resume).expanduser(), runs=folder)
    checkpoint.verify(chosen)
    root = chosen.resolve().parent.parent
    try:
        config: dict[str, Any] = json.loads((chosen / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {chosen}: config.json cannot be read: {error}") from None
    return root, chosen, config


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines `stage.key: old -> new` for every value that a resume may not change."""
    stages = {*old["stages"], *new["stages"]}
    return [
        line
        for stage in sorted(stages)
        for line in _compare(
            stage, old["stages"].get(stage, {}), new["stages"].get(stage, {}), top=True
        )
    ]


def _compare(where: str, old: Any, new: Any, *, top: bool = False) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            if not (top and key in _MAY_CHANGE):
                yield from _compare(f"{where}.{key}", old.get(key), new.get(key))
    elif _plain(old) != _plain(new):
        yield f"{where}: {old} -> {new}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
