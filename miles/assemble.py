"""Builds a stage: light components in the driver, trainer and engines in their workers, in
dependency order.

What a stage then does is `miles.stage`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from miles.batch import Receipt
from miles.buffer import Buffer
from miles.errors import ConfigError, EngineError, WorkerError
from miles.evaluation.fleet import EvalFleet
from miles.placement import Colocated, Placement, Split
from miles.protocols import Context, Handle, Spec
from miles.settings import Settings
from miles.stage import Shared, Stage
from miles.wire.remote import RemoteTrainer
from miles.workers import here
from miles.workers.engines import Engines
from miles.workers.pool import TRIES, Pool
from miles.workers.rollouts import Rollouts
from miles.workers.waiting import told_while
from miles.workers.weights import Weights

__all__ = ["build", "make_buffer", "make_context", "make_eval_fleet", "make_placement"]

_ENGINES_BACK_S = 240.0  # that a rollout worker waits for engines which died when it did
_RETRY_S = 1.0


async def build(plan: Any, index: int, shared: Shared, first: int) -> Stage:
    """Build stage `index` of a plan: light components here, trainer and engine in their workers, at
    once."""
    planned = plan.stages[index]
    settings, registry = planned.settings, shared.registry
    specs = {**planned.specs, "transport": _transport(plan.stages[index:], registry)}
    stage = Stage(name=planned.name, settings=settings, shared=shared, first=first)
    context = make_context(planned, registry, shared.directory)
    make = partial(_optional, registry, context)
    stage.tito = context.tito
    stage.environment_name = specs["environment"].name
    stage.selector = make(specs["selector"])
    stage.algorithm = make(specs["algorithm"])
    stage.evaluator = make(specs["evaluator"])
    stage.eval_sets = tuple(context.environments)
    if getattr(stage.evaluator, "place", "rollout") == "apart":
        stage.eval_fleet = make_eval_fleet(plan.stages[index:], shared.runtime, registry, context)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_place_trainer(stage, specs, context))
        tasks.create_task(_place_rollouts(stage, plan.stages[index:], context))
    stage.buffer = make_buffer(settings, version=shared.version, until=stage.last)
    stage.placement = make_placement(
        settings, buffer=stage.buffer, trainer=stage.trainer, engines=stage.engines
    )
    stage.weights = Weights(
        transport=make(specs["transport"]),
        trainer=stage.trainer,
        engines=stage.engines or Engines(shared.runtime, timeout_s=0, max_restarts=0),
        pool=stage.pool,
        placement=stage.placement,
        timeout_s=settings.publish_timeout_s,
        tell=partial(_published, shared),
    )
    engines = stage.engines.handles if stage.engines is not None and stage.samples else []
    sides = [stage.trainer.handle, *engines]
    await _agree(context.precision.fingerprint(), sides, settings.worker_timeout_s)
    return stage


def _transport(planned: Sequence[Any], registry: Any) -> Any:
    """That of the first of these stages whose engine samples: a stage that samples nothing is
    evaluated on the engine of a later one, which takes weights as that stage sends them."""
    sampling = (p for p in planned if _samples(registry, p.specs["engine"]))
    return next(sampling, planned[0]).specs["transport"]


def make_context(planned: Any, registry: Any, directory: Path) -> Context:
    """What the components of a stage are built from, with those that are plain data in it."""
    specs, settings = planned.specs, planned.settings
    context = Context(
        directory=directory,
        seed=settings.seed,
        settings=settings,
        plugins={"selection": registry.selection, "provenance": registry.provenance()},
        rewards=registry.rewards(),
        filters=registry.filters(),
        tools=registry.tools(),
        agents=registry.agents(),
    )
    for kind in ("model", "precision", "tito", "sandbox", "environment"):
        context = replace(context, **{kind: _optional(registry, context, specs[kind])})
    own = registry.environments(specs["evaluator"])
    built = {name: registry.build(spec, context) for name, spec in own.items()}
    return replace(context, environments=built)


def make_eval_fleet(
    planned: Sequence[Any], runtime: Any, registry: Any, context: Context
) -> EvalFleet | None:
    """Engines that only evaluate, for the evaluator of the first of these stages; None when no
    stage has an engine that samples. Nothing is started."""
    own = planned[0].specs
    sampling = next((p for p in planned if _samples(registry, p.specs["engine"])), None)
    if sampling is None:
        return None
    kinds = ("model", "precision", "tito", "sandbox", "environment")
    return EvalFleet(
        runtime=runtime,
        engine=[sampling.specs[kind] for kind in ("model", "precision", "engine")],
        rollouts=[
            *(own[kind] for kind in kinds if own[kind] is not None),
            *registry.environments(own["evaluator"]).values(),
        ],
        context=replace(context, settings=sampling.settings),
        count=int(own["evaluator"].config.get("workers", 1)),
    )


def make_buffer(settings: Settings, *, version: int, until: int) -> Buffer:
    """The buffer of a stage that is at `version` and ends at `until`."""
    return Buffer(
        groups_per_step=settings.groups_per_step,
        samples_per_group=settings.samples_per_group,
        max_lag=settings.max_lag,
        concurrency=settings.concurrency,
        oversample=settings.oversample,
        capacity=round(settings.capacity_factor * settings.groups_per_step),
        take_order=settings.take_order,
        free_each_sample=_by_sample(settings),
        max_retries=settings.max_retries if settings.unused == "retry" else 0,
        cancel_doomed=settings.cancel_doomed or (not settings.max_lag and settings.oversample > 0),
        version=version,
        until=until,
        starved_after_s=settings.starved_after_s,
    )


def make_placement(settings: Settings, *, buffer: Buffer, trainer: Any, engines: Any) -> Placement:
    """The placement of a stage; `engines` is None when nothing samples."""
    if settings.placement == "colocated" and engines is not None:
        return Colocated(
            buffer=buffer,
            trainer=trainer,
            engine=engines,
            # the pool gives groups up by their deadline; one may lose its worker again and again
            drain_timeout_s=TRIES * (settings.group_deadline_s + settings.silent_after_s),
        )
    return Split()


async def _agree(wanted: str, sides: Sequence[Handle], timeout_s: float) -> None:
    """Refuse a worker whose precision is not the driver's."""
    for handle in sides:
        for found in await handle.call_all("precision.fingerprint", timeout=timeout_s):
            if found != wanted:
                raise ConfigError(
                    f"precision: {handle.name} has fingerprint {found!r}, the driver {wanted!r}; "
                    "trainer, engine and driver must have one recipe"
                )


