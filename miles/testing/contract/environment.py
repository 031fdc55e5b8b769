"""What every environment must do, found by playing its tasks with scripted replies.

Whether its reward is the right one for its task is its own tests' business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.errors import RolloutError
from miles.protocols import Reply, Step, Tools
from miles.session.conversation import SessionConversation
from miles.testing.bigram import FakeEngine
from miles.testing.contract.case import Case, equal_json, expect, fault, inapplicable
from miles.testing.served import fake_serve
from miles.types import Group, Message, Sampling, Task, Trajectory
from miles.wire.frames import decode, encode

REPLIES = ("", "7", "the answer is 12", "\x00\ufffd é 🦊\n\n", "9" * 400)
"""Nothing, something, something wordy, something odd, too much."""
LOOKS = 64
"""Tasks looked at in a split; splits may be endless."""


def check_tasks(case: Case) -> None:
    """Its tasks are indexable, have unique ids and say something, in both splits; it has training
    tasks."""
    environment = case.build()
    for split in ("train", "heldout"):
        tasks = environment.tasks(split)
        size = _size(tasks, split)
        expect(size or split == "heldout", "there are no training tasks")
        seen: dict[str, int] = {}
        for index in _looks(size, 16 * LOOKS):
            task = tasks[index]
            expect(
                isinstance(task, Task), f"{split}[{index}] is a {type(task).__name__}, not a Task"
            )
            expect(task.id, f"{split}[{index}] has an empty id")
            other = seen.setdefault(task.id, index)
            expect(
                other == index, f"{split}[{other}] and {split}[{index}] share the id {task.id!r}"
            )
            _expect_prompt(task.prompt, f"{split}[{index}].prompt")


def check_tasks_plain(case: Case) -> None:
    """Its tasks cross a process: answers and data are plain JSON values."""
    environment = case.build()
    for split, index, task in _some(environment):
        equal_json(task.answer, f"{split}[{index}].answer")
        data = equal_json(dict(task.data), f"{split}[{index}].data")
        back = decode(encode(task))
        expect(dict(back.data) == data, f"{split}[{index}].data changed on its way to a process")


def check_tasks_repeat(case: Case) -> None:
    """Its tasks are the same every time, in this instance and in another process's."""
    first, other = case.build(), case.build()
    for split, index, task in _some(first):
        again = first.tasks(split)[index]
        expect(again == task, f"{split}[{index}] differs when asked for twice")
        expect(other.tasks(split)[index] == task, f"{split}[{index}] differs in a second instance")


def check_splits_disjoint(case: Case) -> None:
    """No held-out task is a training task."""
    environment = case.build()
    splits = {}
    for split in ("train", "heldout"):
        tasks = environment.tasks(split)
        splits[split] = {tasks[i].id for i in _looks(len(tasks), 16 * LOOKS)}
    both = sorted(splits["train"] & splits["heldout"])
    expect(not both, f"{len(both)} ids are in both splits, such as {both[:3]}")


async def check_episode_rewards(case: Case) -> None:
    """Whatever a policy says, an episode gives a finite reward, or a `RolloutError`."""
    environment = _with_episodes(case)
    for _, _, task in _some(environment, 4):
        for index, text in enumerate(REPLIES):
            await _outcome(environment, task, [text] * 16, seed=index)


async def check_episode_repeats(case: Case) -> None:
    """The same task, seed and replies give the same prompt and the same reward."""
    environment, other = _with_episodes(case), case.build()
    for _, _, task in _some(environment, 4):
        prompt = await _prompt(environment, task, seed=7)
        _expect_prompt(prompt, f"reset() of task {task.id!r}")
        expect(await _prompt(other, task, seed=7) == prompt, f"task {task.id!r}: prompts differ")
        first = await _outcome(environment, task, ["7"] * 16, seed=7)
        second = await _outcome(other, task, ["7"] * 16, seed=7)
        expect(
            first == second, f"task {task.id!r}: rewards {first} and {second} for the same replies"
        )


