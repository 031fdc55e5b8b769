"""An environment for each depth at which one may take over, as a local plugin file.

Rewards are arbitrary functions of the text: what counts is who drives.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from miles import Group, Request, Sample, Span, Step, Task, Trajectory


def worth(text: str) -> float:
    """Something between 0 and 1 that differs from text to text."""
    return sum(text.encode()) % 101 / 100


class _Tasks:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How many tasks."""

        count: int = 64
        """Training tasks, and as many held out."""

    def __init__(self, config, context):
        self.config = config

    def tasks(self, split):
        return [
            Task(id=f"{split}-{i}", prompt=({"role": "user", "content": f"{split} {i}"},))
            for i in range(self.config.count)
        ]


class AtEpisode(_Tasks):
    """The loop drives: two turns, the second about the first."""

    def episode(self, task, seed):
        return _TwoTurns(task)


class _TwoTurns:
    def __init__(self, task):
        self.task, self.said = task, []

    async def reset(self):
        return self.task.prompt

    async def step(self, reply):
        self.said.append(reply.text)
        if len(self.said) == 2:
            return Step()
        return Step(messages=({"role": "user", "content": "are you sure?"},), done=False)

    async def reward(self):
        return worth("".join(self.said)), {"turns": float(len(self.said))}


class AtPlay(_Tasks):
    """It drives one attempt: straight to the engine, with a history that branches in two."""

    async def play(self, task, seed, tools):
        prompt = tools.tito.render(task.prompt)
        sampling = replace(tools.sampling, stop_ids=tuple(tools.tito.stop_ids))
        asked = [
            Request(
                id=f"{tools.id}#{branch}",
                key=tools.id,
                tokens=np.concatenate([prompt, tools.tito.encode(f"branch {branch}: ")]),
                sampling=sampling,
                seed=seed + branch,
            )
            for branch in range(2)
        ]
        answers = await asyncio.gather(*(tools.engine.generate(request) for request in asked))
        samples = tuple(_sample(r.tokens, c) for r, c in zip(asked, answers, strict=True))
        text = "|".join(tools.tito.decode(c.tokens) for c in answers)
        return Trajectory(
            id=tools.id,
            samples=samples,
            reward=worth(text),
            text=text,
            metrics={"branches": float(len(samples))},
        )


def _sample(prompt, completion):
    """Prompt and completion as they were, with the engine's own log-probs and versions."""
    size = len(prompt)
    sampled = np.arange(size + len(completion.tokens)) >= size
    return Sample(
        tokens=np.concatenate([prompt, completion.tokens]),
        sampled=sampled,
        trainable=sampled,
        logprobs=np.concatenate([np.zeros(size, np.float32), completion.logprobs]),
        spans=tuple(
            Span(start=size + s.start, stop=size + s.stop, version=s.version)
            for s in completion.spans
        ),
        finish=completion.finish,
    )


class AtRollout(_Tasks):
    """It drives a whole group: agents that hear each other, and are ranked against each other."""

    async def rollout(self, task, tools):
        agents = [tools.conversation(f"{tools.id}.{i}") for i in range(tools.samples)]
        first = await asyncio.gather(*(agent.turn(task.prompt) for agent in agents))
        heard = "/".join(f"{worth(reply.text):.2f}" for reply in first)
        message = {"role": "user", "content": f"the others: {heard}"}
        last = await asyncio.gather(*(agent.turn([message]) for agent in agents))
        order = np.argsort(np.argsort([worth(reply.text) for reply in last]))
        trajectories = tuple(
            agent.trajectory(
                reward=float(rank), metrics={"distinct": float(len({r.text for r in first}))}
            )
            for agent, rank in zip(agents, order, strict=True)
        )
        return Group(id=tools.group, task=task, trajectories=trajectories)


miles_components = {
    "environment": {"at_episode": AtEpisode, "at_play": AtPlay, "at_rollout": AtRollout}
}