def _by_sample(settings: Settings) -> bool:
    if settings.granularity == "auto":
        return settings.max_lag > 0
    return settings.granularity == "sample"


def _optional(registry: Any, context: Context, spec: Spec | None) -> Any:
    return None if spec is None else registry.build(spec, context)


async def _place_trainer(stage: Stage, specs: Mapping[str, Any], context: Context) -> None:
    parts = [specs[k] for k in ("model", "precision", "trainer", "transport")]
    world = int(specs["trainer"].config.get("workers", 1))
    handle = await _worker(stage.shared, "trainer", parts, context, world)
    stage.trainer = RemoteTrainer(
        handle,
        timeout_s=stage.settings.worker_timeout_s,
        step_timeout_s=stage.settings.step_timeout_s,
        version=stage.shared.version,
    )


async def _place_rollouts(stage: Stage, planned: Sequence[Any], context: Context) -> None:
    """Engine workers, and rollout workers that know them."""
    own = planned[0].specs
    stage.samples = _samples(stage.shared.registry, own["engine"])
    kinds = ["model", "precision", "tito", "sandbox", "environment"]
    if not stage.samples:
        kinds.append("engine")  # it replays demonstrations, in the rollout worker itself
    parts = [own[kind] for kind in kinds if own[kind] is not None]
    parts += stage.shared.registry.environments(own["evaluator"]).values()
    roles = rollout_roles(stage.settings.rollout_workers)
    await _end_others(stage.shared, roles)
    async with asyncio.TaskGroup() as tasks:
        engine = tasks.create_task(_place_engine(stage, planned, context))
        workers = [tasks.create_task(_worker(stage.shared, r, parts, context, 1)) for r in roles]
    max_len = engine.result()
    handles = [worker.result() for worker in workers]
    if not handles:
        handles = [await _play_here(stage, own, context)]
    else:
        await stage.shared.end_rollouts()

    async def connect(handle: Handle) -> Handle:
        doors = [] if stage.engines is None else stage.engines.doors
        await handle.call("rollouts.connect", doors, max_len, timeout=60.0)
        return handle

    async def restart(handle: Handle) -> Handle:
        await stage.shared.runtime.end(handle)
        stage.shared.handles.pop(handle.name, None)
        new = await _worker(stage.shared, handle.name, parts, context, 1)
        await _connect_again(partial(connect, new), new, ping_s=stage.settings.silent_after_s)
        version, limit = stage.buffer.published_version, stage.settings.worker_timeout_s
        what = "published" if stage.samples else "replaying"  # of its own engine
        await new.call(f"rollouts.{what}", version, timeout=limit)
        return new

    stage.pool = Pool(
        await asyncio.gather(*(connect(handle) for handle in handles)),
        restart=restart if workers else here.restart,
        settings=stage.settings,
    )


