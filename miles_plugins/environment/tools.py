"""Multi-turn tool use: the model calls functions, sees what comes of it, and answers.

What a tool is and how it is called is `functions`; tasks are `calculator`'s or a file's.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    check_reward,
)
from miles_plugins.environment import functions
from miles_plugins.environment.calculator import Calculator, calculator_tasks
from miles_plugins.environment.lines import read_tasks
from miles_plugins.environment.scoring import Scorer

_WHERE = "environment tools"
_log = logging.getLogger(__name__)

# markup of a call that was not well-formed enough to be parsed as one, in whatever family's words
_BROKEN = re.compile(r"<[/|\uff5c]*tool[_\u2581]call|\[TOOL_CALLS\]")


class Tools:
    """Tool use over several turns: Python functions, and `python` and `shell` inside the sandbox.

    An attempt ends with the first reply that calls nothing: its text is scored against the task's
    answer. Errors of tools are told to the model and counted. Functions come from plugins by
    `miles_tools`; tasks are made (`calculator`) or read from JSON Lines with `prompt`, `answer`
    and, for supervised training, `solution`.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which tasks, which tools, and how answers are scored."""

        tasks: str = "calculator"
        """`calculator`, made from the seed, or a JSON Lines file."""
        calculator: Calculator = field(default_factory=Calculator)
        """What the calculator's problems are."""
        tools: tuple[str, ...] = ("python",)
        """Names of the functions offered: `python`, `shell`, or a plugin's."""
        turns: int = 4
        """Replies an attempt may have; calls in the last one are not made any more."""
        tool_timeout_s: float = 10.0
        """Seconds one call may take."""
        max_output: int = 4000
        """Characters of a result that the model is shown."""
        interpreter: tuple[str, ...] = ("python3",)
        """Command of the `python` tool's interpreter, fresh for each call."""
        system: str = ""
        """A system message before every prompt that has none."""
        reward: str = "exact"
        """Name of the reward that compares the last reply with the answer."""
        pattern: str = ""
        """For `regex`: the pattern."""
        reward_timeout_s: float = 10.0
        """Seconds one reward may take."""
        reward_processes: int = 1
        """Processes that compute slow rewards (`math`, `regex`); threads for a plugin's."""
        error_cost: float = 0.0
        """Taken from the reward for each call that went wrong."""
        heldout_fraction: float = 0.1
        """Share of a file's tasks that is never trained on."""

    def __init__(self, config: Config, context: Context) -> None:
        _check(config)
        self.config = config
        self._seed = context.seed
        self._sandbox = context.sandbox
        built_in = functions.built_in(config.interpreter, config.tool_timeout_s)
        chosen = functions.select(config.tools, context.tools, _WHERE)
        self._functions = {
            name: functions.describe(name, built_in.get(name, chosen[name].run), _WHERE)
            for name in chosen
        }
        self.needs_sandbox = tuple(n for n, f in self._functions.items() if f.needs_box)
        self._score = Scorer(
            environment="tools",
            reward=config.reward,
            pattern=config.pattern,
            timeout_s=config.reward_timeout_s,
            processes=config.reward_processes,
            offered=context.rewards,
        )
        self._splits: dict[Split, Sequence[Task]] = {}
        self._announced = False

    @classmethod
    def check(cls, config: Config, planned: Any) -> Sequence[str]:
        """Tools that run in a sandbox need one."""
        built = planned.built.get("environment")
        if built is None or not planned.samples or planned.specs["sandbox"] is not None:
            return []
        return [
            f"tool {name!r} runs in a sandbox and none is chosen; choose one, as in sandbox=process"
            for name in built.needs_sandbox
        ]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split. Raises `ConfigError` for a file that cannot be used."""
        if split not in self._splits:
            self._splits.update(self._read(split))
        return self._splits[split]

    def _read(self, split: Split) -> Mapping[Split, Sequence[Task]]:
        config = self.config
        if config.tasks == "calculator":
            made = calculator_tasks(config.calculator, seed=self._seed, split=split, where=_WHERE)
            return {split: made}
        return read_tasks(
            config.tasks,
            heldout_fraction=config.heldout_fraction,
            system=config.system,
            where=_WHERE,
        )

    def episode(self, task: Task, seed: int) -> ToolEpisode:
        """One attempt."""
        return ToolEpisode(self, task)

    def announce_recorded(self) -> None:
        """Say, once, that demonstrations are not run."""
        if not self._announced:
            self._announced = True
            _log.warning(
                "%s: demonstrated tool calls are answered with the recorded results of the task's "
                "solution; no tool runs for them",
                _WHERE,
            )

    async def open(self, task: Task) -> Box:
        """A box for one attempt. Raises `SandboxError`."""
        if self._sandbox is None:
            raise SandboxError(f"{_WHERE}: no sandbox is chosen; choose one, as in sandbox=process")
        box: Box = await self._sandbox.open(task)
        return box

    async def call(self, asked: Mapping[str, Any], episode: ToolEpisode) -> functions.Called:
        """Make one call for an attempt."""
        return await functions.call(
            asked,
            self._functions,
            box=episode.box,
            timeout_s=self.config.tool_timeout_s,
            max_output=self.config.max_output,
        )

    @property
    def schemas(self) -> tuple[Tool, ...]:
        """What the model is told of the tools."""
        return tuple(f.schema for f in self._functions.values())

    async def score(self, task: Task, text: str) -> tuple[float, Mapping[str, float]]:
        """What an answer is worth."""
        value = self._score(task, text)
        return check_reward(await value if inspect.isawaitable(value) else value, "tools")


class ToolEpisode:
    """One attempt at one task."""

    def __init__(self, environment: Tools, task: Task) -> None:
        self._environment = environment
        self._task = task
        self._box: Box | None = None
        self._answer: str | None = None
        self._turns = self._calls = self._errors = 0
        self.tools: tuple[Tool, ...] = environment.schemas
        """Offered in every turn."""

    async def reset(self) -> str | Sequence[Message]:
        """The task's prompt, after the system message if there is one."""
        prompt, system = self._task.prompt, self._environment.config.system
        if isinstance(prompt, str) or not system or prompt[0]["role"] == "system":
            return prompt
        return ({"role": "system", "content": system}, *prompt)

    async def step(self, reply: Reply) -> Step:
        """Make the calls of a reply; one without any is the answer."""
        self._turns += 1
        calls = reply.message.get("tool_calls") or ()
        if not calls:
            return self._without_calls(reply)
        self._calls += len(calls)
        if self._turns >= self._environment.config.turns:
            return Step()
        if reply.demonstrated and (recorded := self._recorded()):
            self._environment.announce_recorded()
            return Step(messages=recorded, done=False)
        return Step(messages=tuple([await self._called(asked) for asked in calls]), done=False)

    def _without_calls(self, reply: Reply) -> Step:
        broken = reply.finish != "length" and _BROKEN.search(reply.text) is not None
        if not broken or reply.demonstrated:
            self._answer = str(reply.message.get("content") or "")
            return Step()
        self._calls += 1
        self._errors += 1
        if self._turns >= self._environment.config.turns:
            return Step()
        told = "error: that is no well-formed tool call"
        return Step(messages=({"role": "user", "content": told},), done=False)

    async def _called(self, asked: Mapping[str, Any]) -> Message:
        done = await self._environment.call(asked, self)
        self._errors += done.failed
        return functions.told(asked, done)

    def _recorded(self) -> tuple[Message, ...]:
        """What the solution has between the assistant's message that was just replayed and the
        next."""
        solution = self._task.solution
        if not isinstance(solution, Sequence) or isinstance(solution, str):
            return ()
        said = [i for i, m in enumerate(solution) if m["role"] == "assistant"]
        if self._turns > len(said):
            return ()
        start = said[self._turns - 1] + 1
        stop = said[self._turns] if self._turns < len(said) else len(solution)
        return tuple(solution[start:stop])

    async def box(self) -> Box:
        """The attempt's sandbox, opened when it is first used."""
        if self._box is None:
            self._box = await self._environment.open(self._task)
        return self._box

    async def reward(self) -> tuple[float, Mapping[str, float]]:
        """What the answer is worth, 0 when there is none, less what errors cost."""
        worth: float = 0.0
        metrics: Mapping[str, float] = {}
        if self._answer is not None:
            worth, metrics = await self._environment.score(self._task, self._answer)
        counted = {
            "turns": float(self._turns),
            "tools/calls": float(self._calls),
            "tools/errors": float(self._errors),
            "answered": float(self._answer is not None),
        }
        return worth - self._environment.config.error_cost * self._errors, {**metrics, **counted}

    async def close(self) -> None:
        """Leave nothing behind."""
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()


def _check(config: Tools.Config) -> None:
    if config.turns < 1:
        raise ConfigError(f"{_WHERE}: turns is {config.turns}; at least 1 is wanted")
    if config.tool_timeout_s <= 0 or config.max_output < 1:
        raise ConfigError(
            f"{_WHERE}: tool_timeout_s is {config.tool_timeout_s} and max_output "
            f"{config.max_output}; both must be above 0"
        )
    if not config.interpreter:
        raise ConfigError(f"{_WHERE}: interpreter is empty; a command is wanted")
