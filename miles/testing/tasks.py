"""The smallest environment and the smallest tito handler that keep their contracts.

The task is to go on saying the prompt's last letter, which even a bigram policy can learn. Neither
fake reads a file, and `FakeTito.save` writes no tokenizer, because no checkpoint of a fake is meant
to be loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miles.errors import EpisodeError
from miles.protocols import Context, Reply, Split, Step, Tool
from miles.seeds import derive_seed
from miles.types import Array, Message, Task

__all__ = ["FakeEnvironment", "FakeTito"]

TURN, END = 256, 257
_CALL = "\n!call "
_MARKS = {TURN: "<turn>", END: "<end>"}


class FakeTito:
    """Bytes as ids, plus one id that opens a turn and one that ends it:
    `<turn>role\\ncontent<end>`.

    Tools come first, as a turn of that role; a tool call is a line `!call NAME ARGUMENTS` after
    what an assistant says.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing to configure."""

    stop_ids: tuple[int, ...] = (END,)
    vocab_size: int = 258

    def __init__(self, config: Config | None = None, context: Context | None = None) -> None:
        self.config = config or self.Config()

    def encode(self, text: str) -> Array:
        """(tokens,) int32 UTF-8 bytes."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Array) -> str:
        """Text, the two marks written out, invalid bytes replaced."""
        pieces, run = [], bytearray()
        for token in map(int, tokens):
            if token < 256:
                run.append(token)
                continue
            pieces += [run.decode(errors="replace"), _MARKS[token]]
            run = bytearray()
        return "".join([*pieces, run.decode(errors="replace")])

    def _turn(self, message: Message) -> list[int]:
        return [TURN, *self.encode(f"{message['role']}\n{_said(message)}"), END]

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Array:
        """(tokens,) int32 of the tools and every message, then an open assistant turn."""
        offered = [{"role": "tools", "content": json.dumps(list(tools))}] if tools else []
        tokens = [token for message in [*offered, *messages] for token in self._turn(message)]
        return np.array([*tokens, TURN, *self.encode("assistant\n")], np.int32)

    def extend(
        self,
        stored: Array,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Array:
        """(new tokens,) int32: the missing end mark if the last turn was cut, then the messages."""
        closing = [] if len(stored) and stored[-1] == END else [END]
        return np.array([*closing, *self.render(messages)], np.int32)

    def parse(self, tokens: Array, *, tools: Sequence[Tool] = ()) -> Message:
        """Everything but a final end mark; lines that call become tool calls."""
        body = tokens[:-1] if len(tokens) and tokens[-1] == END else tokens
        content, *called = self.decode(body).split(_CALL)
        message: Message = {"role": "assistant", "content": content}
        if not called:
            return message
        calls = []
        for index, call in enumerate(called):
            name, _, arguments = call.partition(" ")
            function = {"name": name, "arguments": arguments}
            calls.append({"id": f"call_{index}", "type": "function", "function": function})
        return {**message, "tool_calls": calls}

    def demonstrate(self, said: str | Message) -> Array:
        """(tokens,) int32 of the text, or a message with its tool calls, and the end mark."""
        text = said if isinstance(said, str) else _said(said)
        return np.array([*self.encode(text), END], np.int32)

    def save(self, directory: Path) -> None:
        """A note of what the ids mean; not a tokenizer that `transformers` could load."""
        directory.mkdir(parents=True, exist_ok=True)
        marks = {text: token for token, text in _MARKS.items()}
        (directory / "fake_tito.json").write_text(json.dumps({"bytes": 256, "marks": marks}))


def _said(message: Message) -> str:
    """What a message says: its text, then its tool calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content)
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return content + "".join(f"{_CALL}{f['name']} {f['arguments']}" for f in functions)


class FakeEnvironment:
    """Go on saying the prompt's last letter; the reward is the share of the reply that does."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How many tasks, turns and failures."""

        train: int = 16
        """Training tasks."""
        heldout: int = 4
        """Held-out tasks."""
        turns: int = 1
        """Assistant turns an episode takes; every later prompt asks for more."""
        chat: bool = False
        """Prompts are chat messages instead of text."""
        fail_every: int = 0
        """The reward of every n-th task raises `EpisodeError`; 0 never."""

    def __init__(self, config: Config | None = None, context: Context | None = None) -> None:
        self.config = config or self.Config()

    def tasks(self, split: Split) -> Sequence[Task]:
        """`train` and `heldout` tasks, of different words that may end in the same letter."""
        count = self.config.train if split == "train" else self.config.heldout
        return [self._task(split, index) for index in range(count)]

    def _task(self, split: Split, index: int) -> Task:
        letters = np.random.default_rng(derive_seed("fake", split, index)).integers(97, 101, 4)
        word = bytes(letters.astype(np.uint8)).decode()
        return Task(
            id=f"{split}-{index}",
            prompt=({"role": "user", "content": word},) if self.config.chat else word,
            answer=word[-1],
            solution=word[-1] * 4,
            data={"index": index},
        )

    def episode(self, task: Task, seed: int) -> _Echo:
        """One attempt."""
        every = self.config.fail_every
        fails = every > 0 and task.data["index"] % every == every - 1
        return _Echo(task, turns=self.config.turns, fails=fails)


class _Echo:
    """One attempt at saying one letter."""

    def __init__(self, task: Task, *, turns: int, fails: bool) -> None:
        self._task, self._turns, self._fails = task, turns, fails
        self._said: list[str] = []

    async def reset(self) -> str | Sequence[Message]:
        return self._task.prompt

    async def step(self, reply: Reply) -> Step:
        self._said.append(reply.text)
        if len(self._said) >= self._turns:
            return Step()
        return Step(messages=({"role": "user", "content": self._task.answer},), done=False)

    async def reward(self) -> tuple[float, Mapping[str, float]]:
        if self._fails:
            raise EpisodeError(f"task {self._task.id!r}: fails on purpose")
        text = "".join(self._said)
        return text.count(self._task.answer) / max(1, len(text)), {"letters": float(len(text))}
