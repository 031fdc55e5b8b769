"""Which versions of a stage are being scored, where, and what becomes of the results.

What a score is belongs to the evaluator, engines of its own to `miles.evaluation.fleet`.
Nothing that goes wrong here stops training: it is a `Skipped` with a reason.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from miles import checkpoint
from miles.batch import Score, Skipped, version_fault
from miles.evaluation.fleet import EvalFleet
from miles.types import Group, Sampling, Task

__all__ = ["Evaluations", "Snapshots", "Watched", "guarded", "score_directory"]

_log = logging.getLogger(__name__)
_GRACE_S = 5.0  # beyond an evaluator's own limit, which it keeps if it is one of ours

Results = Sequence[Score | Skipped]


class Ground(Protocol):
    """What evaluations need of a stage; `miles.stage` is it."""

    evaluator: Any
    buffer: Any
    trainer: Any
    hook: Any
    measure: Any
    shared: Any
    eval_fleet: EvalFleet | None

    @property
    def timing(self) -> Callable[[str], AbstractContextManager[None]]: ...

    async def score(self, version: int) -> Results:
        """On the engines that train."""

    async def snapshot(self, folder: Path) -> Path:
        """Write one of the trainer's weights, complete or not at all."""


class Watched:
    """Attempts as an evaluator is given them; which versions served each set is noted."""

    def __init__(
        self,
        play: Callable[..., Awaitable[Group]] | None,
        version: int,
        *,
        own: Collection[str] | None = None,
        directory: Path | None = None,
    ) -> None:
        """`own` are the sets with an environment of their own (None: any may have one); `play` is
        None where nothing can be played."""
        self.directory = directory
        self._play = play
        self._version = version
        self._own = own
        self._faults: dict[str, str] = {}

    async def __call__(
        self, task: Task, *, samples: int, sampling: Sampling, seed: int, of: str = ""
    ) -> Group:
        if self._play is None:
            raise TypeError("an evaluator whose place is `directory` has no engines to play on")
        more = {"of": of} if self._own is None or of in self._own else {}
        group = await self._play(task, samples=samples, sampling=sampling, seed=seed, **more)
        good = [t for t in group.trajectories if t.failure is None]
        if fault := version_fault(good, self._version):
            self._faults.setdefault(of, fault)
        return group

    def judged(self, results: Results) -> Results:
        """The same results, a score that is not of this version alone `Skipped`."""
        return [self._judged(result) for result in results]

    def _judged(self, result: Score | Skipped) -> Score | Skipped:
        if isinstance(result, Skipped):
            return result
        if result.version != self._version:
            why = f"the score is of version {result.version}, not {self._version}"
            return Skipped(set=result.set, reason=why)
        fault = self._faults.get(result.set) or self._faults.get("")
        return Skipped(set=result.set, reason=fault) if fault else result


