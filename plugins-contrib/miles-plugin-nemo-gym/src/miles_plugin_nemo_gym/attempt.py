"""One attempt at a task of a resources server: seed its session, make the model's calls, verify.

What the server does with a call, and what an answer is worth, is the server's; tokens are the
loop's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from miles import EpisodeError, Message, Reply, Step, Tool
from miles_plugin_nemo_gym.spelling import to_items, to_messages, to_response, to_tools

_WHERE = "environment nemo_gym"


class Attempt:
    """An `Episode` over one session of a resources server, which a cookie keeps."""

    def __init__(
        self,
        row: Mapping[str, Any],
        reach: Callable[[], tuple[str, Mapping[str, str]]],
        *,
        where: str,
        timeout_s: float,
    ) -> None:
        """`reach()` says where the server is and which headers it wants; it may block."""
        self._row, self._reach, self._where = row, reach, where
        self._params = row["responses_create_params"]
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._client: aiohttp.ClientSession | None = None
        self._url = ""
        self._output: list[Mapping[str, Any]] = []
        self._turns = self._calls = self._failed = 0
        self._truncated = False
        self.tools: tuple[Tool, ...] = to_tools(self._params.get("tools"), where)

    async def reset(self) -> Sequence[Message]:
        """Open the server's session with the task's row; the task's input."""
        self._url, headers = await asyncio.to_thread(self._reach)
        jar = aiohttp.CookieJar(unsafe=True)  # the server is an address, not a name
        self._client = aiohttp.ClientSession(headers=headers, timeout=self._timeout, cookie_jar=jar)
        await self._post("seed_session", self._row)
        return to_messages(self._params["input"], self._where)

    async def step(self, reply: Reply) -> Step:
        """Make the calls of a turn; a turn without any is the last."""
        self._truncated = reply.finish == "length"
        items = to_items(reply.message, self._turns, finished=not self._truncated)
        self._turns += 1
        self._output += items
        calls = [item for item in items if item["type"] == "function_call"]
        if not calls or self._truncated:
            return Step()
        answers: list[Message] = []
        for call in calls:
            text = await self._call(call)
            self._output.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": text}
            )
            answers.append({"role": "tool", "tool_call_id": call["call_id"], "content": text})
        return Step(messages=tuple(answers), done=False)

    async def reward(self) -> tuple[float, Mapping[str, float]]:
        """What the server says the whole output is worth, and its other numbers."""
        response = to_response(self._output, self._params, truncated=self._truncated)
        found = json.loads(await self._post("verify", {**self._row, "response": response}))
        if not isinstance(found, dict) or not isinstance(found.get("reward"), int | float):
            raise EpisodeError(f"{_WHERE}: verify of {self._where} gave no reward: {found!r:.200}")
        metrics = {
            key: float(value)
            for key, value in found.items()
            if isinstance(value, int | float) and key != "reward" and key not in self._row
        }
        counted = {"calls": float(self._calls), "failed_calls": float(self._failed)}
        return float(found["reward"]), metrics | counted

    async def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.close()

    async def _call(self, call: Mapping[str, Any]) -> str:
        """What the server answers to a call; an error is an answer, for the model to deal with."""
        self._calls += 1
        try:
            arguments = json.loads(call["arguments"])
        except ValueError as error:
            self._failed += 1
            return json.dumps({"error": f"the arguments are not JSON: {error}"})
        name = call["name"]
        if name not in {tool["function"]["name"] for tool in self.tools}:
            self._failed += 1
            return json.dumps({"error": f"there is no tool {name!r}"})
        return await self._post(name, arguments, strict=False)

    async def _post(self, path: str, body: Any, *, strict: bool = True) -> str:
        if self._client is None:
            raise EpisodeError(f"{_WHERE}: {path} of {self._where} was asked before reset")
        try:
            async with self._client.post(f"{self._url}/{path}", json=body) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EpisodeError(
                f"{_WHERE}: {path} of {self._where} failed: {type(error).__name__}: {error}"
            ) from error
        if answer.status >= 400:
            self._failed += not strict
            if strict:
                raise EpisodeError(
                    f"{_WHERE}: {path} of {self._where} answered {answer.status}: {text[:400]}"
                )
        return text
