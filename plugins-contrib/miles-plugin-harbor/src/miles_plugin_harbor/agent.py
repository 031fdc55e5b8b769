"""An agent of few lines for Harbor: it asks for a shell command, runs it, shows what came of it.

It needs nothing in the box but bash, which makes it the default. The session that it asks waits
under a key in `SESSIONS`, so that its key is written to no file.
"""

from __future__ import annotations

import re
from typing import Any

import aiohttp
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from miles import ServedSession

PATH = f"{__name__}:ShellAgent"
"""How a trial's configuration names the class."""
SESSIONS: dict[str, ServedSession] = {}
"""By the key that the trial's configuration carries, in this process."""

SYSTEM = (
    "You work in a Linux shell. To run a command, write it between <run> and </run>; you are shown "
    "what it prints. When the task is done, answer without any command."
)
_RUN = re.compile(r"<run>(.*?)</run>", re.S)
_FULL = re.compile(r"prompt_too_long|context_length_exceeded|context length")
_SHOWN = 4000


class ShellAgent(BaseAgent):
    """One command a turn, until a turn without any."""

    def __init__(
        self, *args: Any, session: str, turns: int = 16, command_s: int = 60, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._session, self._turns, self._command_s = SESSIONS[session], turns, command_s

    @staticmethod
    def name() -> str:
        """Its name in results."""
        return "miles-shell"

    def version(self) -> str:
        """Of the agent, not of Harbor."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """There is nothing to install."""

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Talk and run commands until there are none, or no turn is left."""
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": instruction},
        ]
        headers = {"Authorization": f"Bearer {self._session.api_key}"}
        async with aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=600)
        ) as client:
            for _ in range(self._turns):
                said = await self._ask(client, messages)
                commands = _RUN.findall((said or {}).get("content") or "")
                if said is None or not commands:
                    return
                shown = await self._run(environment, commands[0].strip())
                messages += [said, {"role": "user", "content": shown}]

    async def _ask(
        self, client: aiohttp.ClientSession, messages: list[Any]
    ) -> dict[str, Any] | None:
        """The model's message; None when the conversation no longer fits its context."""
        body = {"model": self._session.model, "messages": messages}
        url = f"{self._session.base_url}/v1/chat/completions"
        async with client.post(url, json=body) as answer:
            if answer.status != 200:
                text = await answer.text()
                if answer.status == 400 and len(messages) > 2 and _FULL.search(text):
                    return None
                raise RuntimeError(f"the model answered {answer.status}: {text}")
            found: dict[str, Any] = (await answer.json())["choices"][0]["message"]
            return found

    async def _run(self, environment: BaseEnvironment, command: str) -> str:
        try:
            found = await environment.exec(command, timeout_sec=self._command_s)
        except RuntimeError as error:
            return str(error)
        shown = ((found.stdout or "") + (found.stderr or "")).strip()
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}\n[{len(shown) - _SHOWN} more characters]"
        return f"exit code {found.return_code}\n{shown}".strip()