async def check_episodes_apart(case: Case) -> None:
    """Episodes of one task played at the same time do not touch each other."""
    environment = _with_episodes(case)
    for _, _, task in _some(environment, 4):
        scripts: list[list[str | Message]] = [_script(task), ["no idea"] * 16]
        alone = [await _outcome(environment, task, s, seed=3) for s in scripts]
        made = [environment.episode(task, 3) for _ in scripts]
        expect(made[0] is not made[1], f"task {task.id!r}: an episode was handed out twice")
        together = [_drive(e, s) for e, s in zip(made, scripts, strict=True)]
        woven = await _weave(together)
        expect(alone == woven, f"task {task.id!r}: rewards {alone} alone, {woven} side by side")


async def check_solution_is_worth_it(case: Case) -> None:
    """A task's own solution earns more than silence; a demonstration that does not would teach
    nothing."""
    environment = _with_episodes(case)
    solved = [(t, _script(t)) for _, _, t in _some(environment, 8) if t.solution is not None]
    if not solved:
        inapplicable("no task has a solution")
    for task, solution in solved:
        good = await _outcome(environment, task, solution, seed=1)
        bad = await _outcome(environment, task, [""] * 16, seed=1)
        expect(isinstance(good, float), f"task {task.id!r}: its solution fails: {good}")
        expect(
            isinstance(bad, str) or good > bad,
            f"task {task.id!r}: its solution earns {good}, silence {bad}",
        )


async def check_play(case: Case) -> None:
    """`play` gives a trajectory with its own id, sampled tokens and a finite reward."""
    environment = case.build()
    if not callable(getattr(environment, "play", None)):
        inapplicable("it does not take over at `play`")
    for _, _, task in _some(environment, 4):
        tools = _tools(case, task, samples=1)
        expect_trajectory(await environment.play(task, tools.seed, tools), tools.id)


async def check_rollout(case: Case) -> None:
    """`rollout` gives a group with the given id and task, and as many valid trajectories as asked
    for."""
    environment = case.build()
    if not callable(getattr(environment, "rollout", None)):
        inapplicable("it does not take over at `rollout`")
    for _, _, task in _some(environment, 4):
        tools = _tools(case, task, samples=3)
        group = await environment.rollout(task, tools)
        expect(isinstance(group, Group), f"rollout gave a {type(group).__name__}, not a Group")
        expect(group.id == tools.group, f"the group's id is {group.id}, not {tools.group}")
        expect(group.task == task, f"the group's task is {group.task.id!r}, not {task.id!r}")
        count = len(group.trajectories)
        expect(count == tools.samples, f"{count} trajectories; {tools.samples} were asked for")
        ids = {t.id for t in group.trajectories}
        expect(len(ids) == count, f"trajectories share ids: {sorted(ids)}")
        for trajectory in group.trajectories:
            expect_trajectory(trajectory, trajectory.id)


def expect_trajectory(trajectory: Any, id: str) -> None:
    """A trajectory that may be trained on, or one that says why not."""
    expect(isinstance(trajectory, Trajectory), f"a {type(trajectory).__name__} is not a Trajectory")
    expect(trajectory.id == id, f"the trajectory's id is {trajectory.id!r}, not {id!r}")
    if trajectory.failure is not None:
        return
    _expect_reward(trajectory.reward, f"trajectory {id!r}")
    sampled = sum(int(s.sampled.sum()) for s in trajectory.samples)
    expect(sampled > 0, f"trajectory {id!r} has no sampled tokens")
    expect(
        decode(encode(trajectory)).id == id, f"trajectory {id!r} changed on its way to a process"
    )


def _with_episodes(case: Case) -> Any:
    environment = case.build()
    if not callable(getattr(environment, "episode", None)):
        inapplicable("it does not take over at `episode`")
    return environment


def _size(tasks: Sequence[Task], split: str) -> int:
    try:
        return len(tasks)
    except TypeError:
        fault(f"tasks({split!r}) is a {type(tasks).__name__} without a length")


def _looks(size: int, count: int) -> list[int]:
    """Indices to look at: all of a small split; the first, the last and some between of a large
    one."""
    if size <= count:
        return list(range(size))
    rng = np.random.default_rng(0)
    some = (
        rng.choice(size, count - 2, replace=False) if size < 10**7 else rng.integers(0, size, count)
    )
    return sorted({0, size - 1, *map(int, some)})


