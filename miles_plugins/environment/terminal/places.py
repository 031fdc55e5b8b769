"""Where a task's absolute paths lie in a box, and how a work directory moves from box to box.

Tasks think of `/app`, `/tests` and `/logs`. In a box whose root is not theirs, these lie below the
box's own directory, and texts that name them are rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from miles import Box, SandboxError
from miles_plugins.environment.terminal.layout import Folder

__all__ = ["Places"]

_SECONDS = 60.0  # for packing, unpacking and making folders
_ARCHIVE = "miles-state.tar.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of one task in one box."""

    base: str
    """The box's own directory; empty when the root is the task's."""
    workdir: str
    """The agent's directory, absolute."""
    moved: re.Pattern[str] | None
    """Matches a moved directory where a text names it; None when texts stay as they are."""

    @classmethod
    async def find(cls, box: Box, folder: Folder, root: Literal["box", "image"]) -> Places:
        """The places, with the directories made. Raises `SandboxError`."""
        base = ""
        if root == "box":
            base = (await _do(box, "pwd")).rstrip("\n").rstrip("/")
        places = cls(
            base=base,
            workdir=base + folder.workdir,
            moved=_pattern(folder) if base and folder.harbor else None,
        )
        wanted = [places.workdir, places.at("/logs/verifier")]
        await _do(box, "mkdir -p " + " ".join(map(_quoted, wanted)))
        return places

    def at(self, path: str) -> str:
        """A task's path as an absolute one of the box; a relative one is below the work
        directory."""
        return f"{self.base}{path}" if path.startswith("/") else f"{self.workdir}/{path}"

    def to_write(self, path: str) -> str:
        """The same as `Box.write` and `Box.read` take it: relative to the box's directory."""
        return self.at(path).removeprefix(f"{self.base}/") if self.base else self.at(path)

    def rewritten_text(self, text: str) -> str:
        """A text with its moved directories renamed."""
        return self.moved.sub(lambda m: f"{self.base}{m[0]}", text) if self.moved else text

    def rewritten(self, data: bytes) -> bytes:
        """The same for a file, unless it is no text."""
        if self.moved is None:
            return data
        try:
            return self.rewritten_text(data.decode()).encode()
        except UnicodeDecodeError:
            return data

    async def pack(self, box: Box, limit: int) -> bytes | None:
        """The work directory as an archive; None when it is larger than `limit` bytes or cannot be
        packed."""
        # what the agent made unreadable for itself is left out, and tar says so with exit code 2
        command = (
            f"tar -czf - -C {_quoted(self.workdir)} . 2>/dev/null | head -c {limit + 1}"
            f" > {_ARCHIVE}; wc -c < {_ARCHIVE}"
        )
        done = await box.exec(command, cwd=self.base or "/", timeout=_SECONDS)
        if done.exit_code or done.timed_out or int(done.stdout or limit + 1) > limit:
            return None
        return await box.read(self.to_write(f"/{_ARCHIVE}"))

    async def unpack(self, box: Box, state: bytes) -> bool:
        """Replace the work directory's content; whether that worked."""
        await box.write(self.to_write(f"/{_ARCHIVE}"), state)
        where = _quoted(self.workdir)
        command = (
            f"find {where} -mindepth 1 -delete && tar -xzf {_ARCHIVE} -C {where} "
            f"--no-same-owner && rm -f {_ARCHIVE}"
        )
        done = await box.exec(command, cwd=self.base or "/", timeout=_SECONDS)
        return done.exit_code == 0 and not done.timed_out


def _pattern(folder: Folder) -> re.Pattern[str]:
    tops = {"app", "tests", "logs", "solution", PurePosixPath(folder.workdir).parts[1]}
    tops |= {PurePosixPath(to).parts[1] for to in folder.files if to.startswith("/")}
    words = "|".join(re.escape(top) for top in sorted(tops))
    return re.compile(rf"(?<![\w.\-/~])/(?:{words})(?![\w.\-])")


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


async def _do(box: Box, command: str, env: Mapping[str, str] | None = None) -> str:
    done = await box.exec(command, timeout=_SECONDS, env=env)
    if done.exit_code or done.timed_out:
        raise SandboxError(
            f"environment terminal: {command!r} ended with {done.exit_code} in the box: "
            f"{done.stderr.strip()[-300:]}"
        )
    return done.stdout
