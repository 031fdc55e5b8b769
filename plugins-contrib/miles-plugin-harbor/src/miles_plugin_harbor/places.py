"""Where a Harbor task's folders lie in a box that is not an image built for it.

A task thinks of `/app`, `/tests` and `/logs` at the root. In a sandbox without a root of its own
they lie below the box's folder, and what mentions them is rewritten. Nothing here imports Harbor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("app", "logs", "tests", "solution", "runtime")
_MENTION = re.compile(
    r"(?<![\w./$}~-])/(" + "|".join(FOLDERS) + r")(?=$|[/\s\"'`:;,)&|>]|\.(?:\s|$))", re.M
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The translation for one box."""

    root: str
    """What stands for `/`; empty leaves all paths as they are."""

    def at(self, path: str) -> str:
        """A path, below the root if it is one of a task's own folders."""
        first = path.lstrip("/").split("/", 1)[0]
        return f"{self.root}{path}" if path.startswith("/") and first in FOLDERS else path

    def text(self, said: str) -> str:
        """Text with every mention of a task's own folders translated."""
        return _MENTION.sub(lambda found: f"{self.root}{found[0]}", said) if self.root else said

    def file(self, data: bytes) -> bytes:
        """The same for a file that is text; other files stay as they are."""
        try:
            return self.text(data.decode()).encode()
        except UnicodeDecodeError:
            return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a Dockerfile asks for, as far as a box can do it without building an image."""

    workdir: str = "/app"
    """Where commands run."""
    copies: tuple[tuple[str, str], ...] = ()
    """Source below the task's `environment`, target in the box."""
    refused: tuple[str, ...] = ()
    """Instructions that need an image."""


def recipe(dockerfile: Path) -> Recipe:
    """Read a Dockerfile; one that is not there asks for nothing."""
    if not dockerfile.is_file():
        return Recipe()
    workdir, copies, refused = "", [], []
    text = re.sub(r"\\\s*\n", " ", dockerfile.read_text(encoding="utf-8"))
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" ")
        words = rest.split()
        if not name or name.startswith("#") or name.upper() in ("FROM", "LABEL", "MAINTAINER"):
            continue
        if name.upper() == "WORKDIR" and len(words) == 1:
            workdir = words[0] if words[0].startswith("/") else f"{workdir or '/'}/{words[0]}"
        elif name.upper() == "COPY" and len(words) == 2 and not words[0].startswith("--"):
            target = words[1]
            if not target.startswith("/"):
                target = f"{workdir or '/app'}/{target.removeprefix('./')}".rstrip("./")
            copies.append((words[0], target))
        else:
            refused.append(name.upper())
    return Recipe(workdir=workdir or "/app", copies=tuple(copies), refused=tuple(refused))