def _some(environment: Any, count: int = LOOKS) -> list[tuple[str, int, Task]]:
    found = []
    for split in ("train", "heldout"):
        tasks = environment.tasks(split)
        found += [(split, index, tasks[index]) for index in _looks(len(tasks), count)]
    return found


def _expect_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        expect(prompt, f"{where} is empty")
        return
    expect(isinstance(prompt, list | tuple) and prompt, f"{where} is neither text nor messages")
    for message in prompt:
        expect(
            isinstance(message, dict) and "role" in message and "content" in message,
            f"{where} has a message without role and content: {message!r}",
        )


def _expect_reward(reward: Any, where: str) -> float:
    good = isinstance(reward, int | float | np.floating) and math.isfinite(np.float32(reward))
    expect(good, f"{where}: the reward {reward!r} is not a finite float32 number")
    return float(reward)


async def _outcome(
    environment: Any, task: Task, replies: Sequence[str | Message], *, seed: int
) -> Any:
    return (await _weave([_drive(environment.episode(task, seed), replies)]))[0]


async def _prompt(environment: Any, task: Task, *, seed: int) -> Any:
    episode = environment.episode(task, seed)
    try:
        return await episode.reset()
    finally:
        await _close(episode)


async def _close(episode: Any) -> None:
    if (close := getattr(episode, "close", None)) is not None:
        await close()


async def _drive(episode: Any, replies: Sequence[str | Message]) -> Any:
    """Play an episode with given replies, a yield after every call; the reward, or the error's
    reason, is last."""
    try:
        prompt = await episode.reset()
        _expect_prompt(prompt, "reset()")
        yield None
        for said in replies:
            message: Message = _message(said)
            text = str(message.get("content") or "")
            step = await episode.step(
                Reply(text=text, message=message, finish="stop", tokens=len(text) + 1)
            )
            expect(isinstance(step, Step), f"step() gave a {type(step).__name__}, not a Step")
            yield None
            if step.done:
                break
            _expect_prompt(list(step.messages), "messages of a step that is not done")
        worth = await episode.reward()
    except RolloutError as error:
        yield error.reason
        return
    finally:
        await _close(episode)
    reward, metrics = worth if isinstance(worth, tuple) else (worth, {})
    for key, value in (metrics or {}).items():
        expect(isinstance(value, int | float), f"metric {key!r} is {value!r}, not a number")
    yield _expect_reward(reward, "reward()")


async def _weave(drives: Sequence[Any]) -> list[Any]:
    """Run several drives in turns; the last thing each of them said."""
    last: list[Any] = [None] * len(drives)
    open_drives = dict(enumerate(drives))
    while open_drives:
        for index, drive in list(open_drives.items()):
            try:
                last[index] = await anext(drive)
            except StopAsyncIteration:
                del open_drives[index]
    return last


def _tools(case: Case, task: Task, *, samples: int) -> Tools:
    """What the loop gives an environment, over an engine that answers with the task's solution."""
    tito = case.companion("tito")
    said = [int(token) for token in tito.demonstrate(_script(task)[0])]
    engine = FakeEngine(
        FakeEngine.Config(vocab_size=tito.vocab_size, max_len=4096),
        script=lambda request: said[:-1],
    )
    sampling = Sampling(max_new_tokens=64, stop_ids=tuple(tito.stop_ids))
    name = "g0" if samples > 1 else "g0.0"

    def conversation(key: str) -> SessionConversation:
        return SessionConversation(key=key, tito=tito, engine=engine, sampling=sampling, seed=5)

    return Tools(
        id=name,
        group=0,
        samples=samples,
        seed=5,
        sampling=sampling,
        engine=engine,
        tito=tito,
        sandbox=case.companion("sandbox"),
        conversation=conversation,
        serve=fake_serve(_script(task), tito=tito),
    )


def _message(said: str | Message) -> Message:
    return {"role": "assistant", "content": said} if isinstance(said, str) else said


def _script(task: Task) -> list[str | Message]:
    """What the task's solution has the assistant say, the last of it repeated."""
    solution = task.solution or "7"
    if isinstance(solution, str):
        return [solution] * 16
    said: list[str | Message] = [m for m in solution if m["role"] == "assistant"]
    return said + said[-1:] * 16
