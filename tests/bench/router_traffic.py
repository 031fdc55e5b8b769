"""Multi-turn traffic for `router_hit_rate.py`: generated from fixed parameters, and recorded.

A conversation is a first prompt and, per turn, how much is sampled, how much is added before the
next turn and how long that takes. It plays nothing. The parameters were fixed before anything was
measured.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

GROUP = 8
"""Conversations about the same task: attempts that are compared with each other."""
START_S = 10.0
"""All conversations begin within so many seconds, and are then in flight together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A log-normal number, cut."""

    median: float
    sigma: float
    most: float

    def draw(self, rng: np.random.Generator) -> float:
        """At least 0."""
        return min(self.most, float(rng.lognormal(np.log(self.median), self.sigma)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What generated conversations are like; tokens and seconds."""

    name: str
    systems: int
    """System prompts (with their tools) that conversations share."""
    system: int
    """Tokens of each."""
    task: Amount
    """Tokens of a task, the same for a group."""
    turns: tuple[int, int]
    """Fewest and most, each number as likely."""
    reply: Amount
    """Tokens sampled a turn."""
    added: Amount
    """Tokens of what the tools say."""
    pause: Amount
    """Seconds until they have said it."""


CODING = Traffic(
    name="coding agent",
    systems=1,
    system=8000,
    task=Amount(median=600, sigma=0.5, most=4000),
    turns=(40, 60),
    reply=Amount(median=150, sigma=0.7, most=2000),
    added=Amount(median=250, sigma=0.9, most=4000),
    pause=Amount(median=1.0, sigma=1.0, most=60),
)
MIXED = Traffic(
    name="multi-turn",
    systems=4,
    system=2000,
    task=Amount(median=200, sigma=0.5, most=2000),
    turns=(5, 60),
    reply=Amount(median=120, sigma=0.7, most=2000),
    added=Amount(median=80, sigma=0.9, most=2000),
    pause=Amount(median=2.0, sigma=1.0, most=60),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn; tokens and seconds."""

    reply: int
    added: int
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """One conversation."""

    key: str
    prompt: np.ndarray
    """(tokens,) int32."""
    turns: tuple[Turn, ...]
    start: float
    """Seconds after the beginning."""


def generate(traffic: Traffic, sessions: int, seed: int) -> list[Talk]:
    """Conversations of that kind, in groups of `GROUP`."""
    rng = np.random.default_rng([seed, sessions])
    systems = [ids(rng, traffic.system) for _ in range(traffic.systems)]
    talks: list[Talk] = []
    for number in range(sessions):
        if number % GROUP == 0:
            task = ids(rng, int(traffic.task.draw(rng)) + 1)
            prompt = np.concatenate([systems[number // GROUP % len(systems)], task])
        turns = tuple(
            Turn(
                reply=int(traffic.reply.draw(rng)) + 1,
                added=int(traffic.added.draw(rng)) + 1,
                pause=traffic.pause.draw(rng),
            )
            for _ in range(rng.integers(traffic.turns[0], traffic.turns[1] + 1))
        )
        key = f"g{number // GROUP}.{number % GROUP}"
        talks.append(Talk(key=key, prompt=prompt, turns=turns, start=rng.uniform(0, START_S)))
    return talks


def ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """(count,) int32 random token ids."""
    return rng.integers(0, 2**31 - 1, count, dtype=np.int32)


def recorded(data: Path, copies: int, seed: int) -> list[Talk]:
    """The recorded conversations in `data`, each `copies` times: prompts have their real tokens
    (Qwen3's), so that what they share is shared; replies have the recorded number of tokens and,
    as attempts at one task differ, tokens of their own."""
    rng = np.random.default_rng(seed)
    tokenizer = read_tokenizer(data / "tokenizers.tar.xz")
    talks = []
    for file in sorted((data / "trajectories").glob("*.jsonl")):
        for number, line in enumerate(file.read_text().splitlines()):
            prompt, turns = turns_of(json.loads(line), tokenizer)
            for copy in range(copies):
                paused = tuple(
                    Turn(reply=r, added=a, pause=MIXED.pause.draw(rng)) for r, a in turns
                )
                key = f"{file.stem}.{number}.{copy}"
                start = rng.uniform(0, START_S)
                talks.append(Talk(key=key, prompt=prompt, turns=paused, start=start))
    return talks


def read_tokenizer(archive: Path) -> tokenizers.Tokenizer:
    """Qwen3's, out of the archive."""
    with tarfile.open(archive) as tar:
        name = next(n for n in tar.getnames() if n.endswith("qwen3/tokenizer.json"))
        member = tar.extractfile(name)
        if member is None:
            raise FileNotFoundError(f"{archive} has no {name}")
        return tokenizers.Tokenizer.from_str(member.read().decode())


def turns_of(
    record: dict[str, Any], tokenizer: tokenizers.Tokenizer
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """(tokens,) int32 first prompt, and per turn the tokens said and the tokens added."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    output = record["response"]["output"]
    for item in output:
        if "prompt_token_ids" in item:  # recorded with its tokens, one turn
            prompt = np.array(item["prompt_token_ids"], np.int32)
            return prompt, [(len(item["generation_token_ids"]), 0)]
    asked = record["responses_create_params"]
    text = "".join(f"<|im_start|>{m['role']}\n{words(m)}<|im_end|>\n" for m in asked["input"])
    tools = json.dumps(asked["tools"])
    opening = f"<|im_start|>system\n# Tools\n{tools}<|im_end|>\n{text}<|im_start|>assistant\n"
    prompt = np.array(tokenizer.encode(opening, add_special_tokens=False).ids, np.int32)
    turns = []
    for said, answers in split(output):
        reply = count("\n".join(map(words, said)) + "<|im_end|>")
        added = "".join(f"\n<|im_start|>tool\n{words(a)}<|im_end|>" for a in answers)
        turns.append((reply, count(added + "\n<|im_start|>assistant\n") if answers else 0))
    return prompt, turns


def split(output: Sequence[dict[str, Any]]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Items of one turn, and the tool outputs that follow it."""
    said: list[Any] = []
    answers: list[Any] = []
    for item in output:
        if item["type"] == "function_call_output":
            answers.append(item)
            continue
        if answers:
            yield said, answers
            said, answers = [], []
        said.append(item)
    yield said, answers


def words(item: dict[str, Any]) -> str:
    """The text that an item adds to a prompt."""
    if item["type"] == "function_call":
        call = {"name": item["name"], "arguments": item["arguments"]}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    if item["type"] == "function_call_output":
        return str(item["output"])
    if item["type"] == "reasoning":
        return "<think>\n" + "".join(part["text"] for part in item["summary"]) + "\n</think>\n"
    content = item["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
