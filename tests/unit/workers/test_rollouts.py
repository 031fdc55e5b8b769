"""The sampling side of the loop in one process: seeds, sessions, places that come back, and agents
that speak HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from miles import (
    EpisodeError,
    Group,
    Message,
    Reply,
    Request,
    Sampling,
    SessionKeys,
    Settings,
    Step,
    Task,
    Trajectory,
)
from miles.buffer import Lease
from miles.router import Router
from miles.testing import FakeEngine, FakeTito, FakeTrainer, context
from miles.workers.rollouts import Rollouts

SETTINGS = Settings(samples_per_group=3, max_new_tokens=8, max_turns=2)
TASK = Task(id="t", prompt=({"role": "user", "content": "hi"},))


class Talk:
    async def reset(self) -> tuple[Message, ...]:
        return TASK.prompt  # type: ignore[return-value]

    async def step(self, reply: Reply) -> Step:
        return Step(messages=({"role": "user", "content": "more"},), done=False)

    async def reward(self) -> float:
        return 1.0


class Talking:
    def episode(self, task: Task, seed: int) -> Talk:
        return Talk()


class Playing:
    """Drives itself; `how` is what an attempt does."""

    def __init__(self, how: Callable[[Any], Awaitable[Trajectory]]) -> None:
        self.how = how

    async def play(self, task: Task, seed: int, tools: Any) -> Trajectory:
        return await self.how(tools)


async def made(path: Path, environment: Any, settings: Settings = SETTINGS) -> Rollouts:
    around = context(path, settings=settings)
    tito = FakeTito(FakeTito.Config(), around)
    here = Rollouts({"environment": environment, "tito": tito}, around)
    engine = FakeEngine(FakeEngine.Config(), around)
    await engine.load(4, FakeTrainer(FakeTrainer.Config(), around).export())
    here.sampler = here.engine = await Router({"engine": engine}).__aenter__()
    return here


def test_rollouts_play_groups_release_their_keys_and_count(tmp_path: Path) -> None:
    async def main() -> None:
        here = await made(tmp_path, Talking())
        group = await here.group(7, TASK)
        assert [t.id for t in group.trajectories] == ["g7.0", "g7.1", "g7.2"]
        assert group.oldest == 4
        counts = await here.counts()
        assert counts["session"]["turns"] == 6 and counts["session"]["token_mismatches"] == 0
        assert counts["router"]["keys"] == 0 and counts["router"]["keys_released"] == 3
        await here.end()

    asyncio.run(main())


def test_rollouts_release_the_keys_of_requests_that_no_session_made(tmp_path: Path) -> None:
    """They stayed in the router until 65,536 others had come."""

    async def main() -> None:
        async def ask(tools: Any) -> Trajectory:
            tokens = np.arange(3, dtype=np.int32)
            sampling = Sampling(max_new_tokens=2)
            asked = Request(id=tools.id, key=tools.id, tokens=tokens, sampling=sampling, seed=0)
            await tools.engine.generate(asked)
            raise EpisodeError("enough")

        here = await made(tmp_path, Playing(ask))
        await here.group(7, TASK)
        counts = (await here.counts())["router"]
        assert (counts["keys"], counts["keys_released"]) == (0, 3)
        assert not here._keys
        await here.end()

    asyncio.run(main())


def test_rollouts_play_an_evaluation_set_in_its_own_environment(tmp_path: Path) -> None:
    async def main() -> None:
        async def end(tools: Any) -> Trajectory:
            raise EpisodeError("its own")

        here = await made(tmp_path, Talking())
        here.environments["hard"] = Playing(end)
        sampling = Sampling(max_new_tokens=2, temperature=0.0)
        plain = await here.group(-1, TASK, 1, sampling, "plain")
        assert plain.failure is None and len(plain.trajectories) == 1
        hard = await here.group(-1, TASK, 2, sampling, "hard")
        assert [t.failure.detail for t in hard.trajectories if t.failure] == ["its own"] * 2
        assert isinstance(here.environment, Talking)
        await here.end()

    asyncio.run(main())


def test_rollouts_say_when_each_attempt_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        here = await made(tmp_path, Talking())
        seen = [item async for item in here.returning(1, TASK)]
        assert seen[:-1] == [None] * (len(seen) - 1) and len(seen) >= 2
        assert isinstance(seen[-1], Group) and len(seen[-1].trajectories) == 3
        await here.end()

    asyncio.run(main())


def test_rollouts_left_early_end_what_they_play(tmp_path: Path) -> None:
    async def main() -> None:
        ended: list[str] = []

        async def wait(tools: Any) -> Trajectory:
            if tools.id.endswith(".0"):
                raise EpisodeError("done with it")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(tools.id)
            raise AssertionError("not reached")

        here = await made(tmp_path, Playing(wait))
        items = here.returning(2, TASK)
        assert await anext(items) is None
        await items.aclose()  # type: ignore[attr-defined]
        assert sorted(ended) == ["g2.1", "g2.2"]
        await here.end()

    asyncio.run(main())


def test_rollouts_seeds_of_evaluations_are_their_own_and_the_same_everywhere(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        one, two = [await made(tmp_path, Talking()) for _ in range(2)]
        asked = Lease(id=-5, task=TASK)
        seeds = {here.tools(asked, 0, Sampling()).seed for here in (one, two)}
        assert len(seeds) == 1
        assert one.tools(Lease(id=5, task=TASK), 0).seed not in seeds
        await one.end()
        await two.end()

    asyncio.run(main())


async def _ask(served: Any, messages: list[Any], key: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key or served.api_key}"}
    body = {"model": served.model, "messages": messages}
    url = f"{served.base_url}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as r:
        return r.status, await r.json()


def test_rollouts_serve_sessions_that_agents_reach_and_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        others: list[Any] = []

        async def agent(tools: Any) -> Trajectory:
            async with tools.serve(tools.id) as served:
                others.append(served)
                said: list[Any] = [{"role": "user", "content": "hi"}]
                for _ in range(2):
                    status, answer = await _ask(served, said)
                    assert status == 200, answer
                    said += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
                for other in [o for o in others if o is not served]:
                    assert (await _ask(other, said, key=served.api_key))[0] in (401, 403, 404)
                trajectory: Trajectory = served.trajectory(reward=0.5)
                return trajectory

        here = await made(tmp_path, Playing(agent))
        group = await here.group(3, TASK)
        assert group.failure is None
        assert [len(s.spans) for s in group.samples] == [2, 2, 2]
        assert (await here.counts())["session"]["turns"] == 6
        gone = others[0]
        assert (await _ask(gone, [{"role": "user", "content": "hi"}]))[0] in (401, 404)
        await here.end()

    asyncio.run(main())


@pytest.mark.parametrize("more", ["", "?critic", "#2", "%41", " ż", "/critic"])
def test_rollouts_converse_over_http_under_any_key_that_an_address_holds(
    tmp_path: Path, more: str
) -> None:
    """A key with a question mark led elsewhere, and the answer to that ended the run."""

    async def main() -> Group:
        async def talk(tools: Any) -> Trajectory:
            conversation = tools.conversation(tools.id + more)
            await conversation.turn(TASK.prompt)
            trajectory: Trajectory = conversation.trajectory(reward=1.0)
            return trajectory

        settings = replace(SETTINGS, session=SessionKeys(through="server"))
        here = await made(tmp_path, Playing(talk), settings)
        group = await here.group(3, TASK)
        assert (await here.counts())["router"]["keys"] == 0
        await here.end()
        return group

    failure = asyncio.run(main()).failure
    if "/" not in more:
        assert failure is None
    else:
        assert failure is not None and "'g3.0/critic'" in failure.detail
        assert "may not be empty or hold '/'" in failure.detail


def test_rollouts_serve_no_session_of_an_engine_that_replays(tmp_path: Path) -> None:
    class Replay:
        samples = False

    async def agent(tools: Any) -> Trajectory:
        async with tools.serve(tools.id):
            raise AssertionError("not reached")

    async def main() -> None:
        here = await made(tmp_path, Playing(agent))
        here.engine = Replay()
        group = await here.group(3, TASK)
        assert group.failure is not None and "this one replays" in group.failure.detail
        here.engine = None
        await here.end()

    asyncio.run(main())


def test_rollouts_take_the_port_that_was_asked_for(tmp_path: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seen: list[str] = []

    async def agent(tools: Any) -> Trajectory:
        async with tools.serve(tools.id) as served:
            seen.append(served.base_url)
            await _ask(served, [{"role": "user", "content": "hi"}])
            trajectory: Trajectory = served.trajectory(reward=0.0)
            return trajectory

    async def main() -> None:
        settings = Settings(samples_per_group=1, session=SessionKeys(port=port))
        here = await made(tmp_path, Playing(agent), settings)
        assert (await here.group(0, TASK)).failure is None
        await here.end()

    asyncio.run(main())
    assert seen[0].startswith(f"http://127.0.0.1:{port}/sessions/")


@pytest.mark.parametrize("turns", [1, 3])
def test_rollouts_prompt_without_room_ends_the_episode_as_truncated(
    tmp_path: Path, turns: int
) -> None:
    async def main() -> None:
        settings = Settings(samples_per_group=1, max_new_tokens=8, max_turns=9)
        here = await made(tmp_path, Talking(), settings)
        here.max_len = 30 * turns
        group = await here.group(0, TASK)
        assert group.failure is None, group.failure
        (sample,) = group.samples
        assert sample.finish == "length" and len(sample.tokens) <= here.max_len
        await here.end()

    asyncio.run(main())
