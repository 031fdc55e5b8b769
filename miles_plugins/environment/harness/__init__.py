"""Black-box agents: a command or a function that talks to the model over HTTP, as to any other.

Processes are `commands`' and `launcher`'s business, sessions and tokens those of `Tools.serve`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles import (
    ConfigError,
    Context,
    EpisodeError,
    EpisodeTimeout,
    Message,
    MilesError,
    ServedSession,
    Split,
    Task,
    Tools,
    Trajectory,
    check_reward,
    choices,
)
from miles_plugins.environment import functions
from miles_plugins.environment.calculator import Calculator, calculator_tasks
from miles_plugins.environment.harness.commands import Ended, run_command
from miles_plugins.environment.harness.folders import attempt_folder
from miles_plugins.environment.lines import read_tasks
from miles_plugins.environment.scoring import Scorer

_WHERE = "environment harness"
_EXIT_CODE = "exit_code"
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
_CALL = 16  # tokens that a tool's call takes at least, in any markup
_TOLD = 1500  # characters of an agent's standard error in messages
_log = logging.getLogger(__name__)

Outcome = tuple[float | str, Mapping[str, float]]
"""A reward, or a text to grade, with metrics."""


class Harness:
    """A black-box agent plays each attempt: it is given a base URL, a key, a model's name and the
    task, and may speak the chat completions, responses or messages API.

    The agent is `command`, or an async function that a plugin registered with `miles_agents`:
    `await agent(task, base_url=..., api_key=..., model=...)`. A function returns the reward, or a
    text to grade; a command's reward is its exit code or its graded output. However an attempt
    ends, the agent is stopped with everything it started.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which agent, which tasks, and how its answers are scored."""

        agent: str = ""
        """Name of a registered function."""
        command: tuple[str, ...] = ()
        """A program with its arguments, instead of `agent`. `{base_url}`, `{model}` and
        `{task_file}` are filled in. All of it is in `MILES_BASE_URL`, `MILES_MODEL` and
        `MILES_TASK_FILE` too, with the key in `MILES_API_KEY`, and in the variables of the OpenAI
        and Anthropic clients; the task is on standard input as well."""
        env: Mapping[str, str] = field(default_factory=dict)
        """More environment for the command, where `{api_key}` is filled in as well."""
        pass_env: tuple[str, ...] = _PASSED
        """Variables that it inherits; no others."""
        cwd: str = ""
        """Its directory; empty gives each attempt an empty one."""
        timeout_s: float = 120.0
        """Seconds one attempt may take."""
        tasks: str = "calculator"
        """`calculator`, made from the seed, or a JSON Lines file as for `tools`."""
        calculator: Calculator = field(default_factory=Calculator)
        """What the calculator's problems are."""
        tools: tuple[str, ...] = ("python",)
        """Tools whose schemas the task carries as `tools`; running them is up to the agent."""
        system: str = ""
        """A system message before every prompt that has none."""
        reward: str = "exact"
        """How a text is compared with the answer; or `exit_code`: 1 for a command that exits with
        0."""
        pattern: str = ""
        """For `regex`: the pattern."""
        reward_timeout_s: float = 10.0
        """Seconds one reward may take."""
        reward_processes: int = 1
        """Processes that compute slow rewards (`math`, `regex`); threads for a plugin's."""
        heldout_fraction: float = 0.1
        """Share of a file's tasks that is never trained on."""

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: an agent that asks once and prints what it was told."""
        script = directory / "ask_once.py"
        script.write_text(_EXAMPLE)
        return {"command": ["python3", str(script)], "calculator": {"calls": [1]}}

    @classmethod
    def check(cls, config: Config, planned: Any) -> Sequence[str]:
        """A program that is nowhere on the path that the command would have."""
        program = config.command[0] if config.command else ""
        if not program or "{" in program:
            return []
        if "/" in program and not program.startswith("/"):
            return [] if (Path(config.cwd).expanduser() / program).is_file() else [_absent(program)]
        inherited = os.environ.get("PATH") if "PATH" in config.pass_env else None
        path = config.env.get("PATH", inherited or os.defpath)
        return [] if shutil.which(program, path=path) else [_absent(program)]

    @classmethod
    def warnings(cls, config: Config, planned: Any) -> Sequence[str]:
        """Files that the command would look for in the empty folder it begins in, and the keys of
        another experiment."""
        found = []
        if config.tasks == "calculator" and planned.settings.max_new_tokens < _CALL:
            found.append(
                f"{_WHERE}: max_new_tokens is {planned.settings.max_new_tokens}, too few for the "
                "calculator's tasks; `experiment=calculator_agent environment=harness` sets what "
                "they need"
            )
        here = [w for w in config.command[1:] if not os.path.isabs(w) and Path(w).is_file()]
        if here and not config.cwd:
            found.append(
                f"{_WHERE}: command: {', '.join(map(repr, here))} is a file here, but each attempt "
                "begins in an empty folder; set environment.cwd=. or give the whole path"
            )
        return found

    def __init__(self, config: Config, context: Context) -> None:
        if not config.command and config.agent not in context.agents:
            what = "neither `agent` nor `command` is given"
            if config.agent:
                what = f"there is no agent {config.agent!r}"
            raise ConfigError(f"{_WHERE}: {what}; {choices(config.agent, context.agents)}")
        if any("{api_key}" in word for word in config.command):
            raise ConfigError(
                f"{_WHERE}: command: {{api_key}} in an argument would be shown by `ps` to every "
                "user of this machine; the agent finds it in OPENAI_API_KEY, ANTHROPIC_API_KEY and "
                "MILES_API_KEY, and in any other variable by environment.env={NAME: '{api_key}'}"
            )
        if config.timeout_s <= 0:
            raise ConfigError(f"{_WHERE}: timeout_s is {config.timeout_s}; it must be above 0")
        if config.reward == _EXIT_CODE and not config.command:
            raise ConfigError(f"{_WHERE}: reward is 'exit_code', but no command is given")
        self._cwd = Path(config.cwd).expanduser() if config.cwd else None
        if self._cwd is not None and not self._cwd.is_dir():
            raise ConfigError(f"{_WHERE}: cwd: there is no folder {config.cwd!r}")
        self.config = config
        self._seed = context.seed
        self._agent = None if config.command else context.agents[config.agent]
        chosen = functions.select(config.tools, context.tools, _WHERE)
        self.schemas = [chosen[name].schema for name in chosen]
        """Schemas that tasks carry."""
        self._score = None
        if config.reward != _EXIT_CODE:
            self._score = Scorer(
                environment="harness",
                reward=config.reward,
                pattern=config.pattern,
                timeout_s=config.reward_timeout_s,
                processes=config.reward_processes,
                offered=context.rewards,
            )
        self._splits: dict[Split, Sequence[Task]] = {}
        self._announced = False

    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split. Raises `ConfigError` for a file that cannot be used."""
        config = self.config
        if split not in self._splits and config.tasks == "calculator":
            made = calculator_tasks(config.calculator, seed=self._seed, split=split, where=_WHERE)
            self._splits[split] = made
        elif split not in self._splits:
            self._splits |= read_tasks(
                config.tasks,
                heldout_fraction=config.heldout_fraction,
                system=config.system,
                where=_WHERE,
            )
        return self._splits[split]

    async def play(self, task: Task, seed: int, tools: Tools) -> Trajectory:
        """One attempt. Raises `EpisodeError` when the agent fails, `EpisodeTimeout`, and whatever
        its session raises."""
        if not tools.engine.samples:
            return await self._replay(task, tools)
        if tools.serve is None:
            raise EpisodeError(f"{_WHERE}: nothing serves sessions here")
        began = time.monotonic()
        async with tools.serve(tools.id) as served:
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    worth, metrics = await self._run(self._given(task), served)
            except TimeoutError:
                raise EpisodeTimeout(
                    f"{_WHERE}: the agent took longer than {self.config.timeout_s:g} s and was "
                    "stopped"
                ) from None
            reward, more = await self._worth(task, worth)
            seconds = {"agent/seconds": time.monotonic() - began}
            return served.trajectory(reward=reward, metrics={**seconds, **metrics, **more})

    def _given(self, task: Task) -> dict[str, Any]:
        """What the agent is told of a task; the answer is not."""
        prompt: Any = task.prompt
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if self.config.system and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": self.config.system}, *prompt]
        return {
            "id": task.id,
            "prompt": [dict(m) for m in prompt],
            "tools": self.schemas,
            "data": dict(task.data),
        }

    async def _worth(self, task: Task, worth: float | str) -> tuple[float, Mapping[str, float]]:
        if isinstance(worth, str) and self._score is not None:
            value = self._score(task, worth)
            return check_reward(await value if inspect.isawaitable(value) else value, "harness")
        return check_reward(worth, "harness")

    # ---------------------------------------------------------------- the agent

    async def _run(self, given: dict[str, Any], served: ServedSession) -> Outcome:
        if self._agent is None:
            return await self._command(given, served)
        try:
            said = await self._agent(
                given, base_url=served.base_url, api_key=served.api_key, model=served.model
            )
        except (MilesError, TimeoutError):
            raise
        except Exception as error:
            raise EpisodeError(
                f"{_WHERE}: agent {self.config.agent!r} raised {type(error).__name__}: {error}"
            ) from error
        if isinstance(said, tuple):
            return said[0], {**said[1], "agent/failed": 0.0}
        return said, {"agent/failed": 0.0}

    async def _command(self, given: dict[str, Any], served: ServedSession) -> Outcome:
        data = json.dumps(given, ensure_ascii=False).encode()
        with attempt_folder(data) as folder:
            told = {
                "base_url": served.base_url,
                "api_key": served.api_key,
                "model": served.model,
                "task_file": str(folder / "task.json"),
            }
            ended = await run_command(
                [_filled(word, told) for word in self.config.command],
                env=self._environment(told),
                cwd=str(self._cwd or folder / "work"),
                stdin=data,
            )
        return self._judged(ended, served)

    def _judged(self, ended: Ended, served: ServedSession) -> Outcome:
        failed = {"agent/failed": float(ended.code != 0)}
        if ended.code:
            _log.info("%s: the agent exited with %d: %s", _WHERE, ended.code, _tail(ended.stderr))
            try:  # an agent that never asked the model is broken, whatever the policy is worth
                served.trajectory(reward=0.0)
            except EpisodeError as error:
                error.add_note(f"the agent exited with {ended.code}: {_tail(ended.stderr)}")
                raise
            return 0.0, failed
        if self._score is None:
            return 1.0, failed
        lines = [line for line in ended.stdout.splitlines() if line.strip()]
        return lines[-1].strip() if lines else "", failed

    def _environment(self, told: Mapping[str, str]) -> dict[str, str]:
        inherited = {key: os.environ[key] for key in self.config.pass_env if key in os.environ}
        return {
            **inherited,
            "OPENAI_BASE_URL": f"{told['base_url']}/v1",
            "OPENAI_API_KEY": told["api_key"],
            "ANTHROPIC_BASE_URL": told["base_url"],
            "ANTHROPIC_API_KEY": told["api_key"],
            **{f"MILES_{key.upper()}": value for key, value in told.items()},
            **{key: _filled(value, told) for key, value in self.config.env.items()},
        }

    # ---------------------------------------------------------------- demonstrations

    async def _replay(self, task: Task, tools: Tools) -> Trajectory:
        """Say what the solution says, with its recorded results: there is no model to talk to, so
        the agent is not started."""
        if not self._announced:
            self._announced = True
            _log.warning(
                "%s: demonstrations are replayed from the tasks' solutions; the agent is not "
                "started for them",
                _WHERE,
            )
        if task.solution is None:
            raise EpisodeError(f"{_WHERE}: task {task.id!r} has no solution to replay")
        solution: Sequence[Message] = (
            ({"role": "assistant", "content": task.solution},)
            if isinstance(task.solution, str)
            else task.solution
        )
        conversation = tools.conversation(tools.id)
        messages: list[Message] = self._given(task)["prompt"]
        text = ""
        for message in solution:
            if message["role"] != "assistant":
                messages.append(message)
                continue
            reply = await conversation.turn(messages, tools=self.schemas)
            text, messages = str(reply.message.get("content") or ""), []
        reward, metrics = await self._worth(task, text if self._score else 0.0)
        return conversation.trajectory(reward=reward, metrics=metrics)


def _absent(program: str) -> str:
    return f"command: there is no program {program!r}; give its whole path, or set env.PATH"


def _filled(word: str, told: Mapping[str, str]) -> str:
    for key, value in told.items():
        word = word.replace(f"{{{key}}}", value)
    return word


def _tail(text: str) -> str:
    return text.strip()[-_TOLD:] or "(it said nothing)"


_EXAMPLE = """\
import json, os, sys, urllib.request

task = json.load(sys.stdin)
body = {"model": os.environ["MILES_MODEL"], "messages": task["prompt"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {
        "Content-Type": "application/json",
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
    },
)
with urllib.request.urlopen(request, timeout=60) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"] or "")
"""
