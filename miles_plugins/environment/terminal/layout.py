"""Task folders of the terminal environment: miles' own layout, and Harbor's (Terminal-Bench 2).

It reads files and says what is wrong with them; nothing is run here.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from miles import ConfigError, EpisodeError

__all__ = ["Folder", "Needs", "find_folders", "read_file", "read_folder", "test_files"]

_DEPTH = 6  # folders below the given one that are looked into
_PREPARES = {"RUN", "ADD", "USER", "VOLUME", "SHELL", "ONBUILD"}
"""Instructions of a Dockerfile whose effect only a built image has; of these, what runs a command
when a container starts does not matter to a task."""
_HARMLESS = {
    "ENTRYPOINT",
    "CMD",
    "HEALTHCHECK",
    "LABEL",
    "EXPOSE",
    "MAINTAINER",
    "ARG",
    "STOPSIGNAL",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a task asks of its sandbox, as `Task.data` carries it."""

    image: str = ""
    """Container image it starts from; empty takes whatever the sandbox has."""
    cpus: float = 0.0
    """Cores; 0 is not said."""
    memory_mb: float = 0.0
    """Memory; 0 is not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """One task, read."""

    name: str
    """Its folder's path below the given one."""
    path: Path
    """The folder."""
    harbor: bool
    """It has Harbor's layout: absolute paths, and a reward that its tests write."""
    instruction: str
    """What the agent is told."""
    files: Mapping[str, Path]
    """Starting files: where they lie in the box, relative to the work directory or absolute."""
    workdir: str
    """The agent's directory, as the task thinks of it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the agent's commands."""
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the tests."""
    agent_s: float = 600.0
    """Seconds the agent may take in all."""
    verifier_s: float = 120.0
    """Seconds the tests may take."""
    command_s: float = 60.0
    """Seconds one command of the agent may take."""
    output_chars: int = 8000
    """Characters of a command's output that the agent is shown."""
    needs: Needs = field(default_factory=Needs)
    """What it asks of the sandbox."""
    prepared: str = ""
    """Why it needs a prepared image; empty when it does not."""


