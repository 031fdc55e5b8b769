"""One stage of a run: its components, built in dependency order, and what the loop asks of them.

The loop itself is `miles.loop`; directories, resuming and signals are `miles.run`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from miles import checkpoint, loop
from miles.batch import Batch, Receipt, Score, Skipped, Tokens, Update, flatten
from miles.buffer import Buffer, Lease
from miles.errors import BadReward, EngineError, MilesError, RoutingError, RunError, WorkerError
from miles.evaluation.evaluations import Evaluations, Snapshots, Watched
from miles.evaluation.fleet import EvalFleet
from miles.placement import Placement
from miles.plain import of_plain, to_plain
from miles.records.measure import Measure
from miles.settings import Settings
from miles.shared import Shared
from miles.threads import in_thread
from miles.types import Array, Drop, Group, Sampling, Task
from miles.wire.remote import RemoteTrainer
from miles.workers.engines import Engines
from miles.workers.pool import Pool
from miles.workers.probe import probe, wants_probe
from miles.workers.waiting import tell
from miles.workers.weights import Weights

__all__ = ["Shared", "Stage"]

log = logging.getLogger(__name__)
_HOPELESS = 20  # steps' worth of groups that fail in a row before the run gives up
_OF_ENGINES = (EngineError.reason, RoutingError.reason)
_SAMPLE_EVERY = 25  # steps between texts kept for people to read
_parts = partial(msgspec.to_builtins, builtin_types=(bytes,))


class Stage:
    """Implements `miles.loop.Run`."""

    def __init__(self, *, name: str, settings: Settings, shared: Shared, first: int) -> None:
        self.name = name
        self.settings = settings
        self.shared = shared
        self.first = first  # version at which the stage began
        self.last = first + settings.steps
        self.hook = shared.registry.hook
        self.measure = Measure()
        self.timing = self.measure.timing
        self.leases: list[Lease] = []  # to start again before anything new
        self.engines: Engines | None = None  # that sample now (or, for evaluations, later)
        self.samples = False  # whether they sample for training in this stage
        self.failures = 0  # groups that failed since the last one that did not
        self.bad_rewards = 0  # of those, for their reward
        self.failed: Group | None = None  # the last of them
        self.interrupted = False
        # metrics, so far, of a step that was taken and is not finished
        self.row: Callable[[Measure], dict[str, Any]] | None = None
        self.published = False  # whether the engine has had weights in this stage
        self.eval_fleet: EvalFleet | None = None  # engines that only evaluate
        self.eval_sets: Collection[str] = ()  # those with an environment of their own
        self.evaluations = Evaluations(self, Snapshots(shared.directory / "snapshots"))

    # set by `build`
    environment_name: str
    selector: Any
    tito: Any
    algorithm: Any
    trainer: RemoteTrainer
    evaluator: Any
    pool: Pool
    weights: Weights
    buffer: Buffer
    placement: Placement

    # ---- what the loop asks

    def steps(self) -> Iterable[int]:
        """Versions still to be made."""
        version = self.shared.version
        self.measure.begin()
        while version < self.last and not self.interrupted:
            version += 1
            yield version

    def lease(self) -> Lease | None:
        """A lease from before a resume, or under a new id a task whose group grew too old, or the
        selector's next."""
        if self.leases:
            return self.leases.pop(0)
        task = self.buffer.unused.pop(0) if self.buffer.unused else self.selector.next()
        if task is None:
            return None
        group, self.shared.next_group = self.shared.next_group, self.shared.next_group + 1
        return Lease(id=group, task=task)

    async def rollout(
        self,
        lease: Lease,
        samples: int | None = None,
        sampling: Sampling | None = None,
        **of: str,
    ) -> Group:
        """In a rollout worker. Raises what ended it, if that was not the group's own affair."""
        returned = None
        if self.buffer.free_each_sample and sampling is None:
            returned = partial(self.buffer.returned, lease.id)
        try:
            group = await self.pool.group(lease, samples, sampling, returned=returned, **of)
        except MilesError as error:
            error.add_note(f"task {lease.task.id!r} of environment {self.environment_name!r}")
            raise
        if group.failure is not None and group.failure.reason in _OF_ENGINES:
            await self.weights.recover()
        return group

    def judge(self, group: Group) -> Drop | None:
        """A failure, or what the selector says.

        Raises `RunError` when every reward of a whole step's worth of groups was bad (they never
        train as zero), and when many steps' worth failed in a row for whatever reason.
        """
        self.selector.observe(group)
        self.measure.came_back(group)
        drop = group.failure
        if drop is None:
            self.failures = self.bad_rewards = 0
            return self.selector.admit(group)  # type: ignore[no-any-return]
        self.failures, self.failed = self.failures + 1, group
        self.bad_rewards += drop.reason == BadReward.reason
        patience = self.settings.groups_per_step
        bad_only = self.bad_rewards == self.failures >= patience
        if bad_only or self.failures >= _HOPELESS * patience:
            what = "gave no usable reward" if bad_only else "failed"
            raise RunError(
                f"environment {self.environment_name!r}: all of the last {self.failures} groups "
                f"{what}; the last, task {group.task.id!r}: {drop.reason}: {drop.detail}"
            )
        return drop

    async def prepare(self, groups: Sequence[Group]) -> Batch:
        """Passes over the samples, then the algorithm in a thread, then hooks; beside them, engines
        answer the mismatch probe."""
        probing = asyncio.create_task(self._probe(groups), name="mismatch probe")
        try:
            if self.settings.placement == "colocated":  # engines sleep during the passes
                await asyncio.wait({probing})
            batch = await self._learn(groups, await self._passes(groups))
            batch = replace(batch, probe=await probing)
        finally:
            probing.cancel()
        return self.hook.prepared(groups=groups, batch=batch)  # type: ignore[no-any-return]

    async def _passes(self, groups: Sequence[Group]) -> Mapping[str, Array]:
        if not (needs := self.algorithm.needs()):
            return {}
        tokens = flatten([s for g in groups for s in g.samples])
        async with self.placement.training():
            with self.timing("train"):
                return {name: await self.trainer.logprobs(tokens, name) for name in needs}

    async def _learn(self, groups: Sequence[Group], passes: Mapping[str, Array]) -> Batch:
        limit = self.settings.worker_timeout_s
        name = f"{type(self.algorithm).__name__}.prepare"
        try:
            return await in_thread(
                partial(self.algorithm.prepare, groups, passes), name=name, timeout_s=limit
            )
        except TimeoutError as error:
            if str(error):
                raise  # its own
            raise RunError(
                f"stage {self.name}: {name} of {len(groups)} groups was not done after {limit:g} s "
                "(worker_timeout_s)"
            ) from None

    async def _probe(self, groups: Sequence[Group]) -> Tokens | None:
        version, engines = self.trainer.version, self.engines
        if engines is None or not self.samples or self.buffer.published_version != version:
            return None
        if not wants_probe(groups, version):
            return None
        try:
            return await probe(groups, version, engines.score)
        except (WorkerError, EngineError) as error:
            self.shared.notices.warn(f"no mismatch probe in step {version + 1}", str(error))
            return None

    async def send_weights(self) -> Receipt | None:
        """To the rollout engine: every `publish_every` steps, and whatever the stage begins and
        ends with."""
        if self.interrupted:  # nobody samples any more, and there is little time
            return None
        version = self.trainer.version
        edge = not self.published or version == self.last
        if not edge and (version - self.first) % self.settings.publish_every:
            return None
        await self.evaluations.settle()
        self.published = True
        if self.samples:
            receipt = await self.weights.publish()
            await self._ask_engines(self.weights.publish)
        else:
            receipt = Receipt(version=version, digest="", bytes=0, seconds=0.0)
            await self.pool.replaying(version)
        self.measure.rollouts(await self.pool.metrics())
        return receipt

    async def evaluate(self, step: int) -> None:
        """At the stage's beginning and end and every `eval_every` steps; a version is scored once.

        A synchronous stage waits for a score on its own engines, since it could do nothing else.
        """
        every = self.settings.eval_every
        due = step in (self.first, self.last) or (every and (step - self.first) % every == 0)
        if self.interrupted or not due or self.evaluator is None or step == self.shared.evaluated:
            return
        self.shared.evaluated = step
        edge = step in (self.first, self.last)
        wait = edge or not self.settings.max_lag
        await self.evaluations.begin(step, wait=wait, last=step == self.last)

    async def end_early(self) -> None:
        """The tasks ran out before the steps did: what is due at the stage's end is due now."""
        self.last = self.shared.version
        if self.buffer.published_version != self.last:
            await loop.publish(self)
        await self.evaluate(self.last)

    async def score(self, version: int) -> Sequence[Score | Skipped]:
        """On the rollout engines."""
        if self.engines is None:
            return [Skipped(set="all", reason="no stage of this run samples tokens")]
        if not self.samples:
            async with self.placement.publishing():
                await self.weights.publish()
        elif (served := self.buffer.published_version) != version:
            every = self.settings.publish_every
            reason = f"the engines serve version {served} (publish_every is {every})"
            return [Skipped(set="all", reason=reason)]
        watched = Watched(partial(loop.attempt, self), version, own=self.eval_sets)
        results = watched.judged(await self.evaluator.evaluate(version, watched))
        if self.samples:
            await self._ask_engines(self.weights.recover)
        return results

    async def _ask_engines(self, mend: Callable[[], Awaitable[Any]]) -> None:
        if self.engines is not None:
            try:
                health = await self.engines.health()
            except (WorkerError, EngineError):
                await mend()
                health = await self.engines.health()
            self.measure.engine_health(health)

    def finish_step(self, step: int, groups: Sequence[Group], batch: Batch, update: Update) -> None:
        """Account for the step on disk, then tell everyone."""
        self.shared.version = update.version
        self._write_ledger(step)
        metrics = self._row(self.measure, step=step, groups=groups, batch=batch, update=update)
        self.row = None
        self.shared.tracking.moment("step_finished", metrics)
        for text in [*update.warnings, *self.measure.no_signal(groups)]:
            self.shared.tracking.moment("warned", {"text": text})
        if step % _SAMPLE_EVERY == 0 or step == self.last:
            self.shared.keep_text(step, self.name, groups[0], self.tito)
        self.hook.step_finished(step=step, groups=groups, update=update, metrics=metrics)

    def _row(self, measure: Measure, *, step: int, **of: Any) -> dict[str, Any]:
        """`of` are the step's groups, batch and update."""
        metrics = measure.step(step=step, stage=self.name, buffer=self.buffer, **of)
        return {**metrics, "stage_step": step - self.first}

    def _row_so_far(self) -> dict[str, Any] | None:
        """Of a step that is not finished; accounts that do not add up cost no checkpoint."""
        try:
            return None if self.row is None else self.measure.so_far(self.row)
        except RunError as error:
            log.warning("the checkpoint has no metrics of its step: %s", error)
            return None

    def _write_ledger(self, step: int) -> None:
        if ended := self.buffer.ended:
            self.measure.ended(ended)
            self.shared.ledger.write(step=step, started=self.shared.next_group, ended=ended)
            self.buffer.ended = []

    # ---- checkpoints

    async def watch_waiting(self) -> None:
        """Say now and then what the trainer waits for, while it does; ends only when cancelled."""

        def say(text: str) -> None:
            self.shared.tracking.moment("warned", {"text": text})

        engines = self.engines if self.samples else None
        await tell(self.buffer, engines, first_s=self.settings.starved_after_s / 8, say=say)

    async def checkpoint(
        self, step: int, groups: Sequence[Group], batch: Batch, update: Update
    ) -> None:
        """When due. The stage's last step is written by `finish`, after its evaluation."""
        self.row = partial(self._row, step=step, groups=groups, batch=batch, update=update)
        every = self.settings.checkpoint_every
        if every and (step - self.first) % every == 0 and step != self.last:
            self.shared.version = step
            await self.save()

    async def finish(self) -> Path:
        """The checkpoint after the loop has ended, the trainer awake for it."""
        async with self.placement.training():
            return await self.save()

    async def save(self) -> Path:
        """One checkpoint of everything, now."""
        version = self.trainer.version
        self._write_ledger(version)
        folder = self.shared.directory / "checkpoints"

        async def fill(directory: Path) -> Mapping[str, Any]:
            await self.trainer.save(directory)
            self._describe(directory)
            (directory / "selector.json").write_text(json.dumps(self.selector.state_dict()))
            return {**self.standing(), "row": self._row_so_far()}

        path = await checkpoint.write(folder, version, fill)
        checkpoint.prune(folder, self.settings.keep_checkpoints)
        self.shared.tracking.moment("checkpoint_saved", {"step": version, "directory": str(path)})
        self.hook.checkpoint_saved(step=version, directory=str(path))
        return path

    def standing(self) -> Mapping[str, Any]:
        """Plain values from which `stand` goes on: where the run is, and every open lease."""
        shared = self.shared
        leases = [*self.buffer.leases(), *self.leases]
        return {
            "version": self.trainer.version,
            "stage": self.name,
            "stage_first": self.first,
            "next_group": shared.next_group,
            "evaluated": shared.evaluated,
            "ledger_offset": shared.ledger.offset,
            "leases": [{"id": x.id, "task": to_plain(_parts(x.task))} for x in leases],
            "unused": to_plain(_parts(self.buffer.unused)),
            "retried": dict(self.buffer.retried),
            "lengths": self.measure.lengths(),
        }

    def _describe(self, directory: Path) -> None:
        """What the weights in a directory need to be used again."""
        self.tito.save(directory / "model")
        (directory / "config.json").write_text(json.dumps(self.shared.config, indent=1))
        (directory / "plugins.json").write_text(
            json.dumps(self.shared.registry.provenance(), indent=1)
        )

    async def snapshot(self, folder: Path) -> Path:
        """Write the trainer's weights alone, for evaluations: complete, or not at all."""
        version = self.trainer.version

        async def fill(directory: Path) -> Mapping[str, Any]:
            await self.trainer.save(directory, weights_only=True)
            self._describe(directory)
            return {"version": version, "stage": self.name}

        return await checkpoint.write(folder, version, fill)

    def interrupt(self) -> None:
        """End after the current step; what was started stays leased."""
        self.interrupted = True
        if hasattr(self, "buffer"):
            self.buffer.stop()
        if self.shared.evaluated in self.evaluations.stop():
            self.shared.evaluated = -1  # to be scored again

    def restore(self, path: Path, state: Mapping[str, Any]) -> None:
        """Selector, leases and unused tasks of a checkpoint in the middle of this stage."""
        self.selector.load_state_dict(json.loads((path / "selector.json").read_text()))
        self.stand(state)

    def stand(self, state: Mapping[str, Any]) -> None:
        """Leases and unused tasks as `standing` told them."""
        self.leases = [
            Lease(id=x["id"], task=msgspec.convert(of_plain(x["task"]), Task))
            for x in state["leases"]
        ]
        self.buffer.unused = msgspec.convert(of_plain(state["unused"]), list[Task])
        self.buffer.retried = Counter(state["retried"])
        self.measure.go_on(state.get("lengths", {}))
