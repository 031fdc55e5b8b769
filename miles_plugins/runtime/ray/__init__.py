"""The `ray` runtime: its name, its configuration, and what `miles check` says of it.

Ray itself is imported when a run starts; how workers are placed is in `placing`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miles import ConfigError, Context, Handle, Spec, gpus_here
from miles_plugins.runtime.ray.layout import Node, Share, lacks, wanted

__all__ = ["Ray"]

MISSING = "ray is not installed; install it with: pip install 'miles[ray]'"


class Ray:
    """Workers on any number of machines, placed by a Ray cluster.

    Each worker is a process of its own, `miles.worker`, which an actor starts on the node that Ray
    chose, watches, and takes with it when it ends. Ray places, reserves and reports; calls do not
    go through it: the driver connects to the worker over TCP, once, with a token, and speaks what
    a local run speaks (plain values and arrays, streams, cancels, heartbeats; no pickle). Trainer
    ranks share one placement group, every engine has its own, and rollout workers are beside the
    driver or spread over nodes. With `placement=colocated`, engines see the GPUs of trainer ranks.
    Actors are never detached: they end with the driver, however that ends. The driver has to run on
    a node of the cluster, and run.dir, models and local plugins have to be at the same place on
    every host. See docs/ray.md.
    """

    reserves = True  # GPUs, for every worker

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which cluster, who gets what, and how long things may take."""

        address: str = "local"
        """`local` starts a cluster on this machine that ends with the driver, on loopback;
        `auto` joins the one that this machine is a node of; or HOST:PORT of its head."""
        cpus: int | None = None
        """CPUs that a `local` cluster offers, which may be more than there are; null counts
        them."""
        gpus: int | None = None
        """As `cpus`, for GPUs."""
        trainer: Share = field(default_factory=Share)
        """What each trainer rank gets: `cpus`, `gpus` (null: one where the cluster has any), and
        `per_node`, the ranks on one node (0: packed as Ray can)."""
        engine: Share = field(default_factory=Share)
        """What each engine gets, those that only evaluate included; `per_node` is then the most on
        one node."""
        rollout: Share = field(default_factory=lambda: Share(gpus=0))
        """What each rollout worker gets; no GPUs."""
        rollout_at: Literal["driver", "nodes"] = "driver"
        """Where rollout workers are, with their session servers and routers: beside the driver, or
        spread evenly over all nodes."""
        network: str = ""
        """Where workers listen, as a network (`10.1.0.0/16`): each host's own address in it. Empty
        is loopback while the cluster is one host, else the address by which Ray knows the node."""
        env: Mapping[str, str] = field(default_factory=dict)
        """Environment variables of every worker, beside those of its node."""
        grows: bool = False
        """Whether an autoscaler adds nodes: a layout that does not fit yet is then waited for
        instead of refused, and nothing listens on loopback."""
        place_timeout_s: float = 120.0
        """Seconds a worker may wait for its place in the cluster."""
        start_timeout_s: float = 180.0
        """Seconds a worker may take to start, to import and to build its parts."""
        stop_timeout_s: float = 5.0
        """Seconds between asking a worker to end and killing it with its children."""

    @classmethod
    def check(cls, config: Config, planned: Any = None) -> list[str]:
        """Values that cannot be meant, a cluster that cannot be reached, and a layout that does
        not fit it. Connects to a cluster that runs, and starts none."""
        faults = [*_values(config)]
        if importlib.util.find_spec("ray") is None:
            return [*faults, MISSING]
        if faults or planned is None:
            return faults
        if config.address == "local":
            here = f"this machine (runtime.cpus={config.cpus}, runtime.gpus={config.gpus})"
            if config.cpus is None:
                here = "this machine (runtime.cpus, which Ray only counts, may say more)"
            return lacks(_wants(config, planned, local := [_local(config)]), local, where=here)
        from miles_plugins.runtime.ray.look import look

        nodes = look(config.address, timeout_s=config.start_timeout_s)
        if config.grows:
            return []
        return lacks(_wants(config, planned, nodes), nodes, where=f"the cluster {config.address}")

    @classmethod
    def warnings(cls, config: Config, planned: Any) -> list[str]:
        """GPUs that Ray would hand out and nobody has, and memory that nobody can estimate."""
        del cls, planned
        here = len(gpus_here())
        if config.gpus is not None and config.gpus > here > 0:
            return [
                f"runtime.gpus is {config.gpus}, and this machine has {here} GPU(s): a worker "
                f"that is given another finds none; use runtime.gpus={here}"
            ]
        if config.address != "local" and not here and config.trainer.gpus != 0:
            return [
                f"no estimate of GPU memory: the cluster {config.address} has the GPUs, and this "
                "machine none to go by"
            ]
        return []

    def __init__(self, config: Config, context: Context) -> None:
        if faults := [*_values(config)]:
            raise ConfigError(f"runtime ray: {'; '.join(faults)}")
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f"runtime ray: {MISSING}")
        from miles_plugins.runtime.ray.placing import Placing

        self.config = config
        self._placing = Placing(config)

    async def start(
        self, name: str, parts: Sequence[Spec], context: Context, *, world: int = 1
    ) -> Handle:
        """See `miles.Runtime`. Connects to the cluster first, or starts it. Raises `ConfigError`
        when it cannot, or when a host lacks files, and `WorkerError`."""
        return await self._placing.start(name, parts, context, world=world)

    async def rebuild(self, handle: Handle, parts: Sequence[Spec], context: Context) -> None:
        """See `miles.Runtime`."""
        await self._placing.rebuild(handle, parts, context)

    async def end(self, handle: Handle) -> None:
        """See `miles.Runtime`. Their place is kept for workers of the same name."""
        await self._placing.end(handle)

    async def stop(self) -> None:
        """See `miles.Runtime`. A cluster that was started here ends too."""
        await self._placing.stop()


def _values(config: Ray.Config) -> list[str]:
    shares = {"trainer": config.trainer, "engine": config.engine, "rollout": config.rollout}
    faults = []
    for role, share in shares.items():
        for key in ("cpus", "gpus", "per_node"):
            value = getattr(share, key)
            if value is not None and value < 0:
                faults.append(f"{role}.{key} is {value}; at least 0")
    if config.rollout.gpus:
        faults.append(f"rollout.gpus is {config.rollout.gpus}: rollout workers use no GPU")
    for key in ("place_timeout_s", "start_timeout_s"):
        if (seconds := getattr(config, key)) <= 0:
            faults.append(f"{key} is {seconds:g}; above 0")
    if config.stop_timeout_s < 0:
        faults.append(f"stop_timeout_s is {config.stop_timeout_s:g}; at least 0")
    if config.address != "local" and (config.cpus, config.gpus) != (None, None):
        faults.append(f"cpus and gpus are for address=local; {config.address!r} has its own")
    if config.network:
        import ipaddress

        try:
            ipaddress.ip_network(config.network, strict=False)
        except ValueError as error:
            faults.append(f"network: {error}; write it like 10.1.0.0/16")
    return faults


def _wants(config: Ray.Config, planned: Any, nodes: Sequence[Node]) -> Any:
    return wanted(config, planned, nodes)


def _local(config: Ray.Config) -> Node:
    """What a cluster on this machine would offer."""
    from pathlib import Path

    cpus = config.cpus if config.cpus is not None else os.cpu_count() or 1
    gpus = config.gpus
    if gpus is None:
        gpus = len([d for d in Path("/dev").glob("nvidia[0-9]*") if d.name[6:].isdigit()])
    return Node(id="local", address="127.0.0.1", cpus=cpus, gpus=gpus)
