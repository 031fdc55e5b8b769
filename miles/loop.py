"""START HERE. The loop: `train`, `publish`, `produce`, `rollout`, `play`. There is no other.

Synchronous is `max_lag=0`, one step off is 1, fully asynchronous is more; the buffer decides
freshness, the run object holds the chosen components. Nothing here knows a component by name,
imports torch, or touches a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from miles.batch import Batch, Receipt, Update
from miles.buffer import Buffer, Lease
from miles.episode import check_reward
from miles.errors import (
    ContractError,
    EpisodeError,
    EpisodeTimeout,
    PromptTooLong,
    RolloutError,
    RunError,
    TokenMismatch,
)
from miles.placement import Placement
from miles.protocols import Conversation, Environment, Episode, Selector, Tools
from miles.settings import Settings
from miles.types import Drop, Group, Sampling, Task, Trajectory

__all__ = [
    "Rollouts",
    "Run",
    "attempt",
    "episode",
    "play",
    "produce",
    "publish",
    "refuse_stale",
    "rollout",
    "train",
]


class Run(Protocol):
    """Everything the loop may use; `miles.run` builds it for each stage."""

    settings: Settings
    buffer: Buffer
    placement: Placement
    selector: Selector
    trainer: Any
    hook: Any

    def steps(self) -> Iterable[int]:
        """Trainer versions still to be made in this stage."""

    def timing(self, what: str) -> AbstractContextManager[None]:
        """Count the time spent inside under `time/<what>_s`."""

    def lease(self) -> Lease | None:
        """The next task to attempt; None when there are no more."""

    async def rollout(
        self,
        lease: Lease,
        samples: int | None = None,
        sampling: Sampling | None = None,
        **of: str,
    ) -> Group:
        """Have a group played in a rollout worker, by `rollout` below; `of` names an evaluation
        set."""

    async def prepare(self, groups: Sequence[Group]) -> Batch:
        """Log-prob passes and the algorithm, off the event loop."""

    async def checkpoint(
        self, step: int, groups: Sequence[Group], batch: Batch, update: Update
    ) -> None:
        """Write one, if this step is due, with what `finish_step` would tell of it by now."""

    async def send_weights(self) -> Receipt | None:
        """Through the transport, if this version is due."""

    def judge(self, group: Group) -> Drop | None:
        """Look at a finished group: why not to train on it, or None."""

    async def evaluate(self, step: int) -> None:
        """Score the policy, if this step is due."""

    def finish_step(self, step: int, groups: Sequence[Group], batch: Batch, update: Update) -> None:
        """Metrics, ledger, trackers, hooks."""


class Rollouts(Protocol):
    """Everything that playing a group may use; `miles.workers.rollouts` is it, in a rollout
    worker."""

    settings: Settings
    environment: Environment

    def tools(self, lease: Lease, index: int | None, sampling: Sampling | None = None) -> Tools:
        """What an attempt (or, without index, a whole group) is given."""

    def returned(self, lease: Lease) -> None:
        """One attempt of the group has ended."""


async def train(run: Run) -> None:
    """Run one stage to its end, or until the buffer is stopped or out of tasks."""
    await publish(run)
    await run.evaluate(run.buffer.trainer_version)
    async with _running(produce(run)):
        for step in run.steps():
            with run.timing("wait"):
                groups = await run.buffer.take(
                    run.settings.groups_per_step, last=run.settings.last_batch
                )
            if not groups:
                break
            batch = await run.prepare(groups)
            refuse_stale(batch, run.buffer)
            async with run.placement.training():
                with run.timing("train"):
                    update = await run.trainer.step(batch)
                run.buffer.stepped(update.version, groups)
                await run.checkpoint(step, groups, batch, update)
            await publish(run)
            run.finish_step(step, groups, batch, update)
            await run.evaluate(step)
    run.buffer.end()


def refuse_stale(batch: Batch, buffer: Buffer) -> None:
    """Raises `RunError` when a token that is to be trained is older than `max_lag`; the buffer and
    whatever changed the batch since then are both held to that."""
    versions = batch.tokens.versions[batch.tokens.trainable]  # (trained,) int32
    if len(versions) and (lag := buffer.trainer_version - int(versions.min())) > buffer.max_lag:
        raise RunError(
            f"step {buffer.trainer_version + 1}: a token to be trained is {lag} versions old; "
            f"max_lag is {buffer.max_lag}"
        )


async def publish(run: Run) -> None:
    """Bring the trainer's weights to the engines."""
    with run.timing("publish"):
        async with run.placement.publishing():
            receipt = await run.send_weights()
    if receipt is not None:
        run.buffer.published(receipt.version)
        run.hook.weights_published(receipt=receipt)


async def produce(run: Run) -> None:
    """Start groups whenever there is room, until the tasks run out."""
    soon = asyncio.get_running_loop().call_soon
    async with asyncio.TaskGroup() as tasks:
        while True:
            await run.buffer.place()
            lease = run.lease()
            if lease is None:
                run.buffer.close()
                return
            task = tasks.create_task(_bring_back(run, lease), name=f"group {lease.id}")
            # soon, as a task that is cancelled before it began brings nothing back
            run.buffer.start(lease, partial(soon, task.cancel))
            run.hook.group_started(group=lease.id, task=lease.task)


