"""One attempt at an OpenEnv environment: observations become messages, replies become actions.

The connection is OpenEnv's own generic client; tokens and rewards' use are the loop's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, Protocol

from miles import EpisodeError, Message, Reply, Step, Task

Speak = Literal["text", "json", "tools"]
_WHERE = "environment openenv"
_HOUSEKEEPING = ("done", "reward", "metadata")


class Rules(Protocol):
    """The part of the configuration that an attempt needs."""

    speak: Speak
    action: str
    observation: str
    instruction: str
    reward: Literal["sum", "last"]
    reset: Mapping[str, Any]


class Stepping:
    """An `Episode` over one session of an environment server."""

    def __init__(self, task: Task, rules: Rules, connect: Any) -> None:
        """`connect()` is an async context manager that gives a connected client."""
        self._task, self._rules, self._connect = task, rules, connect
        self._open = AsyncExitStack()
        self._client: Any = None
        self._rewards: list[float] = []
        self._done = False
        self._refused = 0
        self.tools: tuple[Mapping[str, Any], ...] = ()

    async def reset(self) -> Sequence[Message]:
        """Begin the environment's episode; what it shows, after the instruction."""
        self._client = await self._open.enter_async_context(self._connect())
        seed = int(self._task.data["seed"])
        result = await self._ask("reset", self._client.reset, seed=seed, **self._rules.reset)
        if self._rules.speak == "tools":
            self.tools = await self._list_tools()
        instruction = self._rules.instruction
        system = ({"role": "system", "content": instruction},) if instruction else ()
        return (*system, {"role": "user", "content": self._shown(result) or "Begin."})

    async def step(self, reply: Reply) -> Step:
        """Turn the reply into an action, take it, show what came of it."""
        if self._done:
            return Step()
        if self._rules.speak == "tools":
            return await self._call_tools(reply)
        action = self._action(reply.text)
        if isinstance(action, str):  # why it is none
            return self._refuse(action)
        result = await self._act(action)
        if result is None:
            return self._refuse("The environment does not accept this action.")
        if self._done:
            return Step()
        return Step(messages=({"role": "user", "content": self._shown(result)},), done=False)

    async def reward(self) -> tuple[float, Mapping[str, float]]:
        """The sum of what the steps were worth, or the last of it."""
        seen = self._rewards
        worth = sum(seen) if self._rules.reward == "sum" else (seen[-1] if seen else 0.0)
        return worth, {
            "steps": float(len(seen)),
            "finished": float(self._done),
            "refused_actions": float(self._refused),
        }

    async def close(self) -> None:
        """Give the session back."""
        await self._open.aclose()

    async def _ask(self, what: str, method: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return await method(*arguments, **more)
        except (OSError, RuntimeError, TimeoutError) as error:
            raise EpisodeError(
                f"{_WHERE}: {what} of task {self._task.id!r} failed: {type(error).__name__}: "
                f"{error}"
            ) from error

    async def _act(self, action: Mapping[str, Any]) -> Any:
        """The result of an action; None when the server finds it malformed."""
        try:
            result = await self._ask("step", self._client.step, dict(action))
        except EpisodeError as error:
            if "VALIDATION_ERROR" in str(error):
                return None
            raise
        self._rewards.append(float(result.reward or 0.0))
        self._done = bool(result.done)
        return result

    def _action(self, text: str) -> Mapping[str, Any] | str:
        if self._rules.speak == "text":
            return {self._rules.action: text}
        try:
            found = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except ValueError:
            return "Answer with one JSON object, which is the action."
        return found if isinstance(found, dict) else "The action is one JSON object."

    def _refuse(self, why: str) -> Step:
        self._refused += 1
        return Step(messages=({"role": "user", "content": why},), done=False)

    def _shown(self, result: Any) -> str:
        seen = dict(result.observation or {})
        if name := self._rules.observation:
            if name not in seen:
                raise EpisodeError(
                    f"{_WHERE}: the observation has no field {name!r} to show "
                    f"(environment.observation); it has {', '.join(sorted(seen)) or 'none'}"
                )
            value = seen[name]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown = {key: value for key, value in seen.items() if key not in _HOUSEKEEPING}
        if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
            return only
        return json.dumps(shown, ensure_ascii=False)

    async def _list_tools(self) -> tuple[Mapping[str, Any], ...]:
        result = await self._ask("list_tools", self._client.step, {"type": "list_tools"})
        found = (result.observation or {}).get("tools")
        if not found:
            raise EpisodeError(f"{_WHERE}: the environment offers no tools; speak text or json")
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                },
            }
            for tool in found
        )

    async def _call_tools(self, reply: Reply) -> Step:
        """Every call of the turn, in order; a turn without calls is the model's last."""
        answers: list[Message] = []
        for call in reply.message.get("tool_calls") or ():
            text = "The episode is over."
            if not self._done:
                text = await self._call_tool(call["function"])
            answers.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": text})
        if not answers or self._done:
            return Step()
        return Step(messages=tuple(answers), done=False)

    async def _call_tool(self, function: Mapping[str, Any]) -> str:
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            self._refused += 1
            return "The arguments are not a JSON object."
        name = function["name"]
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        result = await self._act(action)
        if result is None:
            self._refused += 1
            return "The environment does not accept this call."
        seen = result.observation or {}
        if seen.get("error"):
            self._refused += 1
            return json.dumps(seen["error"], ensure_ascii=False)
        value = seen.get("result")
        if isinstance(value, Mapping) and "data" in value:
            value = value["data"]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