async def _connect_again(
    connect: Callable[[], Awaitable[Handle]], handle: Handle, *, ping_s: float
) -> None:
    """Connect a rollout worker that was started again. Engines may have died with it, as with their
    machine; they are started again meanwhile, and then listen elsewhere."""
    until = time.monotonic() + _ENGINES_BACK_S
    while True:
        try:
            await connect()
            return
        except (WorkerError, EngineError):
            if time.monotonic() >= until:
                raise
        await handle.call("rollouts.ping", timeout=ping_s)  # raises if it was the worker itself
        await asyncio.sleep(_RETRY_S)


async def _play_here(stage: Stage, own: Mapping[str, Any], context: Context) -> here.Here:
    """Rollouts in the driver, of components that it has anyway."""
    await stage.shared.end_rollouts()
    parts = {"environment": context.environment, "tito": context.tito, "sandbox": context.sandbox}
    parts |= {f"environment:{name}": part for name, part in context.environments.items()}
    if not stage.samples:
        parts["engine"] = stage.shared.registry.build(own["engine"], context)
    stage.shared.here = here.Here(Rollouts(parts, context))
    return stage.shared.here


async def _place_engine(stage: Stage, planned: Sequence[Any], context: Context) -> int | None:
    """The engine of the run that samples, now or (for evaluations) in a later stage; its longest
    context, in tokens."""
    registry, shared = stage.shared.registry, stage.shared
    sampling = next((p for p in planned if _samples(registry, p.specs["engine"])), None)
    place = getattr(stage.evaluator, "place", "rollout")
    evaluates = stage.evaluator is not None and place == "rollout"
    if sampling is None or not (stage.samples or evaluates):
        return None
    parts = [sampling.specs[k] for k in ("model", "precision", "engine", "transport")]
    around = replace(context, settings=sampling.settings)
    count = int(sampling.specs["engine"].config.get("workers", 1))
    engines = shared.engines
    if engines is None:
        engines = shared.engines = Engines(
            shared.runtime,
            timeout_s=stage.settings.worker_timeout_s,
            max_restarts=stage.settings.max_restarts,
            silent_after_s=stage.settings.silent_after_s,
        )
    await engines.build(parts, around, count=count, variables=_variables(registry, parts))
    stage.engines = engines
    longest = (await _first_health(engines, registry.awaits(parts[2]), shared)).get("max_len")
    return int(longest or context.model.decoder().max_len)


async def _first_health(engines: Engines, awaits: str, shared: Shared) -> Mapping[str, float]:
    """The first answer of new engines, whose servers may take minutes to start."""

    def say(text: str) -> None:
        shared.tracking.moment("waited", {"text": text})

    async with told_while(f"engine: {awaits}", say=say):
        return await engines.health()


def _published(shared: Shared, receipt: Receipt) -> None:
    shared.tracking.moment("weights_published", msgspec.to_builtins(receipt))


def _samples(registry: Any, spec: Spec) -> bool:
    engine = registry.component("engine", spec.name)
    if engine.samples and getattr(engine, "process", "worker") == "rollout":
        raise ConfigError(
            f"engine {spec.name!r} samples in rollout workers, where no transport brings weights"
        )
    return bool(engine.samples)


def rollout_roles(count: int) -> list[str]:
    """Names of so many rollout workers."""
    return ["rollout"] if count == 1 else [f"rollout-{i}" for i in range(count)]


async def _end_others(shared: Shared, roles: Sequence[str]) -> None:
    """End rollout workers of a stage that had another number of them."""
    for role in [r for r in shared.handles if r.startswith("rollout") and r not in roles]:
        await _end_worker(shared, role)


async def _end_worker(shared: Shared, role: str) -> None:
    handle, _ = shared.handles.pop(role)
    await shared.runtime.end(handle)


def _variables(registry: Any, parts: Sequence[Spec]) -> dict[str, str]:
    """What a worker of these parts has set: libraries read it once."""
    return {name: value for spec in parts for name, value in registry.variables(spec).items()}


async def _worker(
    shared: Shared, role: str, parts: Sequence[Spec], context: Context, world: int
) -> Handle:
    """The running worker of this role, built anew when it was built for something else."""
    wanted = (tuple(parts), context.settings)
    if (kept := shared.handles.get(role)) is not None:
        handle, built = kept
        before, now = (_variables(shared.registry, each) for each in (built[0], parts))
        if handle.world == world and before == now:
            if built != wanted:
                await shared.runtime.rebuild(handle, parts, context)
                shared.handles[role] = (handle, wanted)
            return handle
        await _end_worker(shared, role)
    started: Handle = await shared.runtime.start(role, parts, context, world=world)
    shared.handles[role] = (started, wanted)
    return started
