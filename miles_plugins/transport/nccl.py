"""Weights are broadcast from the trainer to engines on other GPUs, in a process group of their own.

The driver's half: it brings the sides together and passes names and sizes, never tensors. Both
worker halves are in `broadcast`, which imports torch.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles import ConfigError, Context, Engine, Handle, Trainer, WeightSyncError, gpus_here
from miles_plugins.transport.bucketed import Bucketed, positive
from miles_plugins.transport.calling import everywhere, same

__all__ = ["CUMEM", "Nccl"]

CUMEM = "NCCL_CUMEM_ENABLE"
"""What NCCL is told by whether its memory is CUDA's virtual memory."""
_LEGACY = (
    "without cuMem, NCCL passes memory by legacy handles, and broadcasts of more than 64 MB are "
    "known to hang so on some machines with NVSwitch (NVIDIA/nccl issue 2024): transport.cumem=true"
)


class Nccl(Bucketed):
    """NCCL broadcast to engines on other GPUs: flat buckets, one sent while the next is gathered.

    For `placement=split`. Trainer rank 0 and every rank of every engine form a process group of
    their own at the first publish, and again when an engine was started again. Embedded engines
    stage the stream and switch when all of it is proven; an SGLang server takes the same broadcast
    on `/update_weights_from_distributed`. With `backend=gloo` it runs between CPUs.
    """

    name = "nccl"
    brings = ("tensors", "native")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Where the sides meet, how large buckets are, and how they are checked."""

        backend: Literal["nccl", "gloo"] = "nccl"
        """What broadcasts: `nccl` between GPUs, `gloo` between CPUs."""
        host: str = "127.0.0.1"
        """Address of the trainer's rank 0, at which engines meet it."""
        bucket_bytes: int = 256 * 2**20
        """Bytes per bucket, of which there are two; a larger tensor gets one of its own size."""
        cumem: bool = False
        """Whether NCCL takes memory by CUDA's virtual memory functions (`NCCL_CUMEM_ENABLE`, set in
        trainer workers, engine workers and the run's own servers). Both ends of a broadcast have to
        do the same, and SGLang does without unless it is told otherwise."""
        timeout_s: float = 120.0
        """Seconds that meeting, and one bucket, may take."""
        verify_every: int = 20
        """Publishes from one comparison of contents to the next; the first one, and one to an
        engine that was started again, always are compared."""

    @classmethod
    def example_config(cls, directory: Path) -> dict[str, Any]:
        """For the contract suite: between CPUs."""
        return {"backend": "gloo", "timeout_s": 5.0}

    def __init__(self, config: Config, context: Context) -> None:
        if faults := positive(config, "bucket_bytes", "timeout_s", "verify_every"):
            raise ConfigError(f"transport nccl: {'; '.join(faults)}")
        super().__init__(config.verify_every)
        self.config = config
        self.context = context
        self._group: tuple[Handle, ...] = ()  # the engines in it

    @classmethod
    def check(cls, config: Config, planned: Any) -> list[str]:
        """Values that cannot be meant, and layouts in which two ranks would share a GPU."""
        faults = positive(config, "bucket_bytes", "timeout_s", "verify_every")
        if config.backend != "nccl":
            return faults
        if planned.settings.placement == "colocated":
            faults.append(
                "placement is colocated, and NCCL refuses two ranks on one GPU; use transport=ipc, "
                "or placement=split"
            )
        chosen = (planned.specs.get(kind) for kind in ("trainer", "engine"))
        trainer, engine = (dict(getattr(spec, "config", {})) for spec in chosen)
        for kind, config_of in (("trainer", trainer), ("engine", engine)):
            if config_of.get("device") == "cpu":
                faults.append(
                    f"{kind}.device is cpu, and NCCL moves between GPUs; use transport.backend=gloo"
                )
        faults += _cumem_faults(config, engine)
        runtime = planned.specs.get("runtime")
        if engine.get("url") or (runtime is not None and runtime.name != "local"):
            return faults  # GPUs of other machines: a runtime counts them all
        ranks = int(trainer.get("workers", 1))
        wanted = ranks + int(engine.get("workers", 1)) * int(engine.get("tp", 1))
        present = len(gpus_here())
        if not faults and 0 < present < wanted:  # without any, devices are refused by themselves
            faults.append(
                f"trainer and engines are {wanted} ranks, and NCCL needs a GPU for each; here are "
                f"{present}"
            )
        embedded = getattr(planned.specs.get("engine"), "name", "") == "torch"
        if not faults and embedded:
            faults.append(
                "engine=torch computes on the first GPU, where trainer rank 0 does, and NCCL "
                "refuses two ranks on one GPU; use runtime=ray, which gives each GPUs of its own, "
                "or engine=sglang with engine.first_gpu"
            )
        if not faults and int(engine.get("first_gpu", ranks)) < ranks:
            faults.append(
                f"engines begin at GPU {engine['first_gpu']}, and trainer ranks have GPUs 0 to "
                f"{ranks - 1}; NCCL refuses two ranks on one GPU: use engine.first_gpu={ranks}"
            )
        return faults

    @classmethod
    def variables(cls, config: Config) -> dict[str, str]:
        """NCCL is told of its memory in no other way."""
        return {CUMEM: str(int(config.cumem))} if config.backend == "nccl" else {}

    def sender(self, trainer: Trainer) -> Any:
        """The half for a trainer worker."""
        from miles_plugins.transport.broadcast import BroadcastSender

        return BroadcastSender(
            trainer,
            rank=self.context.rank,
            bucket_bytes=self.config.bucket_bytes,
            directory=Path(self.context.directory) / "weights",
            model=self.context.model,
            backend=self.config.backend,
            timeout_s=self.config.timeout_s,
        )

    def receiver(self, engine: Engine) -> Any:
        """The half for an engine worker."""
        from miles_plugins.transport.broadcast import BroadcastReceiver

        return BroadcastReceiver(
            engine, backend=self.config.backend, timeout_s=self.config.timeout_s
        )

    async def set_up(
        self, trainer: Handle, engines: Sequence[Handle], begun: Sequence[dict[str, Any]]
    ) -> None:
        """Have everybody meet, unless the same already did."""
        if same(engines, self._group):
            return
        host, name = self.config.host, f"miles-{secrets.token_hex(8)}"
        world = 1 + sum(each["ranks"] for each in begun)
        port = await trainer.call("sender.open", host, name, world)
        offset, joins = 1, []
        for engine, each in zip(engines, begun, strict=True):
            join = ("receiver.join", host, port, name, offset, world)
            joins.append(everywhere([engine], self.name, *join))
            offset += each["ranks"]
        await asyncio.gather(trainer.call("sender.join"), *joins)
        self._group = tuple(engines)

    async def move(
        self, trainer: Handle, engines: Sequence[Handle], bucket: dict[str, Any]
    ) -> None:
        """As `Bucketed.move`; where rank 0 could not send, receivers would wait for it, so that its
        fault ends the publish. Raises `WeightSyncError`."""
        try:
            async with asyncio.timeout(self.config.timeout_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(trainer.call("sender.begun", bucket["slot"]))
                tasks.create_task(super().move(trainer, engines, bucket))
        except BaseExceptionGroup as faults:
            first = faults.exceptions[0]
            raise first from first.__cause__
        except TimeoutError:
            names = [entry["name"] for entry in bucket["tensors"]]
            error = WeightSyncError(
                f"transport nccl: a bucket ({', '.join(names[:3])}) was not sent and taken within "
                f"{self.config.timeout_s:g} s (transport.timeout_s)"
            )
            if self.config.backend == "nccl" and not self.config.cumem:
                error.add_note(_LEGACY)
            raise error from None

    async def give_up(self, trainer: Handle, engines: Sequence[Handle]) -> None:
        """Leave the group as well: a broadcast that was cut short leaves it unusable."""
        self._group = ()
        await super().give_up(trainer, engines)


def _cumem_faults(config: Nccl.Config, engine: Mapping[str, Any]) -> list[str]:
    """Servers that are told of NCCL's memory what the trainer is not."""
    own = str(int(config.cumem))
    given = dict(engine.get("environment") or {}).get(CUMEM, own)
    flags = {name.replace("-", "_"): value for name, value in (engine.get("flags") or {}).items()}
    forced = flags.get("enable_symm_mem") and not config.cumem
    if given == own and not forced:
        return []
    said = f"engine.environment has {CUMEM}={given}" if given != own else "enable_symm_mem sets it"
    is_, instead = (str(value).lower() for value in (config.cumem, not config.cumem))
    return [
        f"cumem is {is_}, and {said}; both ends of a broadcast have to do the same: use "
        f"transport.cumem={instead}"
    ]
