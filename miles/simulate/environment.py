"""A modelled environment: attempts with turns, tokens and delays, drawn or recorded, and rewards by
chance.

What is said is not modelled; the tokens of a sample are those that were sampled, the others are
counted in the trajectory's metrics.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from miles.errors import ConfigError, EpisodeError, GenerationAborted
from miles.seeds import derive_seed
from miles.simulate.clock import after
from miles.simulate.distributions import draw
from miles.simulate.keys import Keys
from miles.simulate.requests import ModelledRequest, blank, laid, of_size
from miles.types import Array, Sample, Span, Task, Trajectory

__all__ = ["ModelledEnvironment", "Turn"]

Turn = tuple[int, int, float]
"""Tokens added before it, tokens sampled in it, seconds after it."""

_truths = np.ones(1 << 16, bool)


def _true(size: int) -> Array:
    """(size,) bool, of memory that all share."""
    global _truths
    if size > len(_truths):
        _truths = np.ones(2 * size, bool)
    return _truths[:size]


class ModelledEnvironment:
    """Plays attempts on modelled engines; see `EnvironmentKeys` for what they are made of."""

    def __init__(self, keys: Keys, *, seed: int, max_turns: int) -> None:
        """Attempts are functions of `seed` and of the seeds that they are given. Raises
        `ConfigError` for a file that cannot be used."""
        own = keys.environment
        self._affinity = keys.engine.affinity
        self._faults = keys.faults
        self._keys = own
        self._request_s = keys.engine.request_s
        self._seed = seed
        self._max_turns = max_turns
        self._recorded = _recorded(Path(own.trajectories)) if own.trajectories else []
        self._prompt, self._turns, self._size = map(
            draw, (own.prompt_tokens, own.turns, own.turn_tokens)
        )
        self._observation, self._start = draw(own.observation_tokens), draw(own.start_s)
        self._delay, self._reward = draw(own.delay_s), draw(own.reward_s)
        self._success = draw(own.success)
        self._lists = {split: self._made(split) for split in ("train", "heldout")}

    def tasks(self, split: str) -> Sequence[Task]:
        """As many as the keys say, each with its probability of success."""
        return self._lists[split]

    def _made(self, split: str) -> Sequence[Task]:
        count = self._keys.tasks if split == "train" else self._keys.heldout
        rng = Random(derive_seed(self._seed, "tasks", split))
        return [
            Task(
                id=f"{split}-{i}",
                prompt="",
                data={
                    "success": min(1.0, self._success(rng)),
                    "prompt": max(1, round(self._prompt(rng))),
                },
            )
            for i in range(count)
        ]

    def plan(self, task: Task, group: int, rng: Random) -> list[Turn]:
        """The turns of one attempt."""
        if self._recorded:
            return self._recorded[int(rng.random() * len(self._recorded))]
        count = self._turns
        if self._keys.likeness:
            shared = Random(derive_seed(self._seed, "likeness", group))
            alike = shared.random() < self._keys.likeness
            turns = count(shared) if alike else count(rng)
        else:
            turns = count(rng)
        number = min(self._max_turns, max(1, round(turns)))
        size, observation, delay = self._size, self._observation, self._delay
        sizes = [round(size(rng)) or 1 for _ in range(number)]
        added = [int(task.data["prompt"]), *(round(observation(rng)) for _ in range(number - 1))]
        return list(zip(added, sizes, (delay(rng) for _ in range(number)), strict=True))

    async def play(self, task: Task, seed: int, tools: Any) -> Trajectory:
        """One attempt. Raises `EpisodeError` where a fault is modelled."""
        rng = Random(seed)
        loop = asyncio.get_running_loop()
        await after(loop, self._start(rng))
        turns = self.plan(task, tools.group, rng)
        name, group, shared = tools.id, f"g{tools.group}", turns[0][0]
        generate, most = tools.engine.generate, tools.sampling.max_new_tokens
        faulty = self._faults.attempt or self._faults.hang
        prompt, sampled, taken = 0, 0, 0
        pieces: list[tuple[int, int]] = []  # (tokens, version)
        limit = self._keys.max_tokens or 1 << 40
        for index, (added, size, delay) in enumerate(turns):
            if prompt + added >= limit:
                break
            prompt += added
            size = min(size, most, limit - prompt)
            if faulty:
                await self._go_wrong(rng)
            one = f"{name}:{index}"
            completion = await generate(
                ModelledRequest(
                    id=one, key=name if self._affinity else one, tokens=blank(prompt),
                    sampling=of_size(size), trajectory=name, group=group, shared=shared,
                )
            )  # fmt: skip
            if completion.finish == "abort":
                raise GenerationAborted(f"trajectory {name}: turn {index} was aborted")
            _add(pieces, completion.spans)
            prompt, sampled, taken = prompt + size, sampled + size, taken + 1
            if index + 1 < len(turns):
                await after(loop, delay + self._request_s)
        await after(loop, self._reward(rng) + self._request_s)
        sample = Sample(
            tokens=blank(sampled), sampled=_true(sampled), trainable=_true(sampled),
            logprobs=None, spans=laid(pieces), finish="stop",
        )  # fmt: skip
        return Trajectory(
            id=name,
            samples=(sample,),
            reward=float(rng.random() < float(task.data["success"])),
            metrics={"tokens": float(prompt), "turns": float(taken)},
        )

    async def _go_wrong(self, rng: Random) -> None:
        if rng.random() < self._faults.attempt:
            raise EpisodeError("a modelled fault")
        if rng.random() < self._faults.hang:
            await asyncio.get_running_loop().create_future()  # its group's deadline ends it


def _add(pieces: list[tuple[int, int]], spans: Iterable[Span]) -> None:
    for span in spans:
        size = span.stop - span.start
        if pieces and pieces[-1][1] == span.version:
            pieces[-1] = (pieces[-1][0] + size, span.version)
        else:
            pieces.append((size, span.version))


def _recorded(path: Path) -> list[list[Turn]]:
    """Attempts of a file. Raises `ConfigError` for what is none."""
    found: list[list[Turn]] = []
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"simulate: {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value: Mapping[str, Any] = json.loads(line)
            turns = [(int(a), int(s), float(d)) for a, s, d in value["turns"]]
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                f'simulate: {path}:{number} is not {{"turns": [[added, sampled, delay_s], ...]}}: '
                f"{type(error).__name__}: {error}"
            ) from error
        if not turns or turns[0][0] < 1 or any(a < 0 or s < 1 or d < 0 for a, s, d in turns):
            raise ConfigError(
                f"simulate: {path}:{number}: an attempt has at least one turn, a prompt, at least "
                "one token sampled in every turn, and no negative number"
            )
        found.append(turns)
    if not found:
        raise ConfigError(f"simulate: {path} holds no attempts")
    return found