class Snapshots:
    """Weights to score, in a folder on disk; the stage writes them."""

    sealed = True
    """Whether each has a manifest, against which it is to be checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def left(self, version: int) -> list[tuple[int, Path]]:
        """(step, directory) of those that a killed run left; what was not complete, and what is
        of weights later than `version`, is removed."""
        for partial_one in self.folder.glob(".step_*"):
            await self.remove(partial_one)
        kept = []
        for path in checkpoint.find(self.folder):
            step = int(path.name.partition("_")[2])
            if step > version:
                await self.remove(path)
            else:
                kept.append((step, path))
        return kept

    async def remove(self, directory: Path) -> None:
        """It is scored, or of no use."""
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


class Evaluations:
    """Of one stage: on the rollout engines one at a time, from snapshots in order, beside the
    training."""

    def __init__(self, ground: Ground, snapshots: Snapshots) -> None:
        self._ground = ground
        self._snapshots = snapshots
        self._sharing: asyncio.Task[None] | None = None
        self._sharing_version = -1
        self._holding: set[asyncio.Task[None]] = set()  # those for which new groups are held
        self._pending: dict[int, asyncio.Task[None]] = {}
        self._fault: BaseException | None = None
        self._turn = asyncio.Lock()
        self._taken_up = False

    @property
    def pending(self) -> tuple[int, ...]:
        """Versions of which a snapshot waits or is being scored."""
        return tuple(sorted(self._pending))

    @property
    def timeout_s(self) -> float:
        """Seconds one evaluation may take."""
        return float(getattr(self._ground.evaluator, "timeout_s", 600.0))

    async def begin(self, version: int, *, wait: bool, last: bool) -> None:
        """Have the trainer's version scored. On rollout engines new groups are held until it is;
        `wait` also makes the caller wait for it. After the `last` one nothing is pending."""
        if getattr(self._ground.evaluator, "place", "rollout") == "rollout":
            await self.settle()
            self._share(version)
            if wait:
                await self.settle(grace_s=_GRACE_S)
            return
        self._raise()
        if not self._taken_up:
            await self._take_up(version)
        if version not in self._pending:
            await self._queue(version, last=last)
        if last and self._pending:
            with self._ground.timing("eval_wait"):
                await asyncio.wait(self._pending.values())
            self._raise()

    # ---- on the engines that train

    def _share(self, version: int) -> None:
        buffer = self._ground.buffer
        buffer.hold()
        task = asyncio.create_task(self._on_rollout(version), name=f"evaluate {version}")
        self._holding.add(task)
        task.add_done_callback(self._let_go)  # also when it never began
        self._sharing, self._sharing_version = task, version

    def _let_go(self, task: asyncio.Task[None]) -> None:
        """New groups need not wait for it: it has ended, or was given up."""
        if task in self._holding:
            self._holding.remove(task)
            self._ground.buffer.release()
        elif not task.cancelled():
            task.exception()  # of one that was given up; nobody else will ask

    async def _on_rollout(self, version: int) -> None:
        results = await guarded(version, partial(self._ground.score, version))
        if self._sharing is asyncio.current_task():  # not given up meanwhile
            self._record(version, results)

    async def settle(self, *, grace_s: float = 0.0) -> None:
        """Wait for what plays on the engines that train, `timeout_s` at most; then skip it."""
        task = self._sharing
        if task is None:
            return
        with self._ground.timing("eval_wait"):
            done, _ = await asyncio.wait({task}, timeout=self.timeout_s + grace_s)
            if not done:
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE_S)
        if self._sharing is not task:
            return  # the run was interrupted meanwhile
        self._sharing = None
        if not task.done():  # it does not stop when it is told to; nobody waits for it
            self._let_go(task)
        if task.cancelled() or not task.done():
            reason = f"timeout: not done after {self.timeout_s:g} s, and weights wait to be sent"
            self._record(self._sharing_version, [Skipped(set="all", reason=reason)])
        else:
            task.result()  # recording it may have raised: a bug, not the evaluation's

    # ---- from snapshots

    async def _take_up(self, version: int) -> None:
        """Snapshots that a killed run left: those of this line of weights are scored yet."""
        self._taken_up = True
        for step, directory in await self._snapshots.left(version):
            self._start(step, directory)

    async def _queue(self, version: int, *, last: bool) -> None:
        """Take a snapshot, if there is room for one; the last version waits for room in any
        case."""
        evaluator, ground = self._ground.evaluator, self._ground
        limit = int(getattr(evaluator, "snapshots", 1))
        if len(self._pending) >= limit:
            if not last and getattr(evaluator, "overflow", "skip") == "skip":
                behind = ", ".join(map(str, self.pending))
                reason = f"overflow: snapshots is {limit}, and versions {behind} are not scored yet"
                self._record(version, [Skipped(set="all", reason=reason)])
                return
            with ground.timing("eval_wait"):
                while len(self._pending) >= limit:
                    await asyncio.wait(self._pending.values(), return_when=asyncio.FIRST_COMPLETED)

        async def take() -> Results:
            with ground.timing("eval_wait"):
                self._start(version, await ground.snapshot(self._snapshots.folder))
            return []

        self._record(version, await guarded(version, take))

    def _start(self, version: int, directory: Path) -> None:
        task = asyncio.create_task(
            self._from_snapshot(version, directory), name=f"evaluate {version}"
        )
        self._pending[version] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._pending[version]
            if not task.cancelled() and self._fault is None:
                self._fault = task.exception()

        task.add_done_callback(ended)

    def _raise(self) -> None:
        """What recording a score from a snapshot raised: a bug, not the evaluation's."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    async def _from_snapshot(self, version: int, directory: Path) -> None:
        """Score it, record the result at its own step, and delete the snapshot; one that is
        cancelled stays for a resumed run."""
        ground = self._ground
        scoring = partial(
            score_directory, ground.evaluator, version, directory,
            fleet=ground.eval_fleet, sealed=self._snapshots.sealed,
        )  # fmt: skip
        async with self._turn:
            results = await guarded(version, scoring)
        self._record(version, results)
        await self._snapshots.remove(directory)

    def _record(self, step: int, results: Results) -> None:
        """Tell everyone of scores of the version that `step` made, whenever they come."""
        ground = self._ground
        lag = ground.trainer.version - step
        for result in results:
            data = msgspec.to_builtins(result)
            data.update(data.pop("metrics", {}))  # logged beside the score, `eval/<set>/<name>`
            if isinstance(result, Skipped):
                data["skipped"] = data.pop("reason")
                what = f"evaluation of version {step}, {result.set}"
                ground.shared.notices.warn(what, result.reason)
            ground.shared.tracking.moment("evaluated", {"step": step, **data, "lag_steps": lag})
            ground.hook.evaluated(step=step, result=result)
            ground.measure.evaluated(lag)

    # ---- the end

    def stop(self) -> set[int]:
        """The run was interrupted: give up what is going on. Snapshots stay for a resumed run; the
        versions that have no score yet are returned, to be scored again."""
        unscored = set(self._pending)
        for each in self._pending.values():
            each.cancel()
        task, self._sharing = self._sharing, None
        if task is not None and not task.done():
            task.cancel()
            unscored.add(self._sharing_version)
        return unscored

    async def close(self) -> None:
        """Give up what is going on, and end the fleet."""
        self.stop()
        if self._pending:
            await asyncio.wait(self._pending.values(), timeout=_GRACE_S)
        if self._ground.eval_fleet is not None:
            await self._ground.eval_fleet.close()