def find_folders(root: Path, where: str) -> list[Path]:
    """Every folder with a `task.toml`, sorted by path. Raises `ConfigError` when there is none."""
    if not root.is_dir():
        raise ConfigError(f"{where}: tasks: there is no folder {str(root)!r}")
    found = []
    todo = [(root, 0)]
    while todo:
        folder, depth = todo.pop()
        if (folder / "task.toml").is_file():
            found.append(folder)
        elif depth < _DEPTH:
            inside = (p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
            todo += [(p, depth + 1) for p in inside if not p.is_symlink()]
    if not found:
        raise ConfigError(f"{where}: no task.toml below {root}")
    return sorted(found)


def read_folder(path: Path, root: Path, where: str) -> Folder:
    """One task. Raises `ConfigError` naming the file that is missing or wrong."""
    name = str(path.relative_to(root)) if path != root else path.name
    place = f"{where}: task {name!r}"
    try:
        settings = tomllib.loads((path / "task.toml").read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: task.toml: {error}") from error
    instruction = path / "instruction.md"
    if not instruction.is_file():
        raise ConfigError(f"{place}: there is no instruction.md")
    entry = [f for f in ("test.sh", "check.py") if (path / "tests" / f).is_file()]
    if not entry:
        raise ConfigError(f"{place}: there is neither tests/test.sh nor tests/check.py")
    harbor = (path / "environment").is_dir()
    started = _harbor_start(path, settings, place) if harbor else _own_start(path)
    limits = settings.get("limits", {})
    return Folder(
        name=name,
        path=path,
        harbor=harbor,
        instruction=_without_canary(instruction.read_text()),
        verifier_env=_words(settings.get("verifier", {}).get("env", {}), f"{place}: verifier.env"),
        agent_s=_seconds(settings, "agent", "timeout_sec", 600.0, place),
        verifier_s=_seconds(settings, "verifier", "timeout_sec", 120.0, place),
        command_s=_seconds(settings, "limits", "command_sec", 60.0, place),
        output_chars=int(limits.get("output_chars", 8000)),
        **started,
    )


def test_files(folder: Folder) -> dict[str, bytes]:
    """The tests by their path below the tests' directory. Raises `EpisodeError`."""
    root = folder.path / "tests"
    return {str(p.relative_to(root)): read_file(p)[0] for p in _files(root)}


def read_file(path: Path) -> tuple[bytes, bool]:
    """A file of a task, and whether it is a program. Raises `EpisodeError` when it cannot be read:
    tasks were read before, so this is of the moment, as when no descriptor is left."""
    try:
        return path.read_bytes(), bool(path.stat().st_mode & 0o100)
    except OSError as error:
        raise EpisodeError(f"environment terminal: cannot read {path}: {error}") from error


def _files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _own_start(path: Path) -> dict[str, Any]:
    root = path / "files"
    files = {str(p.relative_to(root)): p for p in _files(root)} if root.is_dir() else {}
    return {"files": files, "workdir": "/app"}


def _seconds(
    settings: Mapping[str, Any], section: str, key: str, default: float, place: str
) -> float:
    value = settings.get(section, {}).get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{place}: {section}.{key} is {value!r}; seconds above 0 are wanted")
    return float(value)


def _words(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {value!r}, not a table")
    return {str(k): str(v) for k, v in value.items()}


def _without_canary(text: str) -> str:
    """The instruction, without leading lines that only mark a benchmark for crawlers."""
    lines = text.split("\n")
    while lines and re.match(r"\s*(<!--|#).*canary", lines[0], re.IGNORECASE):
        lines.pop(0)
    return "\n".join(lines).strip()


# ---------------------------------------------------------------- Harbor


def _harbor_start(path: Path, settings: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Where a task of Harbor begins: `docker_image`, or as far as its Dockerfile only copies."""
    environment = settings.get("environment", {})
    image = str(environment.get("docker_image") or "")
    needs = {
        "cpus": float(environment.get("cpus") or 0),
        "memory_mb": float(environment.get("memory_mb") or 0),
    }
    dockerfile = path / "environment" / "Dockerfile"
    compose = path / "environment" / "docker-compose.yaml"
    workdir, files, env, why = "/app", {}, {}, ""
    if dockerfile.is_file():
        workdir, files, env, start, why = _dockerfile(dockerfile, place)
        image = image or start
    if compose.is_file():
        why = "it has several services (docker-compose.yaml)"
    return {
        "files": files,
        "workdir": workdir,
        "env": env | _words(environment.get("env", {}), f"{place}: environment.env"),
        "needs": Needs(image=image, **needs),
        "prepared": why,
    }


def _dockerfile(path: Path, place: str) -> tuple[str, dict[str, Path], dict[str, str], str, str]:
    """Work directory, files by destination, environment, first image, and what cannot be done
    without building it."""
    workdir, image, why = "/", "", ""
    files: dict[str, Path] = {}
    env: dict[str, str] = {}
    for word, rest in _instructions(path.read_text()):
        if word == "FROM":
            image = rest.split()[0]
        elif word == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / rest.strip().strip("\"'"))
        elif word == "COPY":
            copied = _copy(path.parent, rest, workdir)
            files.update(copied or {})
            why = why or ("" if copied is not None else f"its Dockerfile has COPY {rest}")
        elif word == "ENV":
            env.update(_env(rest))
        elif word in _PREPARES:
            why = why or f"its Dockerfile has {word} {rest}"
        elif word not in _HARMLESS:
            raise ConfigError(f"{place}: environment/Dockerfile: unknown instruction {word!r}")
    return workdir if workdir != "/" else "/app", files, env, image, why


def _instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)^[ \t]*#.*\n?", "", text))
    found = []
    for line in joined.split("\n"):
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            found.append((word.upper(), rest.strip()))
    return found


def _copy(context: Path, rest: str, workdir: str) -> dict[str, Path] | None:
    """Files of a COPY by destination; None for one that no plain copy does."""
    try:
        parts = shlex.split(rest)
    except ValueError:
        return None
    if len(parts) < 2 or any(p.startswith(("--", "[")) for p in parts):
        return None
    *sources, to = parts
    target = PurePosixPath(workdir) / to
    into = to.endswith(("/", ".")) or len(sources) > 1
    found: dict[str, Path] = {}
    for source in sources:
        matches = (
            sorted(context.glob(source.lstrip("/"))) if source not in (".", "./") else [context]
        )
        if not matches:
            return None
        for match in matches:
            if match.is_dir():
                found |= {str(target / p.relative_to(match)): p for p in _files(match)}
            else:
                found[str(target / match.name if into or len(matches) > 1 else target)] = match
    return found


def _env(rest: str) -> dict[str, str]:
    if "=" not in rest.split(" ", 1)[0]:
        key, _, value = rest.partition(" ")
        return {key: value.strip()}
    return dict(part.split("=", 1) for part in shlex.split(rest) if "=" in part)


def names(folders: Sequence[Folder]) -> str:
    """A few names, for messages."""
    shown = ", ".join(f.name for f in folders[:5])
    return shown + (f" and {len(folders) - 5} more" if len(folders) > 5 else "")
