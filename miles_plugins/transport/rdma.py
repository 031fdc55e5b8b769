"""Weights are written straight into engines' memory by Mooncake's transfer engine, point to point.

The driver's half: it passes addresses and sizes, never tensors. Both worker halves are in
`mooncake`, which imports torch and the vendor's package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles import ConfigError, Context, Engine, Handle, Trainer
from miles_plugins.transport.bucketed import Bucketed, positive
from miles_plugins.transport.calling import everywhere

__all__ = ["Rdma"]

_DEVICES = Path("/sys/class/infiniband")


class Rdma(Bucketed):
    """Mooncake TransferEngine: the trainer writes flat buckets into registered memory of each
    engine worker, over RDMA or TCP.

    Point to point: a receiver registers two buckets and tells their addresses, and rank 0 of the
    trainer writes into one while the engine copies the other. Engines that are embedded stage the
    stream and switch when all of it is proven. Needs the package `mooncake-transfer-engine` (one
    without CUDA is `mooncake-transfer-engine-non-cuda`) and `libibverbs`.
    """

    name = "rdma"
    brings = ("tensors",)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Over what the sides write, how large buckets are, and how they are checked."""

        protocol: Literal["rdma", "tcp"] = "rdma"
        """What carries the bytes."""
        device: str = ""
        """RDMA devices to use, such as `mlx5_0,mlx5_1`; empty lets Mooncake choose."""
        host: str = "127.0.0.1"
        """Address of this machine that the others reach; the same name on every machine, such as a
        host name that each resolves, when there are several."""
        bucket_bytes: int = 256 * 2**20
        """Bytes per bucket, of which there are two; no tensor may be larger."""
        verify_every: int = 20
        """Publishes from one comparison of contents to the next; the first one, and one to an
        engine that was started again, always are compared."""

    @classmethod
    def example_config(cls, directory: Path) -> dict[str, Any]:
        """For the contract suite: over TCP."""
        return {"protocol": "tcp", "bucket_bytes": 4 * 2**20}

    def __init__(self, config: Config, context: Context) -> None:
        if faults := positive(config, "bucket_bytes", "verify_every"):
            raise ConfigError(f"transport rdma: {'; '.join(faults)}")
        super().__init__(config.verify_every)
        self.config = config
        self.context = context

    @classmethod
    def check(cls, config: Config, planned: Any) -> list[str]:
        """Values that cannot be meant, and what is not there to send with."""
        faults = positive(config, "bucket_bytes", "verify_every")
        if getattr(planned.specs.get("runtime"), "name", "local") != "local":
            return faults  # other machines send
        if importlib.util.find_spec("mooncake") is None:
            faults.append(
                "Mooncake is not installed; pip install 'miles[rdma]', or "
                "mooncake-transfer-engine-non-cuda where there is no CUDA"
            )
        if config.protocol == "rdma" and not any(_DEVICES.glob("*")):
            faults.append(
                f"there is no RDMA device here ({_DEVICES} is empty); use transport.protocol=tcp"
            )
        return faults

    def sender(self, trainer: Trainer) -> Any:
        """The half for a trainer worker."""
        from miles_plugins.transport.mooncake import RdmaSender

        return RdmaSender(
            trainer,
            rank=self.context.rank,
            bucket_bytes=self.config.bucket_bytes,
            directory=Path(self.context.directory) / "weights",
            model=self.context.model,
            config=self.config,
        )

    def receiver(self, engine: Engine) -> Any:
        """The half for an engine worker."""
        from miles_plugins.transport.mooncake import RdmaReceiver

        return RdmaReceiver(engine, config=self.config)

    async def set_up(
        self, trainer: Handle, engines: Sequence[Handle], begun: Sequence[dict[str, Any]]
    ) -> None:
        """Tell the trainer where each engine's buckets are."""
        places = await everywhere(engines, self.name, "receiver.places")
        await trainer.call("sender.aim", [place for each in places for place in each])