async def score_directory(
    evaluator: Any,
    version: int,
    directory: Path,
    *,
    fleet: EvalFleet | None,
    sealed: bool = True,
) -> Results:
    """Score a checkpoint directory: on a fleet, unless the evaluator only wants the directory.
    `sealed` says that it has a manifest, against which it is checked first. May raise whatever goes
    wrong."""
    limit = float(getattr(evaluator, "timeout_s", 600.0))
    if getattr(evaluator, "place", "rollout") == "directory":
        if sealed:
            await asyncio.to_thread(checkpoint.verify, directory)
        play = None
    elif fleet is None:
        return [Skipped(set="all", reason="no stage of this run samples tokens")]
    else:
        await fleet.load(directory, version, sealed=sealed)
        play = fleet.attempt
    watched = Watched(play, version, directory=directory)
    try:
        async with asyncio.timeout(limit + _GRACE_S):
            return watched.judged(await evaluator.evaluate(version, watched))
    except TimeoutError:
        return [Skipped(set="all", reason=f"timeout: not done after {limit:g} s")]


async def guarded(version: int, scoring: Callable[[], Awaitable[Results]]) -> Results:
    """What scoring gives, or a `Skipped` that says what it raised."""
    try:
        return await scoring()
    except Exception as error:  # noqa: BLE001 - evaluators, environments and their processes are other people's; training goes on
        _log.exception("evaluation of version %d", version)
        return [Skipped(set="all", reason=_words(error))]


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
