"""A sandbox of the run as the place where Harbor's trial happens: Harbor's `BaseEnvironment` over a
`Box`.

Harbor imports this module by its path and builds the class itself; the sandbox waits under a key in
`WAITING`. What a Dockerfile would build is done here as far as it needs no image.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from miles import Box, Sandbox, SandboxError, Task
from miles_plugin_harbor.places import Places, recipe

PATH = f"{__name__}:SandboxEnvironment"
"""How a trial's configuration names the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What a trial about to start will need."""

    sandbox: Sandbox
    """Where to open a box."""
    task: Task
    """For which task."""
    rooted: bool
    """The box has a root of its own, so that paths stay as they are."""


WAITING: dict[str, Waiting] = {}
"""By the key that the trial's configuration carries, in this process."""


class SandboxEnvironment(BaseEnvironment):
    """One box of the run's sandbox."""

    def __init__(self, *args: Any, box: str, **kwargs: Any) -> None:
        self._waiting = WAITING[box]
        self._box: Box | None = None
        self._places = Places(root="")
        super().__init__(*args, **kwargs)
        self._recipe = recipe(self.environment_dir / "Dockerfile")

    @staticmethod
    def type() -> str:
        """Its name in results."""
        return "miles"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """None of Harbor's extras."""
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        if refused := recipe(self.environment_dir / "Dockerfile").refused:
            raise ValueError(
                f"its Dockerfile has {', '.join(sorted(set(refused)))}, which needs an image; "
                "set environment.where to docker or another of Harbor's environments"
            )

    async def start(self, force_build: bool) -> None:
        """Open the box, make Harbor's folders, copy what the Dockerfile copies."""
        self._box = await self._waiting.sandbox.open(self._waiting.task)
        if not self._waiting.rooted:
            home = (await self._box.exec("pwd", timeout=60.0)).stdout.strip()
            self._places = Places(root=home)
        wanted = [self._recipe.workdir, "/tests", "/solution"]
        wanted += ["/logs/agent", "/logs/verifier", "/logs/artifacts"]
        made = await self.exec("mkdir -p " + " ".join(wanted), cwd="")
        if made.return_code:
            raise SandboxError(f"the box cannot hold a task's folders: {made.stderr}")
        for source, target in self._recipe.copies:
            if source in (".", "./"):
                await self._upload(self.environment_dir, target, skip=("Dockerfile",))
            elif (path := self.environment_dir / source).is_dir():
                await self.upload_dir(path, target)
            else:
                whole = f"{target}{path.name}" if target.endswith("/") else target
                await self.upload_file(path, whole)

    async def stop(self, delete: bool) -> None:
        """Close the box, whether or not it should be kept: a run leaves nothing behind."""
        if self._box is not None:
            await self._box.close()
            self._box = None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a shell line as the box's own user, whatever user is asked for."""
        places = self._places
        where = self._recipe.workdir if cwd is None else cwd
        found = await self._opened().exec(
            ["bash", "-c", places.text(command)],
            cwd=places.at(where) or None,
            env={key: places.text(value) for key, value in (env or {}).items()},
            timeout=timeout_sec,
        )
        if found.timed_out:
            raise RuntimeError(f"the command took longer than {timeout_sec} s: {command[:200]}")
        return ExecResult(stdout=found.stdout, stderr=found.stderr, return_code=found.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Write a file into the box."""
        data = await asyncio.to_thread(Path(source_path).read_bytes)
        await self.exec(f"mkdir -p {shlex.quote(str(Path(target_path).parent))}", cwd="")
        await self._opened().write(self._places.at(target_path), self._places.file(data))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Write a folder's files into the box."""
        await self._upload(Path(source_dir), target_dir)

    async def _upload(self, folder: Path, target: str, *, skip: tuple[str, ...] = ()) -> None:
        for path in await asyncio.to_thread(_files, folder):
            if (name := path.relative_to(folder).as_posix()) not in skip:
                await self.upload_file(path, f"{target.rstrip('/')}/{name}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Read a file from the box."""
        data = await self._opened().read(self._places.at(source_path))
        await asyncio.to_thread(_keep, Path(target_path), data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Read a folder's files from the box; one that is not there is empty."""
        where = self._places.at(source_dir)
        listed = await self._opened().exec(["find", where, "-type", "f"], timeout=60.0)
        for line in listed.stdout.splitlines():
            name = line.removeprefix(where).lstrip("/")
            with contextlib.suppress(SandboxError):  # gone since
                data = await self._opened().read(line)
                await asyncio.to_thread(_keep, Path(target_dir) / name, data)

    def _opened(self) -> Box:
        if self._box is None:
            raise SandboxError("the box of this trial is not open")
        return self._box


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _keep(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
