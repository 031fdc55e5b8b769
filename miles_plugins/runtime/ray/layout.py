"""What each worker needs of the cluster, and whether the nodes have it: numbers only.

Imports no ray: `miles check` counts with it before anything is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miles import Spec

__all__ = ["Node", "Share", "Want", "bundles", "gpus_of", "lacks", "role_of", "wanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker of a role gets."""

    cpus: float = 1.0
    """CPUs that are reserved for it."""
    gpus: int | None = None
    """GPUs that it alone sees; null is one where the cluster has GPUs, and none where it has
    none."""
    per_node: int = 0
    """Workers on one node: of a trainer exactly so many, of engines at most; 0 leaves it to
    Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster."""

    id: str
    """Ray's name for it."""
    address: str
    """By which Ray reaches it."""
    cpus: float
    """It offers in all, used ones included."""
    gpus: float
    """As `cpus`."""


@dataclass(frozen=True, slots=True)
class Want:
    """Equal workers of one role."""

    role: str
    """`trainer`, `engine`, ..., as errors say it."""
    count: int
    """How many workers."""
    cpus: float
    """Of each."""
    gpus: int
    """Of each."""
    per_node: int = 0
    """As in `Share`."""


def role_of(parts: Sequence[Spec]) -> str:
    """`trainer`, `engine` or `rollout`: which share of the configuration a worker of these parts
    gets."""
    kinds = {part.kind for part in parts}
    if "trainer" in kinds:
        return "trainer"
    return "rollout" if "environment" in kinds or "engine" not in kinds else "engine"


def gpus_of(share: Share, nodes: Sequence[Node]) -> int:
    """GPUs of one worker on this cluster."""
    if share.gpus is not None:
        return share.gpus
    return int(any(node.gpus for node in nodes))


def bundles(share: Share, gpus: int, world: int) -> list[dict[str, float]]:
    """Resources of each bundle of a placement group for `world` ranks: one a rank, or one a node
    where `per_node` says how many ranks share it."""
    each = share.per_node or 1
    sizes = [min(each, world - first) for first in range(0, world, each)]
    made = []
    for size in sizes:
        bundle = {"CPU": size * share.cpus}
        if gpus:
            bundle["GPU"] = float(size * gpus)
        made.append({name: value for name, value in bundle.items() if value})
    return made


def wanted(config: Any, planned: Any, nodes: Sequence[Node]) -> list[Want]:
    """What a stage of a plan asks for at once, engines that share the trainer's GPUs left out."""
    trainer, engine = planned.specs["trainer"], planned.specs["engine"]
    evaluator = planned.specs["evaluator"]

    def want(role: str, share: Share, count: int, gpus: int | None = None) -> Want:
        own = gpus_of(share, nodes) if gpus is None else gpus
        return Want(role, count, share.cpus, own, share.per_node)

    found = [want("trainer", config.trainer, _workers(trainer))]
    if planned.samples:
        shared = planned.settings.placement == "colocated"
        found.append(want("engine", config.engine, _workers(engine), 0 if shared else None))
    rollouts = planned.settings.rollout_workers
    if isinstance(evaluator, Spec) and "workers" in evaluator.config:
        found.append(want("evaluation engine", config.engine, _workers(evaluator)))
        rollouts += 1
    return [*found, Want("rollout", rollouts, config.rollout.cpus, 0)]


def _workers(spec: Any) -> int:
    return int(spec.config.get("workers", 1)) if isinstance(spec, Spec) else 0


def lacks(wants: Sequence[Want], nodes: Sequence[Node], *, where: str) -> list[str]:
    """Why these workers do not fit these nodes; empty when nothing is certain to be missing (Ray
    may still find no way to pack them)."""
    return [*_totals(wants, nodes, where), *_singles(wants, nodes, where)]


def _totals(wants: Sequence[Want], nodes: Sequence[Node], where: str) -> Iterator[str]:
    for what, attribute in (("CPU", "cpus"), ("GPU", "gpus")):
        needed = sum(want.count * getattr(want, attribute) for want in wants)
        offered = sum(getattr(node, attribute) for node in nodes)
        if needed > offered:
            parts = ", ".join(
                f"{want.count} {want.role} x {getattr(want, attribute):g}"
                for want in wants
                if want.count and getattr(want, attribute)
            )
            keys = "runtime.trainer, runtime.engine, runtime.rollout"
            yield (
                f"the layout needs {needed:g} {what}s ({parts}), and {where} has {offered:g}; "
                f"ask for fewer ({keys}: {attribute}) or add nodes"
            )


def _singles(wants: Sequence[Want], nodes: Sequence[Node], where: str) -> Iterator[str]:
    for want in wants:
        if not want.count:
            continue
        each = min(want.per_node or 1, want.count) if want.role == "trainer" else 1
        fitting = [n for n in nodes if n.cpus >= each * want.cpus and n.gpus >= each * want.gpus]
        needed = math.ceil(want.count / want.per_node) if want.per_node else 1
        if len(fitting) < needed:
            most = "; ".join(f"{n.address}: {n.cpus:g} CPUs, {n.gpus:g} GPUs" for n in nodes[:8])
            yield (
                f"{want.role}: {needed} node(s) with {each * want.cpus:g} CPUs and "
                f"{each * want.gpus} GPUs are needed for {each} worker(s) on one node, and {where} "
                f"has {len(fitting)} ({most})"
            )
