"""Workers on a cluster: each gets a place, an actor there, and its parts.

Which share of the cluster a worker may have is `layout`'s affair; who is called how, `rank`'s.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from miles import ConfigError, Context, Handle, Spec, WorkerError, call_ranks
from miles_plugins.runtime.ray import files
from miles_plugins.runtime.ray.cluster import Cluster, Place, placed
from miles_plugins.runtime.ray.keeper import TOKEN_BYTES, Keeper
from miles_plugins.runtime.ray.layout import (
    Node,
    Share,
    Want,
    bundles,
    gpus_of,
    lacks,
    role_of,
)
from miles_plugins.runtime.ray.rank import Rank, RayHandle

__all__ = ["Placing"]

_LOOPBACK = "127.0.0.1"
_NODE = "ray.io/node-id"  # Ray's own label of every node
_POLL_S = 0.1


class Placing:
    """Everything that one run has on a cluster."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._cluster: Cluster | None = None
        self._joining = asyncio.Lock()
        self._choosing = asyncio.Lock()
        self._handles: dict[str, RayHandle] = {}
        self._where: dict[str, tuple[str, str]] = {}  # role and node of each placed worker
        self._stopped = False

    async def start(
        self, name: str, parts: Sequence[Spec], context: Context, *, world: int
    ) -> RayHandle:
        """See `Ray.start`."""
        cluster = await self._join()
        if (old := self._handles.get(name)) is not None:
            await self.end(old)
        nodes = await cluster.do(cluster.nodes)
        role = role_of(parts)
        share: Share = getattr(self.config, role)
        devices: str | None = None
        shares = role == "engine" and context.settings.placement == "colocated"
        gpus = 0 if role == "rollout" else gpus_of(share, nodes)
        if shares and any(part.kind == "transport" for part in parts):
            node, devices = await self._beside_trainer(name, gpus)
            place, gpus = Place(None, [0], [node]), 0
        else:
            want = Want(name, world, share.cpus, gpus, share.per_node)
            place = await self._place(want, role, share, nodes)
        handle = RayHandle(name, [])
        self._handles[name] = handle
        try:
            reserved = (share.cpus, gpus)
            handle.ranks += await self._actors(name, place, reserved, devices, context, parts)
            await self.rebuild(handle, parts, context)
        except BaseException:
            await self.end(handle)
            raise
        return handle

    async def rebuild(self, handle: Handle, parts: Sequence[Spec], context: Context) -> None:
        """See `Ray.rebuild`."""
        if not isinstance(handle, RayHandle):
            raise TypeError(f"{handle.name} was not started by this runtime")
        limit = self.config.start_timeout_s
        masters = [""] * handle.world
        if handle.world > 1:
            first = handle.ranks[0]
            port, descriptor = await first.call("worker.meeting", first.bind, timeout=limit)
            host = f"[{first.bind}]" if ":" in first.bind else first.bind
            masters = [f"{host}:{port}"] * handle.world
            masters[0] += f"?listen_fd={descriptor}"
        around = {
            "directory": str(context.directory),
            "seed": context.seed,
            "settings": context.settings,
            "world": handle.world,
        }
        await call_ranks(
            handle.ranks,
            [
                one.call(
                    "worker.build",
                    list(parts),
                    dict(context.plugins),
                    {**around, "rank": rank, "master": masters[rank]},
                    timeout=limit,
                )
                for rank, one in enumerate(handle.ranks)
            ],
            limit,
        )

    async def end(self, handle: Handle, *, grace_s: float = 0.0) -> None:
        """See `Ray.end`."""
        if not isinstance(handle, RayHandle):
            raise TypeError(f"{handle.name} was not started by this runtime")
        if self._handles.get(handle.name) is handle:
            del self._handles[handle.name]
        await asyncio.gather(*(rank.stop(grace_s=grace_s) for rank in handle.ranks))

    async def stop(self) -> None:
        """See `Ray.stop`."""
        self._stopped = True
        handles, grace = list(self._handles.values()), self.config.stop_timeout_s
        await asyncio.gather(*(self.end(handle, grace_s=grace) for handle in handles))
        async with self._joining:
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                await cluster.do(cluster.close)
                cluster.end()

    async def _join(self) -> Cluster:
        async with self._joining:
            if self._stopped:
                raise WorkerError("runtime ray: it was stopped")
            if self._cluster is None:
                cluster, config = Cluster(), self.config
                try:
                    await cluster.do(
                        cluster.connect, config.address, cpus=config.cpus, gpus=config.gpus
                    )
                except BaseException:
                    cluster.end()
                    raise
                self._cluster = cluster
            return self._cluster

    # ---- where

    async def _place(self, want: Want, role: str, share: Share, nodes: Sequence[Node]) -> Place:
        """Room for all ranks, reserved. Raises `ConfigError` when the cluster has too little in
        all, `WorkerError` when it does not come free in time."""
        cluster = await self._join()
        if not self.config.grows and (faults := lacks([want], nodes, where="the cluster")):
            raise ConfigError(f"runtime ray: {'; '.join(faults)}")
        async with self._choosing:  # one after the other, so that each counts those before
            pin = self._pin(want.role, role, share, nodes)
            asked = bundles(share, want.gpus, want.count)
            if not all(asked):  # nothing to reserve
                return Place(None, [0] * want.count, [pin or nodes[0].id] * want.count)
            spread = role == "trainer" and share.per_node
            group = await cluster.do(
                cluster.group,
                want.role,
                asked,
                strategy="STRICT_SPREAD" if spread else "PACK",
                label=None if pin is None else {_NODE: pin},
            )
            what = f"{want.role} ({want.count} x {want.cpus:g} CPUs, {want.gpus} GPUs)"
            limit = self.config.place_timeout_s
            try:
                found = await placed(cluster, group, timeout_s=limit, what=what)
            except BaseException:
                await cluster.do(cluster.release, want.role)
                raise
            self._where[want.role] = (role, found[0])
        each = share.per_node if spread else 1
        # ranks of one node follow each other, wherever Ray put the bundles
        order = sorted(range(len(asked)), key=lambda bundle: (found[bundle], bundle))
        if want.count % each:  # a last bundle with fewer ranks stays the last
            order = [b for b in order if b != len(asked) - 1] + [len(asked) - 1]
        ranks = [order[rank // each] for rank in range(want.count)]
        return Place(group, ranks, [found[bundle] for bundle in ranks])

    def _pin(self, name: str, role: str, share: Share, nodes: Sequence[Node]) -> str | None:
        """The node that a single worker has to go to, as Ray's labels say it; None is any."""
        used = Counter(
            node for other, (kind, node) in self._where.items() if kind == role and other != name
        )
        if role == "rollout":
            if self.config.rollout_at == "driver":
                return nodes[0].id
            able = [node for node in nodes if node.cpus >= share.cpus] or nodes
            return min(able, key=lambda node: used[node.id]).id
        full = [node for node, count in used.items() if count >= share.per_node]
        if role == "engine" and share.per_node and full:
            return f"!in({','.join(full)})"
        return None

    async def _beside_trainer(self, name: str, gpus: int) -> tuple[str, str | None]:
        """Node and devices of an engine that shares a trainer's: the next `gpus` of those that the
        ranks have, in their order; without GPUs, those of one rank after the other."""
        until = time.monotonic() + self.config.place_timeout_s + self.config.start_timeout_s
        trainer = self._handles.get("trainer")
        while trainer is None or not trainer.ranks:
            if time.monotonic() > until:
                raise WorkerError(f"{name}: there is no trainer whose GPUs it could share")
            await asyncio.sleep(_POLL_S)
            trainer = self._handles.get("trainer")
        number = name.rpartition("-")[2]
        index = int(number) if number.isdigit() else 0
        if not gpus:
            return trainer.ranks[index % trainer.world].node.id, None
        slots = [
            (rank.node.id, device)
            for rank in trainer.ranks
            for device in (rank.devices or "").split(",")
            if device
        ]
        mine = slots[index * gpus : (index + 1) * gpus]
        if len(mine) < gpus or len({node for node, _ in mine}) > 1:
            raise ConfigError(
                f"runtime ray: {name} needs {gpus} GPUs of one host, and placement=colocated "
                f"leaves it {len(mine)} of the trainer's {len(slots)}; lower engine.workers or "
                "runtime.engine.gpus, or take placement=split"
            )
        return mine[0][0], ",".join(device for _, device in mine)

    # ---- who

    async def _actors(
        self,
        name: str,
        place: Place,
        reserved: tuple[float, int],
        devices: str | None,
        context: Context,
        parts: Sequence[Spec],
    ) -> list[Rank]:
        """A worker process at every place, connected."""
        cluster = await self._join()
        nodes = {node.id: node for node in await cluster.do(cluster.nodes)}
        one_host = not self.config.grows and len({n.address for n in nodes.values()}) == 1
        if gone := set(place.nodes) - set(nodes):
            raise WorkerError(f"{name}: its node {', '.join(gone)} is gone")
        world = len(place.nodes)
        cpus, gpus = reserved
        visible = {} if gpus else {"CUDA_VISIBLE_DEVICES": devices or ""}  # or Ray's own
        ranks: list[Rank] = []
        limit, silent = self.config.start_timeout_s, context.settings.silent_after_s
        tokens = [secrets.token_hex(TOKEN_BYTES // 2) for _ in range(world)]
        with files.seen(context, parts, secrets.token_hex(8)) as wanted:
            try:
                for rank, token in enumerate(tokens):
                    full = name if world == 1 else f"{name}-{rank}"
                    title = full if world == 1 else f"{full} (rank {rank} of {world})"
                    node = nodes[place.nodes[rank]]
                    log = context.directory / "logs" / f"{full}.log"
                    order = {
                        "name": full,
                        "title": f"{title}, node {node.id}",
                        "token": token,
                        "log": str(log.absolute()),
                        "address": _LOOPBACK if one_host else node.address,
                        **self._order(wanted, visible),
                    }
                    actor = await cluster.do(
                        cluster.actor, Keeper, full, place, rank, cpus=cpus, gpus=gpus, order=order
                    )
                    ranks.append(Rank(full, title, actor, node, cluster, log=str(log)))
                await asyncio.gather(
                    *(
                        one.meet(token, timeout_s=limit, silent_after_s=silent)
                        for one, token in zip(ranks, tokens, strict=True)
                    )
                )
            except BaseException:
                await asyncio.gather(*(one.stop(grace_s=0.0) for one in ranks))
                raise
        return ranks

    def _order(self, wanted: Sequence[Sequence[Any]], visible: Mapping[str, str]) -> dict[str, Any]:
        """What all keepers are told."""
        here = os.getcwd()
        return {
            "network": self.config.network,
            "environment": {**visible, **self.config.env},
            "directory": here,
            "files": [*wanted, ["the working directory", here, -1]],
            "wait_s": self.config.start_timeout_s,
        }
