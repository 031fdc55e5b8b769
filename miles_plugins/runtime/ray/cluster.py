"""The connection to Ray: joining or starting a cluster, its nodes, placement groups and actors.

Everything that asks Ray blocks, and runs in the one thread of `Cluster.do`. Workers are asked
elsewhere. `ray` is imported when a cluster is connected to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from miles import ConfigError, WorkerError
from miles_plugins.runtime.ray.layout import Node

__all__ = ["Cluster", "Place", "connected", "placed", "reach", "refusal"]

ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""At 0, Ray takes 127.0.0.1 for its node's address, so that all it starts listens there alone. The
variable is read when ray is imported."""

_OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray takes: nothing of ours goes through it
_REACH_S = 5.0
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How every gRPC connection begins, with empty settings; a server answers with its own."""
_TRIES = 3  # to start a cluster: Ray gives its own processes 15 s, whatever else the machine does
_POLL_S = 0.05

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Place:
    """Where the ranks of one component are: a placement group, or nodes without one."""

    def __init__(self, group: Any, bundles: Sequence[int], nodes: Sequence[str]) -> None:
        self.group = group
        """Ray's placement group; None for workers that are only bound to their node."""
        self.bundles = bundles
        """Of each rank."""
        self.nodes = nodes
        """Ray's name of the node of each rank."""


