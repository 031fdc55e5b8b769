"""Builds a stage: light components in the driver, trainer and engines in their workers, in
dependency order.

What a stage then does is `miles.stage`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from miles.buffer import Buffer
from miles.errors import ConfigError
from miles.placement import Colocated, Split
from miles.protocols import Context, Handle, Spec
from miles.remote import RemoteEngine, RemoteTrainer
from miles.settings import Settings
from miles.stage import Shared, Stage

__all__ = ["build"]


async def build(plan: Any, index: int, shared: Shared, first: int) -> Stage:
    """Build stage `index` of a plan: light components here, trainer and engine in their workers, at
    once."""
    planned = plan.stages[index]
    specs, settings, registry = planned.specs, planned.settings, shared.registry
    stage = Stage(name=planned.name, settings=settings, shared=shared, first=first)
    context = Context(
        directory=shared.directory,
        seed=settings.seed,
        settings=settings,
        plugins={"selection": registry.selection, "provenance": registry.provenance()},
        rewards=registry.rewards(),
        filters=registry.filters(),
        tools=registry.tools(),
        agents=registry.agents(),
    )
    for kind in ("model", "precision", "tito", "environment"):
        context = replace(context, **{kind: registry.build(specs[kind], context)})
    make = partial(_optional, registry, context)
    stage.tito, stage.environment = context.tito, context.environment
    stage.environment_name = specs["environment"].name
    stage.sandbox = make(specs["sandbox"])
    stage.selector = make(specs["selector"])
    stage.algorithm = make(specs["algorithm"])
    stage.transport = make(specs["transport"])
    stage.evaluator = make(specs["evaluator"])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_place_trainer(stage, specs, context))
        tasks.create_task(_place_engines(stage, plan.stages[index:], context))
    sides = [stage.trainer.handle, *([stage.engine.handle] if stage.engine.samples else ())]
    await _agree(context.precision.fingerprint(), sides, settings.worker_timeout_s)
    stage.buffer = Buffer(
        groups_per_step=settings.groups_per_step,
        samples_per_group=settings.samples_per_group,
        max_lag=settings.max_lag,
        concurrency=settings.concurrency,
        oversample=settings.oversample,
        capacity=round(settings.capacity_factor * settings.groups_per_step),
        take_order=settings.take_order,
        free_each_sample=_by_sample(settings),
        retry_unused=settings.unused == "retry",
        version=shared.version,
        until=stage.last,
        starved_after_s=settings.starved_after_s,
    )
    stage.placement = Split()
    if settings.placement == "colocated":
        stage.placement = Colocated(
            buffer=stage.buffer,
            trainer=stage.trainer,
            engine=stage.engine,
            drain_timeout_s=settings.episode_timeout_s,
        )
    return stage


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
        handle, timeout_s=stage.settings.worker_timeout_s, version=stage.shared.version
    )


async def _place_engines(stage: Stage, planned: Sequence[Any], context: Context) -> None:
    """The rollout engine, and for evaluations the next one of the run that samples."""
    registry, own = stage.shared.registry, planned[0]
    sampling = next((p for p in planned if _samples(registry, p.specs["engine"])), None)
    if sampling is not None and (sampling is own or stage.evaluator is not None):
        parts = [sampling.specs[k] for k in ("model", "precision", "engine", "transport")]
        around = replace(context, settings=sampling.settings)
        handle = await _worker(stage.shared, "engine", parts, around, 1)
        stage.sampler = RemoteEngine(handle, timeout_s=stage.settings.worker_timeout_s)
        longest = (await stage.sampler.health()).get("max_len")
        stage.sampler_max_len = int(longest or context.model.decoder().max_len)
    if sampling is own:
        stage.engine, stage.max_len = stage.sampler, stage.sampler_max_len
    else:
        stage.engine = registry.build(own.specs["engine"], context)


def _samples(registry: Any, spec: Spec) -> bool:
    engine = registry.component("engine", spec.name)
    in_driver = getattr(engine, "process", "worker") == "driver"
    if engine.samples and in_driver:
        raise ConfigError(f"engine {spec.name!r} samples, so it cannot live in the driver")
    return bool(engine.samples)


async def _worker(
    shared: Shared, role: str, parts: Sequence[Spec], context: Context, world: int
) -> Handle:
    """The running worker of this role, built anew when it was built for something else."""
    wanted = (tuple(parts), context.settings)
    handle, built = shared.handles.get(role, (None, None))
    if handle is None or handle.world != world:
        handle = await shared.runtime.start(role, parts, context, world=world)
    elif built != wanted:
        await shared.runtime.rebuild(handle, parts, context)
    shared.handles[role] = (handle, wanted)
    return handle