async def _bring_back(run: Run, lease: Lease) -> None:
    try:
        group = await run.rollout(lease)
    except asyncio.CancelledError:
        if (doom := run.buffer.doomed(lease.id)) is None:
            raise
        lost = Trajectory(id=f"g{lease.id}", samples=(), failure=doom)
        group = Group(id=lease.id, task=lease.task, trajectories=(lost,))
    drop = run.judge(group)
    run.buffer.finish(group, drop)
    run.hook.group_finished(group=group, drop=drop)


async def rollout(here: Rollouts, lease: Lease, samples: int | None = None, **how: Any) -> Group:
    """One group: the environment's own `rollout` if it has one, otherwise independent attempts."""
    try:
        async with asyncio.timeout(here.settings.episode_timeout_s):
            if (own := getattr(here.environment, "rollout", None)) is not None:
                return await _whole(here, own, lease, samples, **how)
            count = samples or here.settings.samples_per_group
            if count == 1:
                trajectories = [await play(here, lease, 0, **how)]
            else:
                async with asyncio.TaskGroup() as tasks:
                    plays = (play(here, lease, i, **how) for i in range(count))
                    attempts = [tasks.create_task(each) for each in plays]
                trajectories = [a.result() for a in attempts]
    except (RolloutError, TokenMismatch, TimeoutError, SystemExit) as error:
        failure = _as_drop(error, here, lease)
        trajectories = [Trajectory(id=f"g{lease.id}", samples=(), failure=failure)]
    return Group(id=lease.id, task=lease.task, trajectories=tuple(trajectories))


async def _whole(here: Rollouts, own: Any, lease: Lease, samples: int | None, **how: Any) -> Group:
    tools = here.tools(lease, None, **how)
    if samples:
        tools = replace(tools, samples=samples)
    group: Group = await own(lease.task, tools)
    for one in group.trajectories:
        _refuse_bad_reward(one, here.environment)
    if group.id != lease.id:
        raise ContractError(
            f"environment {type(here.environment).__name__}: rollout of task {lease.task.id!r} "
            f"returned group {group.id}; tools.group is {lease.id}"
        )
    return group


async def play(here: Rollouts, lease: Lease, index: int, **how: Any) -> Trajectory:
    """One attempt: the environment's own `play` if it has one, otherwise its episode. A failure is
    a value."""
    tools = here.tools(lease, index, **how)
    try:
        if (own := getattr(here.environment, "play", None)) is not None:
            trajectory: Trajectory = await own(lease.task, tools.seed, tools)
            _refuse_bad_reward(trajectory, here.environment)
            return trajectory
        made: Episode = here.environment.episode(lease.task, tools.seed)  # type: ignore[attr-defined]
        return await episode(made, tools.conversation(tools.id), here.settings.max_turns)
    except (RolloutError, TokenMismatch, SystemExit) as error:
        return Trajectory(id=tools.id, samples=(), failure=_as_drop(error, here, lease))
    finally:
        here.returned(lease)


async def episode(made: Episode, conversation: Conversation, max_turns: int) -> Trajectory:
    """Drive `reset`, `step`, `reward`: the shallowest depth an environment can choose."""
    try:
        messages: Any = await made.reset()
        for turn in range(max_turns):
            try:
                reply = await conversation.turn(messages, tools=getattr(made, "tools", ()))
            except PromptTooLong:
                if not turn:
                    raise
                break  # no room for another turn: what there is, is the attempt
            after = await made.step(reply)
            if after.done:
                break
            messages = after.messages
        worth = await made.reward()
        reward, metrics = check_reward(worth, type(made).__qualname__)
        return conversation.trajectory(reward=reward, metrics=metrics)
    finally:
        if (close := getattr(made, "close", None)) is not None:
            await close()


async def attempt(
    run: Run, task: Task, *, samples: int, sampling: Sampling, seed: int, **of: str
) -> Group:
    """Play a task as training does, outside the accounts: for evaluation. The group's id is -1 -
    seed; `of` names a set that has its own environment."""
    return await run.rollout(Lease(id=-1 - seed, task=task), samples, sampling, **of)


def _refuse_bad_reward(trajectory: Trajectory, environment: Environment) -> None:
    if trajectory.failure is None:
        check_reward(trajectory.reward, type(environment).__qualname__)


def _as_drop(error: BaseException, here: Rollouts, lease: Lease) -> Drop:
    if isinstance(error, RolloutError):
        return Drop(reason=error.reason, detail=error.detail)
    if isinstance(error, TokenMismatch):
        return Drop(reason="token_mismatch", detail=error.detail)
    if isinstance(error, SystemExit):  # a grader that was a script; it must not end this process
        who = f"environment {type(here.environment).__name__}: task {lease.task.id!r}"
        return Drop(reason=EpisodeError.reason, detail=f"{who}: its code called exit({error.code})")
    limit = here.settings.episode_timeout_s
    return Drop(reason=EpisodeTimeout.reason, detail=f"ran past {limit:g} s")


@asynccontextmanager
async def _running(work: Any) -> AsyncIterator[None]:
    """Run `work` beside the block: its failure ends the block, the end of the block cancels it."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work, name="produce")
        yield
        task.cancel()
