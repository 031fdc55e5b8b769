"""An agent in plain OpenAI client code: it offers a calculator as a tool, and answers.

It knows nothing of miles: an address, a key, a model's name and a task are all it is given. As a
script it reads them from the environment and standard input, and prints its answer:

    python -m miles_plugins.environment.harness.openai_agent < task.json
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

TURNS = 4
"""Replies at most."""

_OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


async def solve(
    task: Mapping[str, Any], *, base_url: str, api_key: str, model: str
) -> tuple[str, Mapping[str, float]]:
    """The answer to a task, with what to log: a conversation in which the model may calculate."""
    client = _client(asyncio.get_running_loop()).with_options(
        base_url=f"{base_url}/v1", api_key=api_key
    )
    messages = list(task["prompt"])
    counts = {"turns": 0.0, "tools/calls": 0.0, "tools/errors": 0.0}
    for _ in range(TURNS):
        reply = await client.chat.completions.create(
            model=model, messages=messages, tools=task["tools"]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        counts["turns"] += 1
        if not message.tool_calls:
            return message.content or "", counts
        for call in message.tool_calls:
            told = answer(call.function.arguments)
            counts["tools/calls"] += 1
            counts["tools/errors"] += told.startswith("error: ")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return "", counts


@lru_cache(maxsize=1)
def _client(loop: asyncio.AbstractEventLoop) -> Any:
    """One client for all conversations of an event loop: each would otherwise read the system's
    certificates."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(api_key="given with each conversation", max_retries=0, timeout=600.0)


def answer(arguments: str) -> str:
    """What the tool says to a call's arguments."""
    try:
        return str(calculate(json.loads(arguments)["code"]))
    except (ValueError, KeyError, TypeError, SyntaxError) as error:
        return f"error: {type(error).__name__}: {error}"


def calculate(code: str) -> int:
    """A sum, difference or product of whole numbers; nothing else is ever run. Raises `ValueError`
    or `SyntaxError`."""
    if len(code) > 200:
        raise ValueError("the expression is too long")
    return _value(ast.parse(code, mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers with +, - and * are calculated")


def main() -> None:
    """Solve the task on standard input; print the answer."""
    task = json.load(sys.stdin)
    given = {key: os.environ[f"MILES_{key.upper()}"] for key in ("base_url", "api_key", "model")}
    said, _ = asyncio.run(solve(task, **given))
    print(said)


if __name__ == "__main__":
    main()
