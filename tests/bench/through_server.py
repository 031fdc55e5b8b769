"""What a turn costs more when it goes through the session server: CPU of one process, client and
server together, against an engine that answers at once.

    python tests/bench/through_server.py [GROUPS]

Groups of 8 conversations of 3 turns with a tool offered, in process and over HTTP; no limit.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from miles import Completion, Context, Message, Reply, SessionKeys, Settings, Span, Step, Task
from miles.router import Router
from miles.workers.rollouts import Rollouts
from miles_plugins.tito.bytes import Bytes

TITO = Bytes(Bytes.Config(), Context(directory=Path()))
SAID = TITO.demonstrate(
    'Let me see.<tool_call>{"name":"python","arguments":{"code":"1+2"}}</tool_call>'
)
TURNS, SAMPLES = 3, 8
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}


class Instant:
    """An engine that says the same at once."""

    samples = True

    async def generate(self, request: Any) -> Completion:
        return Completion(
            tokens=SAID,
            logprobs=np.zeros(len(SAID), np.float32),
            spans=(Span(start=0, stop=len(SAID), version=0),),
            finish="stop",
        )

    async def abort(self, keys: Any = None) -> int:
        return 0

    async def version(self) -> int:
        return 0

    async def health(self) -> dict[str, float]:
        return {}


class Talk:
    """Calls a tool that is not run, turn after turn."""

    tools = (TOOL,)

    async def reset(self) -> Sequence[Message]:
        return ({"role": "user", "content": "What is 1+2?"},)

    async def step(self, reply: Reply) -> Step:
        (call,) = reply.message["tool_calls"]
        told = {"role": "tool", "tool_call_id": call["id"], "name": "python", "content": "3"}
        return Step(messages=(told,), done=False)

    async def reward(self) -> float:
        return 1.0


class Talks:
    def episode(self, task: Task, seed: int) -> Talk:
        return Talk()


async def played(through: Literal["process", "server"], groups: int) -> float:
    """CPU seconds a turn."""
    settings = Settings(
        samples_per_group=SAMPLES, max_turns=TURNS, session=SessionKeys(through=through)
    )
    around = Context(directory=Path(), settings=settings)
    here = Rollouts({"environment": Talks(), "tito": TITO}, around)
    here.sampler = here.engine = await Router({"engine": Instant()}).__aenter__()
    here.sampler.published(0)
    task = Task(id="t", prompt="")
    await here.group(0, task)
    began = time.process_time()
    for number in range(1, groups + 1):
        group = await here.group(number, task)
        assert group.failure is None, group.failure
    spent = time.process_time() - began
    await here.end()
    return spent / (groups * SAMPLES * TURNS)


def main(argv: Sequence[str]) -> int:
    """Measure, print."""
    groups = int(argv[0]) if argv else 40
    cost = {way: asyncio.run(played(way, groups)) * 1e3 for way in ("process", "server")}
    print(json.dumps({f"{way}_cpu_ms_a_turn": round(ms, 3) for way, ms in cost.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