class Cluster:
    """One connection of this process, made once. A cluster that it started ends with it."""

    def __init__(self) -> None:
        # what ray.init starts is tied by the kernel to the thread that started it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._own = False
        self._groups: dict[str, tuple[Any, Any]] = {}  # by name: what was asked for, and the group
        self._actors = 0
        self.here = ""
        """Ray's name of the driver's node."""

    async def do(self, what: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call in the thread of Ray."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(what, *args, **kwargs))

    def connect(self, address: str, *, cpus: int | None, gpus: int | None) -> None:
        """Start a cluster (`local`) or join one. Raises `ConfigError`."""
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():
            raise ConfigError(
                "runtime ray: this process is connected to a cluster already; one run a process"
            )
        self._own = True
        with connected(address, cpus=cpus, gpus=gpus) as found:
            self.here = found

    def nodes(self) -> list[Node]:
        """Those that are alive, the driver's first."""
        import ray

        found = [
            Node(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted(found, key=lambda node: (node.id != self.here, node.address, node.id))

    def group(
        self,
        name: str,
        bundles: Sequence[Mapping[str, float]],
        *,
        strategy: str,
        label: Mapping[str, str] | None,
    ) -> Any:
        """The placement group of this name, kept when it was asked for alike: a worker that is
        started again finds its place free. One whose node is gone is asked for anew."""
        from ray.util.placement_group import placement_group

        wanted = ([dict(b) for b in bundles], strategy)
        known = self._groups.get(name)
        if known is not None and known[0] == wanted and self.state(known[1])[0] == "CREATED":
            return known[1]
        self.release(name)
        labels = None if label is None else [dict(label) for _ in bundles]
        made = placement_group(wanted[0], strategy=strategy, name="", bundle_label_selector=labels)
        self._groups[name] = (wanted, made)
        return made

    def state(self, group: Any) -> tuple[str, list[str]]:
        """Ray's word for the state of a placement group, and the node of each bundle."""
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(group)
        where = table.get("bundles_to_node_id", {})
        return table.get("state", "REMOVED"), [where[index] for index in sorted(where)]

    def release(self, name: str) -> None:
        """Give a placement group back."""
        from ray.util.placement_group import remove_placement_group

        if (known := self._groups.pop(name, None)) is not None:
            remove_placement_group(known[1])

    def actor(
        self, kind: type, name: str, place: Place, rank: int, *, cpus: float, gpus: int, order: Any
    ) -> Any:
        """Start an actor of this class at its place; it ends with this process."""
        import ray
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        strategy: Any = NodeAffinitySchedulingStrategy(place.nodes[rank], soft=False)
        if place.group is not None:
            strategy = PlacementGroupSchedulingStrategy(
                place.group, placement_group_bundle_index=place.bundles[rank]
            )
        self._actors += 1
        made = ray.remote(kind).options(  # type: ignore[call-overload]
            name=f"{name}#{self._actors}",  # a name is free again only some time after its end
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            max_concurrency=4,  # `wait` is always open
            scheduling_strategy=strategy,
        )
        return made.remote(order)

    def kill(self, actor: Any) -> None:
        """End an actor at once."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, ValueError):  # it is gone already
            ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Give everything back and disconnect; a cluster that was started here ends."""
        import ray

        if not self._own:
            return
        self._own = False
        if ray.is_initialized():
            for name in list(self._groups):
                self.release(name)
            ray.shutdown()

    def end(self) -> None:
        """End the thread, once it has nothing more to do."""
        self._thread.shutdown(wait=False)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def connected(address: str, *, cpus: int | None, gpus: int | None) -> Iterator[str]:
    """Connect this process; Ray's name of the node it is on. Raises `ConfigError` when that fails,
    and disconnects when the block does."""
    started: dict[str, Any] = {}
    values = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address == "local":
        values |= {ON_LOOPBACK: "0", "RAY_AUTH_MODE": "token"}
        values |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}  # not Ray's own, which stays on disk
        started = {"num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False}
        started["object_store_memory"] = _OBJECT_STORE_BYTES
    if fault := reach(address):
        raise ConfigError(fault)
    with _environment(values):
        import ray

        if address == "local" and ray._private.ray_constants.ENABLE_RAY_CLUSTER:
            _log.warning(
                "runtime ray: ray was imported before, so the cluster that is started here listens "
                "on every interface, with a token"
            )
        for left in reversed(range(_TRIES)):
            try:
                ray.init(
                    address=address, log_to_driver=False, logging_level=logging.ERROR, **started
                )
                break
            except Exception as error:  # Ray raises just this for a slow start
                ray.shutdown()
                text = f"runtime ray: {refusal(address, str(error))}"
                if address != "local" or not left:
                    raise ConfigError(text) from error
                _log.warning("%s; trying again", text)
    try:
        yield str(ray.get_runtime_context().get_node_id())
    except BaseException:
        ray.shutdown()
        raise


def refusal(address: str, said: str) -> str:
    """Why a connection failed, of what Ray said."""
    if "--address" in said:  # where it found no cluster it names a flag that miles does not have
        return (
            "no Ray cluster runs on this machine; start one with `ray start --head`, join one with "
            "`ray start --address=HOST:PORT`, or take runtime.address=local"
        )
    return f"cannot connect to {address!r}: {said}"


def reach(address: str) -> str:
    """Why nothing can be at this address; empty when something may be."""
    import socket

    if address in ("local", "auto"):
        return ""
    if "://" in address:
        return (
            f"address {address!r}: a Ray client cannot place workers; run on a node of the cluster "
            "and give the head's host:port, or auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return f"address {address!r} is none of local, auto, HOST:PORT"
    instead = (
        "start the head with `ray start --head`, which says its address, or take address=local"
    )
    try:
        peer = socket.create_connection((host.strip("[]"), int(port)), _REACH_S)
    except (OSError, OverflowError) as error:
        return f"address {address!r} cannot be reached ({error}); {instead}"
    with peer, contextlib.suppress(ConnectionError):  # Ray with TLS hangs up on plain words
        try:
            peer.sendall(_HELLO)
            peer.recv(1)
        except TimeoutError:
            return (
                f"address {address!r}: something listens there that says nothing in {_REACH_S:g} "
                f"s, so it is no head of Ray; {instead}"
            )
    return ""


async def placed(cluster: Cluster, group: Any, *, timeout_s: float, what: str) -> Sequence[str]:
    """The node of each bundle, once Ray has found room. Raises `WorkerError` when it finds none in
    time."""
    until = time.monotonic() + timeout_s
    while True:
        state, nodes = await cluster.do(cluster.state, group)
        if state == "CREATED":
            return nodes
        if time.monotonic() > until:
            raise WorkerError(
                f"runtime ray: no room for {what} within {timeout_s:g} s (place_timeout_s; its "
                f"placement group is {state}); see `ray status` for who uses the nodes"
            )
        await asyncio.sleep(_POLL_S)
