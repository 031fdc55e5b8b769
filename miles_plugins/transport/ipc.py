"""Weights stay on the GPU and change hands: engines open the trainer's buckets by handle.

The driver's half: it passes handles, never tensors. Both worker halves are in `handles`, which
imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles import ConfigError, Context, Engine, Trainer
from miles_plugins.transport.bucketed import Bucketed, positive

__all__ = ["Ipc"]


class Ipc(Bucketed):
    """CUDA IPC between a trainer and engines on the same GPUs: flat buckets, opened by handle.

    For `placement=colocated`. Every trainer rank fills a bucket on its own GPU, and an engine opens
    the one on its GPU, or rank 0's across. Without a GPU the buckets are shared memory. Embedded
    engines copy the stream and switch when all of it is proven; an SGLang server is handed the
    buckets on `/update_weights_from_tensor`.
    """

    name = "ipc"
    brings = ("tensors", "native")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How large buckets are, and how they are checked."""

        bucket_bytes: int = 512 * 2**20
        """Bytes per bucket, of which there are two; a larger tensor gets one of its own size."""
        verify_every: int = 20
        """Publishes from one comparison of contents to the next; the first one, and one to an
        engine that was started again, always are compared."""

    def __init__(self, config: Config, context: Context) -> None:
        if faults := positive(config, "bucket_bytes", "verify_every"):
            raise ConfigError(f"transport ipc: {'; '.join(faults)}")
        super().__init__(config.verify_every)
        self.config = config
        self.context = context

    @classmethod
    def check(cls, config: Config, planned: Any) -> list[str]:
        """Values that cannot be meant, and a placement that has no GPU in common."""
        faults = positive(config, "bucket_bytes", "verify_every")
        if planned.settings.placement != "colocated":
            faults.append(
                f"placement is {planned.settings.placement}, and handles open only on the same "
                "GPUs; use placement=colocated, or transport=nccl"
            )
        return faults

    def sender(self, trainer: Trainer) -> Any:
        """The half for a trainer worker."""
        from miles_plugins.transport.handles import IpcSender

        return IpcSender(
            trainer,
            rank=self.context.rank,
            bucket_bytes=self.config.bucket_bytes,
            directory=Path(self.context.directory) / "weights",
            model=self.context.model,
        )

    def receiver(self, engine: Engine) -> Any:
        """The half for an engine worker."""
        from miles_plugins.transport.handles import IpcReceiver

        return IpcReceiver(engine)

    def joined(self, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's bucket, with the handles of all ranks."""
        return answers[0] | {"handles": [answer["handle"] for answer in answers]}
