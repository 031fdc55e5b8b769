"""The ranks that train together: joining them, sharding a model over them, adding up their numbers.

One rank has no process group at all, and every function here is then the identity.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from miles import ConfigError, Context, TrainerError

__all__ = ["Ranks", "join", "local", "place", "shard", "whole"]

TOLD = 512
"""Bytes of a sentence that ranks tell each other."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    """Own number, from 0."""
    world: int
    """How many."""
    device: torch.device
    """Where this one computes."""
    mesh: DeviceMesh | None
    """All of them in one dimension, or replicas × shards in two; None when alone."""
    sharing: int = 1
    """How many share a row of tokens: neighbours by rank."""
    sharers: Any = None
    """Their process group; None when nobody shares."""

    @property
    def teams(self) -> int:
        """Groups of ranks that have rows of their own."""
        return self.world // self.sharing

    @property
    def team(self) -> int:
        """This one's."""
        return self.rank // self.sharing

    def add(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place, the same in every rank."""
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor

    def tell(self, text: str) -> list[str]:
        """What every rank tells, by rank, cut after `TOLD` bytes; every rank has to, and returns
        when all have."""
        own = text.encode()[:TOLD]
        rows = torch.zeros(self.world, TOLD, dtype=torch.uint8)
        rows[self.rank, : len(own)] = torch.tensor(list(own), dtype=torch.uint8)
        told = self.add(rows.to(self.device)).tolist()
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in told]


def join(
    context: Context, device: str, *, replicas: int = 1, offload: bool = False, sharing: int = 1
) -> Ranks:
    """Become one of `context.world` ranks, meeting at `context.master`: a host and port, or a file.

    With `replicas`, that many groups of ranks hold the whole model each; with `sharing`, that many
    neighbours share each row of tokens. With `offload`, numbers on the CPU are added up too, and a
    single rank gets a group of its own, since FSDP offloads no other way. Raises `ConfigError` when
    a GPU is asked for and there is none, `TrainerError` when the ranks cannot meet.
    """
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise ConfigError("trainer fsdp: device is cuda, but torch sees no GPU")
    where = torch.device("cuda", context.rank % gpus) if gpus else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if context.world == 1 and not offload:
        return Ranks(0, 1, where, None)
    if not dist.is_initialized():
        backend = "nccl" if where.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if offload and where.type == "cuda" else backend,
                **(_meeting(context) if context.world > 1 else {"store": dist.HashStore()}),
                rank=context.rank,
                world_size=context.world,
                timeout=_timeout(context),
            )
            atexit.register(_leave)
        except (RuntimeError, ValueError) as error:
            raise TrainerError(
                f"trainer fsdp: rank {context.rank} of {context.world} could not meet the "
                f"others at {context.master!r}: {error}"
            ) from error
    if (dist.get_rank(), dist.get_world_size()) != (context.rank, context.world):
        raise TrainerError(
            f"trainer fsdp: this process is rank {dist.get_rank()} of {dist.get_world_size()} and "
            f"cannot become rank {context.rank} of {context.world}"
        )
    if replicas > 1:
        sizes = (replicas, context.world // replicas)
        mesh = init_device_mesh(where.type, sizes, mesh_dim_names=("replica", "shard"))
    else:
        mesh = init_device_mesh(where.type, (context.world,))
    return Ranks(context.rank, context.world, where, mesh, sharing, _sharers(context, sharing))


def _sharers(context: Context, sharing: int) -> Any:
    """The group of those that share this rank's rows; every rank makes every group."""
    if sharing == 1:
        return None
    firsts = range(0, context.world, sharing)
    made = [dist.new_group(range(f, f + sharing), timeout=_timeout(context)) for f in firsts]
    return made[context.rank // sharing]


def _leave() -> None:
    """Or the group's threads, still running as the interpreter ends, may abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _timeout(context: Context) -> timedelta:
    return timedelta(seconds=context.settings.worker_timeout_s)


def _meeting(context: Context) -> dict[str, Any]:
    """Where `init_process_group` meets: a file, or a store that rank 0 serves, on a socket that was
    bound for it to one address where there is one (torch's own is open on every interface)."""
    if "://" in context.master:
        return {"init_method": context.master}
    place = urlsplit(f"//{context.master}")
    listen = parse_qs(place.query).get("listen_fd")
    store = dist.TCPStore(
        place.hostname or "",
        place.port or 0,
        context.world,
        is_master=context.rank == 0,
        timeout=_timeout(context),
        master_listen_fd=os.dup(int(listen[0])) if listen else None,
    )
    return {"store": store}


def shard(
    policy: nn.Module,
    blocks: list[nn.Module],
    ranks: Ranks,
    compute: torch.dtype,
    *,
    offload: bool = False,
) -> None:
    """Shard each block and then the rest over the ranks, in place. Parameters stay in their type;
    each is cast to `compute` when it is gathered, and gradients are added up in float32. With
    `offload` shards and their gradients lie in host memory, pinned where there is a GPU."""
    if ranks.mesh is None:
        return
    more: dict[str, Any] = {}
    if offload:
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    policy_of_types = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in (*blocks, policy):
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy_of_types, **more)


def whole(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """The full tensor, gathered and left on `device` when one is given; every rank has to ask."""
    if device is not None and tensor.device.type != device.type:
        tensor = _moved(tensor, device)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, cut as it was: parameters of an offloaded model lie on the CPU while
    their mesh is of GPUs."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device)
    return DTensor.from_local(
        tensor.to_local().detach().to(device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `full`, cut as `like` is."""
    if not isinstance(like, DTensor):
        return full
    cut = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return cut.to_local()
