"""What a step cost: time, tokens, model FLOPs, and memory that moved to and from the host.

Only where a device's peak is known or given does it ask the clock, so that updates on a CPU stay
the same from run to run.
"""

from __future__ import annotations

import time

import torch

from miles_plugins.trainer.fsdp.evict import Moved
from miles_plugins.trainer.fsdp.pieces import Piece
from miles_plugins.trainer.fsdp.ranks import Ranks
from miles_plugins.trainer.fsdp.speed import Cost, peak_tflops
from miles_plugins.trainer.fsdp.streaming import Streamed

__all__ = ["Meter"]


class Meter:
    """Clock and counters of one rank."""

    def __init__(self, cost: Cost, ranks: Ranks, compute: torch.dtype, peak: float | None) -> None:
        self._cost, self._ranks, self._peak = cost, ranks, peak
        gpu = ranks.device.type == "cuda"
        if peak is None and gpu and compute in (torch.bfloat16, torch.float16):
            self._peak = peak_tflops(torch.cuda.get_device_name(ranks.device))
        self._on = gpu or self._peak is not None
        self._began = self._flops = self._tokens = 0.0
        self.left: Moved | None = None
        self.returned: Moved | None = None

    def begin(self) -> None:
        """A step begins."""
        self._began, self._flops, self._tokens = time.perf_counter(), 0.0, 0.0

    def add(self, piece: Piece, rows: int) -> None:
        """A forward and backward pass was made, with `rows` tokens through the head."""
        if self._on and not piece.idle:
            self._flops += self._cost.train(piece.work(rows))
            self._tokens += len(piece.index) / self._ranks.sharing

    def end(self, streamed: Streamed | None) -> dict[str, float]:
        """Metrics of the step; every rank has to ask."""
        if not self._on:
            return {}
        device = self._ranks.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - self._began
        sums = torch.tensor([self._flops, self._tokens], dtype=torch.float64, device=device)
        flops, tokens = self._ranks.add(sums).tolist()
        rate = flops / seconds / self._ranks.world / 1e12
        found = {"trainer/tokens_per_s": tokens / seconds, "trainer/tflops": rate}
        if self._peak is not None:
            found["trainer/mfu"] = rate / self._peak
        if device.type == "cuda":
            found["trainer/memory_bytes"] = float(torch.cuda.max_memory_allocated(device))
        if streamed is not None:
            found["trainer/streamed_bytes"] = float(streamed.moved.bytes)
            found["trainer/streaming_s"] = streamed.moved.seconds
        if self.left is not None and self.returned is not None:
            found["trainer/evicted_bytes"] = float(self.left.bytes)
            found["trainer/sleep_s"] = self.left.seconds
            found["trainer/wake_s"] = self.returned.seconds
            self.left = self.returned = None
        return found
