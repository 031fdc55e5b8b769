"""Terminal-use coding tasks: a folder a task, a shell in the sandbox, and tests at the end.

Reading folders is `layout`, running tests `grading`; the tasks that ship are below `tasks`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from miles import (
    Box,
    ConfigError,
    Context,
    Message,
    Reply,
    SandboxError,
    Split,
    Step,
    Task,
    Tool,
    choices,
)
from miles_plugins.environment import functions
from miles_plugins.environment.terminal.grading import Verdict, grade
from miles_plugins.environment.terminal.layout import (
    Folder,
    find_folders,
    names,
    read_file,
    read_folder,
)
from miles_plugins.environment.terminal.places import Places

_WHERE = "environment terminal"
_SHIPPED = Path(__file__).parent / "tasks"
_SYSTEM = (
    "You work on a computer through the tool `shell`. Each command starts anew in the work "
    "directory; files stay. When the task is done, answer without calling the tool."
)
_log = logging.getLogger(__name__)


class Terminal:
    """Tasks done in a shell, graded by running their tests after the agent is done.

    A task is a folder with `instruction.md`, `task.toml`, starting `files/` and `tests/`; Harbor's
    layout, as of Terminal-Bench 2, is read as well. Twenty small tasks come with miles. The tests
    reach the box only when the agent has finished, and run in a fresh one.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which tasks, and how they are run."""

        tasks: str = ""
        """Folder of task folders; empty takes those that come with miles."""
        root: Literal["box", "image"] = "box"
        """Where paths such as `/app` lie: below the box's own directory, or, in sandboxes that
        start a task's image (`Task.data["image"]`), where they are."""
        unprepared: Literal["refuse", "skip"] = "refuse"
        """Tasks that need a prepared image, with `root=box`: refuse them all, or leave them out."""
        grading: Literal["auto", "fresh", "same"] = "auto"
        """Where tests run: in a fresh box, to which the work directory is copied, or in the
        agent's own. auto is fresh with `root=box` and same with `root=image`."""
        turns: int = 16
        """Replies an attempt may have; commands in the last one are not run any more."""
        system: str = _SYSTEM
        """The system message; empty for none."""
        heldout_fraction: float = 0.2
        """Share of the tasks held out, by a hash of their name."""
        max_state_mb: int = 64
        """Largest work directory that is copied for grading; a larger one is worth 0."""

    def __init__(self, config: Config, context: Context) -> None:
        if config.turns < 1 or config.max_state_mb < 1 or not 0 <= config.heldout_fraction < 1:
            raise ConfigError(
                f"{_WHERE}: turns is {config.turns}, max_state_mb {config.max_state_mb} and "
                f"heldout_fraction {config.heldout_fraction}; at least 1, at least 1, and 0 to "
                "below 1 are wanted"
            )
        self.config = config
        self._sandbox = context.sandbox
        root = Path(config.tasks).expanduser() if config.tasks else _SHIPPED
        found = [read_folder(path, root, _WHERE) for path in find_folders(root, _WHERE)]
        self.folders: Mapping[str, Folder] = {f.name: f for f in self._usable(found)}
        """Every task by name."""
        self.fresh = config.grading == "fresh" or (
            config.grading == "auto" and config.root == "box"
        )

    @classmethod
    def check(cls, config: Config, planned: Any) -> Sequence[str]:
        """It needs a sandbox."""
        if planned.specs["sandbox"] is not None or not planned.samples:
            return []
        return ["commands run in a sandbox and none is chosen; choose one, as in sandbox=process"]

    def _usable(self, found: Sequence[Folder]) -> Sequence[Folder]:
        if self.config.root == "image":
            return found
        bad = [f for f in found if f.prepared]
        if not bad:
            return found
        why = f"task {bad[0].name!r} needs a prepared image: {bad[0].prepared}"
        if self.config.unprepared == "refuse" or len(bad) == len(found):
            raise ConfigError(
                f"{_WHERE}: {why} ({len(bad)} of {len(found)} tasks do); choose root=image with a "
                "sandbox that starts images"
                + ("" if len(bad) == len(found) else ", or unprepared=skip")
            )
        _log.warning(
            "%s: left out %d of %d tasks, which need a prepared image: %s",
            _WHERE, len(bad), len(found), names(bad),
        )  # fmt: skip
        return [f for f in found if not f.prepared]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split, by name."""
        return [
            self._task(folder)
            for name, folder in self.folders.items()
            if self._heldout(name) == (split == "heldout")
        ]

    def _heldout(self, name: str) -> bool:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.config.heldout_fraction * 2**64

    def _task(self, folder: Folder) -> Task:
        user: Message = {"role": "user", "content": folder.instruction}
        system: Message = {"role": "system", "content": self.config.system}
        return Task(
            id=folder.name,
            prompt=(system, user) if self.config.system else (user,),
            data={key: value for key, value in asdict(folder.needs).items() if value},
        )

    def episode(self, task: Task, seed: int) -> TerminalEpisode:
        """One attempt."""
        folder = self.folders.get(task.id)
        if folder is None:
            raise ConfigError(
                f"{_WHERE}: there is no task {task.id!r}; {choices(task.id, self.folders)}"
            )
        return TerminalEpisode(self, task, folder)

    async def open(self, task: Task, folder: Folder) -> tuple[Box, Places]:
        """A box with the task's starting files. Raises `SandboxError`, and `EpisodeError` for files
        that cannot be read now."""
        if self._sandbox is None:
            raise SandboxError(f"{_WHERE}: no sandbox is chosen; choose one, as in sandbox=process")
        box: Box = await self._sandbox.open(task)
        try:
            places = await Places.find(box, folder, self.config.root)
            for to, source in folder.files.items():
                data, executable = read_file(source)
                await box.write(places.to_write(to), places.rewritten(data))
                if executable:
                    await box.exec(["chmod", "+x", places.to_write(to)])
        except BaseException:
            await box.close()
            raise
        return box, places


class TerminalEpisode:
    """One attempt at one task."""

    def __init__(self, environment: Terminal, task: Task, folder: Folder) -> None:
        self._environment = environment
        self._task = task
        self._folder = folder
        self._box: Box | None = None
        self._places: Places | None = None
        self._turns = self._calls = self._errors = 0
        self._deadline = float("inf")
        self._shell = functions.describe("shell", self._run, _WHERE)
        self.tools: tuple[Tool, ...] = (self._shell.schema,)
        """Offered in every turn."""

    async def reset(self) -> Sequence[Message]:
        """The instruction; the clock starts."""
        self._deadline = time.monotonic() + self._folder.agent_s
        if not self._folder.harbor:
            return self._task.prompt  # type: ignore[return-value]  # made here, of messages
        places = (await self._opened())[1]
        return [{**m, "content": places.rewritten_text(m["content"])} for m in self._task.prompt]

    async def step(self, reply: Reply) -> Step:
        """Run the commands of a reply; one without any ends the attempt."""
        self._turns += 1
        calls = reply.message.get("tool_calls") or ()
        self._calls += len(calls)
        left = self._deadline - time.monotonic()
        if not calls or self._turns >= self._environment.config.turns or left <= 0:
            return Step()
        return Step(messages=tuple([await self._called(asked) for asked in calls]), done=False)

    async def _called(self, asked: Mapping[str, Any]) -> Message:
        done = await functions.call(
            asked,
            {"shell": self._shell},
            box=self._agents_box,
            timeout_s=self._folder.command_s,
            max_output=self._folder.output_chars,
        )
        self._errors += done.failed
        return functions.told(asked, done)

    async def _run(self, command: str, *, box: Box) -> str:
        """Run a shell command in the work directory. Both streams and a non-zero exit code come
        back."""
        places = (await self._opened())[1]
        left = max(0.1, self._deadline - time.monotonic())
        seconds = min(self._folder.command_s, left)
        return await functions.shell_text(
            box, command, seconds, cwd=places.workdir, env=self._folder.env
        )

    async def _opened(self) -> tuple[Box, Places]:
        if self._box is None or self._places is None:
            self._box, self._places = await self._environment.open(self._task, self._folder)
        return self._box, self._places

    async def _agents_box(self) -> Box:
        return (await self._opened())[0]

    async def reward(self) -> tuple[float, Mapping[str, float]]:
        """What the tests say."""
        verdict = await self._grade()
        return verdict.reward, {
            "turns": float(self._turns),
            "tools/calls": float(self._calls),
            "tools/errors": float(self._errors),
            "tests/timed_out": float(verdict.timed_out),
            "tests/unusable": float(verdict.unusable),
        }

    async def _grade(self) -> Verdict:
        environment, folder = self._environment, self._folder
        box, places = await self._opened()
        if not environment.fresh:
            if (halt := getattr(box, "halt", None)) is not None:
                await halt()  # what the agent left running could still reach the tests
            return await grade(box, places, folder)
        limit = environment.config.max_state_mb * 2**20
        state = await places.pack(box, limit)
        await self.close()  # with whatever the agent left running
        if state is None:
            return Verdict(reward=0.0, timed_out=False, unusable=True)
        fresh, places = await environment.open(self._task, folder)
        try:
            if not await places.unpack(fresh, state):
                return Verdict(reward=0.0, timed_out=False, unusable=True)
            return await grade(fresh, places, folder)
        finally:
            await fresh.close()

    async def close(self) -> None:
        """Leave nothing behind."""
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()
