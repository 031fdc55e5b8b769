"""Harbor's tasks as an environment: folders are tasks, a trial is an attempt.

How a trial is made and read is `trials`'; nothing of Harbor is imported before one runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles import ConfigError, Context, EpisodeError, LazyTasks, Split, Task, Tools, Trajectory
from miles_plugin_harbor import trials

_WHERE = "environment harbor"
_OURS = Path(__file__).parent / "tasks"


class Harbor:
    """Harbor's tasks, agents and environments: each attempt is a trial, graded by the task's tests.

    The agent's model is a served session of the run. The place is a box of the run's sandbox or any
    environment of Harbor's, the agent one of ours that asks for shell commands or any of Harbor's.
    Needs Python 3.12.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which tasks, played by whom and where."""

        path: str = ""
        """Folder of Harbor tasks, or one task; empty takes two small ones that come along."""
        heldout_path: str = ""
        """Folder of held-out tasks; empty holds out the last `heldout` of `path`."""
        heldout: int = 1
        """Tasks of `path`, by name, that are held out when there is no folder of them."""
        agent: str = trials.SHELL
        """`shell` (ours), or the name of an agent of Harbor's, such as `terminus-2`."""
        agent_options: Mapping[str, Any] = field(default_factory=dict)
        """The agent's own keys; `shell` has turns and command_s."""
        provider: str = "openai"
        """What stands before the model's name for Harbor's agents."""
        where: str = trials.SANDBOX
        """`sandbox` (the run's own), or an environment of Harbor's, such as `docker`."""
        where_options: Mapping[str, Any] = field(default_factory=dict)
        """That environment's own keys."""
        rooted: bool = False
        """The sandbox's boxes have a root of their own: `/app` is left where it is."""
        reward: str = "reward"
        """Which of the rewards counts, when the tests give several."""
        keep: bool = False
        """Leave what Harbor writes of each trial, in the run's `harbor/`."""

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        self._sandbox = context.sandbox
        self._trials = context.directory / "harbor"
        if find_spec("harbor") is None:
            raise ConfigError(
                f"{_WHERE}: the package harbor is not installed, which needs Python 3.12 or later "
                "(pip install harbor)"
            )
        if config.where == trials.SANDBOX and context.sandbox is None:
            raise ConfigError(
                f"{_WHERE}: no sandbox was chosen; add sandbox=process, or set environment.where "
                "to one of Harbor's environments, such as docker"
            )
        self._folders = folders(config)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Folders of a split, by name."""
        return LazyTasks(self._folders[split], partial(_task, split))

    async def play(self, task: Task, seed: int, tools: Tools) -> Trajectory:
        """One trial."""
        if tools.serve is None:
            raise EpisodeError(f"{_WHERE}: this run serves no sessions to agents, which it needs")
        config = self.config
        order = trials.Order(
            key=tools.id,
            task=task,
            folder=Path(task.data["folder"]),
            trials=self._trials,
            agent=config.agent,
            agent_options=config.agent_options,
            provider=config.provider,
            where=config.where,
            where_options=config.where_options,
            rooted=config.rooted,
            keep=config.keep,
        )
        sandbox = tools.sandbox or self._sandbox if config.where == trials.SANDBOX else None
        async with tools.serve(tools.id) as session:
            result = await trials.run(order, session, sandbox)
            reward, metrics = trials.worth(result, config.reward)
            return session.trajectory(reward=reward, metrics=metrics)


def folders(config: Harbor.Config) -> dict[Split, list[Path]]:
    """Task folders of both splits, which share none. Raises `ConfigError` when there are none."""
    train = _in(Path(config.path).expanduser() if config.path else _OURS)
    if config.heldout_path:
        return {"train": train, "heldout": _in(Path(config.heldout_path).expanduser())}
    size = len(train) - config.heldout
    if config.heldout < 0 or size < 1:
        raise ConfigError(
            f"{_WHERE}: {len(train)} tasks, of which environment.heldout ({config.heldout}) leaves "
            "none to train on"
        )
    return {"train": train[:size], "heldout": train[size:]}


def _in(path: Path) -> list[Path]:
    found = [path] if (path / "task.toml").is_file() else sorted(path.glob("*/"))
    found = [p.resolve() for p in found if (p / "task.toml").is_file()]
    if not found:
        raise ConfigError(f"{_WHERE}: {path} is no Harbor task (task.toml), and holds none")
    for folder in found:
        if not (folder / "instruction.md").is_file():
            raise ConfigError(
                f"{_WHERE}: {folder} has no instruction.md; tasks of several steps are not read"
            )
    return found


def _task(split: Split, folder: Path) -> Task:
    told = (folder / "instruction.md").read_text(encoding="utf-8")
    return Task(
        id=f"harbor-{split}-{folder.name}",
        prompt=({"role": "user", "content": told},),
        data={"folder": str(folder)},
    )
