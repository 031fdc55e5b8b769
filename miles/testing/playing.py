"""Plays one episode of an environment with given replies: no engine, no tokens, no loop.

For tests of environments. How the loop drives an episode is `miles.loop.episode`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.episode import check_reward
from miles.protocols import Reply, Tool
from miles.types import Message, Task

__all__ = ["Played", "play_episode", "tool_call"]

Said = str | Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of an episode."""

    reward: float
    """What it was worth."""
    metrics: Mapping[str, float]
    """What it reported beside."""
    messages: tuple[Message, ...]
    """Prompt (text as a user's message), replies, and what the episode answered, in order."""
    turns: int
    """Replies that were given."""
    done: bool
    """The episode ended by itself; otherwise the replies ran out."""
    tools: tuple[Tool, ...]
    """What it offered the model."""


async def play_episode(
    environment: Any,
    task: Task,
    replies: Sequence[Said] | Callable[[Sequence[Message]], Said],
    *,
    seed: int = 0,
    finish: str = "stop",
    demonstrated: bool = False,
) -> Played:
    """Reset, answer with `replies` in order (or what a function of the conversation says, 64 times
    at most), ask for the reward, close.

    A reply is text, or an assistant message, as `tool_call` makes it. The last one finishes as
    `finish`. Raises what the episode raises, and `BadReward` for a reward that is no finite number.
    """
    made = environment.episode(task, seed)
    try:
        prompt = await made.reset()
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        turns, done, limit = 0, False, 64 if callable(replies) else len(replies)
        while turns < limit and not done:
            said = replies(messages) if callable(replies) else replies[turns]
            message = {"role": "assistant", "content": said} if isinstance(said, str) else said
            turns += 1
            text = str(message.get("content") or "")
            step = await made.step(
                Reply(
                    text=text,
                    message=message,
                    finish=finish if turns == limit else "stop",
                    tokens=len(text.encode()) + 1,
                    demonstrated=demonstrated,
                )
            )
            messages += [message, *step.messages]
            done = step.done
        reward, metrics = check_reward(await made.reward(), type(environment).__name__)
        return Played(
            reward=reward,
            metrics=metrics,
            messages=tuple(messages),
            turns=turns,
            done=done,
            tools=tuple(getattr(made, "tools", ())),
        )
    finally:
        if (close := getattr(made, "close", None)) is not None:
            await close()


def tool_call(name: str, /, content: str = "", **arguments: Any) -> Message:
    """An assistant message that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": f"call_{name}", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
