"""AdamW whose state lives in host memory or on disk and visits the device bucket by bucket.

Bits are those of the resident optimizer: the same fused kernel sees the same numbers. Which weights
there are, and their gradients, is `optimizer`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from miles_plugins.trainer.fsdp.evict import Moved
from miles_plugins.trainer.fsdp.host import host_array, mapped_array
from miles_plugins.trainer.fsdp.ranks import local

__all__ = ["Streamed"]

ALIGN = 64
"""Elements to which a weight's place is rounded up: whole vectors and cache lines, so that a cut
weight is computed as a whole one is."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class _Piece(NamedTuple):
    """A stretch of one weight inside a bucket, in elements."""

    name: str
    start: int
    stop: int
    at: int  # in the bucket


class _Slot:
    """Device memory of one bucket, and pinned memory beside it where the home cannot be copied from
    asynchronously."""

    def __init__(
        self, roles: tuple[str, ...], size: int, device: torch.device, *, through: bool
    ) -> None:
        self.held = {role: torch.empty(size, device=device) for role in roles}
        self.pinned = (
            {role: host_array(size, torch.float32, pin=True) for role in roles} if through else {}
        )
        self.done: Any = None  # event: the step of the bucket that it holds has run
        self.freed: Any = None  # event: what it held is back at home


class Streamed:
    """Weights' moments, and the weights themselves when `take` hands them over, away from the
    device.

    Every array at home is flat, float32, and holds the weights one after the other; a bucket is a
    stretch of `bucket` elements of it. While one bucket is computed, the next is on its way in and
    the last on its way out, on streams of their own on a GPU. `directory` None keeps them in pinned
    memory, otherwise in files there.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        device: torch.device,
        betas: tuple[float, float],
        eps: float,
        decays: Mapping[str, float],
        bucket: int,
        directory: Path | None,
        take: bool,
    ) -> None:
        self.device, self.betas, self.eps, self.decays = device, betas, eps, dict(decays)
        self._bucket = max(ALIGN, bucket // ALIGN * ALIGN)
        self._disk = directory is not None
        self._at: dict[str, int] = {}
        self.steps = dict.fromkeys(weights, 0)
        end = 0
        for name, weight in weights.items():
            self._at[name] = end
            end += -(-local(weight).numel() // ALIGN) * ALIGN
        self._roles = (*MOMENTS, "weight") if take else MOMENTS
        self._home = {role: self._allocate(end, directory) for role in self._roles}
        for role in MOMENTS:
            self._home[role].zero_()
        self._shapes = {name: local(weight).shape for name, weight in weights.items()}
        self._buckets = self._cut(end)
        self.weights = dict(weights)
        if take:
            for name, weight in weights.items():
                self.weights[name] = self._view("weight", name)
                self.weights[name].copy_(weight.detach())
        self._lanes: list[Any] = [None, None]
        self.moved = Moved(0, 0.0)

    def _allocate(self, size: int, directory: Path | None) -> Tensor:
        if directory is not None:
            return mapped_array(size, torch.float32, directory)
        return host_array(size, torch.float32, pin=self.device.type == "cuda")

    def _view(self, role: str, name: str) -> Tensor:
        at, shape = self._at[name], self._shapes[name]
        return self._home[role][at : at + shape.numel()].view(shape)

    def _cut(self, end: int) -> list[tuple[int, int, list[_Piece]]]:
        """(start, stop, pieces) of every bucket."""
        buckets: list[tuple[int, int, list[_Piece]]] = [
            (a, min(a + self._bucket, end), []) for a in range(0, end, self._bucket)
        ]
        for name, at in self._at.items():
            stop = at + self._shapes[name].numel()
            for number in range(at // self._bucket, -(-stop // self._bucket)):
                a, b, pieces = buckets[number]
                low, high = max(a, at), min(b, stop)
                if low < high:
                    pieces.append(_Piece(name, low - at, high - at, low - a))
        return buckets

    # ------------------------------------------------------------ state

    def state(self, name: str) -> dict[str, Tensor]:
        """AdamW's `step`, `exp_avg`, `exp_avg_sq` of a weight, live; empty before a step."""
        if not self.steps[name]:
            return {}
        found = {role: self._view(role, name) for role in MOMENTS}
        return {"step": torch.tensor(float(self.steps[name])), **found}

    def set_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Replace them; an empty mapping resets them."""
        self.steps[name] = int(state["step"].item()) if state else 0
        for role in MOMENTS:
            view = self._view(role, name)
            view.copy_(state[role]) if state else view.zero_()

    # ------------------------------------------------------------ a step

    @torch.no_grad()
    def step(
        self, gradients: Mapping[str, Tensor], *, lr: float, copies: Mapping[str, Tensor]
    ) -> None:
        """One step of every weight that has a gradient; `copies`, in whatever type, are brought up
        to date with their weights on the way."""
        began = time.perf_counter()
        cuda = self.device.type == "cuda"
        todo = [b for b in self._buckets if any(p.name in gradients for p in b[2])]
        if cuda:
            self._lanes = [torch.cuda.Stream(self.device) for _ in range(2)]
        size = max((b[1] - b[0] for b in todo), default=0)
        slots = [
            _Slot(self._roles, size, self.device, through=cuda and self._disk) for _ in todo[:2]
        ]
        if cuda:
            for lane in self._lanes:
                lane.wait_stream(torch.cuda.current_stream(self.device))
        with ThreadPoolExecutor(1, "optimizer_in") as into, ThreadPoolExecutor(1) as out:
            coming: list[Future[Any]] = []
            going: list[Future[Any]] = []

            def fetch(number: int) -> None:
                if number < len(todo):
                    before = going[number - 2] if number >= 2 else None
                    slot = slots[number % 2]
                    coming.append(into.submit(self._load, todo[number], slot, before))

            fetch(0)
            for number, bucket in enumerate(todo):
                fetch(number + 1)
                slot = slots[number % 2]
                arrived = coming[number].result()
                if cuda:
                    torch.cuda.current_stream(self.device).wait_event(arrived)
                self._compute(bucket, slot, gradients, lr, copies)
                if cuda:
                    slot.done = torch.cuda.Event()
                    slot.done.record(torch.cuda.current_stream(self.device))
                going.append(out.submit(self._store, bucket, slot))
            for future in going:
                future.result()
        if cuda:
            torch.cuda.synchronize(self.device)
        for name in gradients:
            self.steps[name] += 1
        moved = 2 * 4 * len(self._roles) * sum(b[1] - b[0] for b in todo)
        self.moved = Moved(moved, time.perf_counter() - began)

    def _lane(self, number: int) -> AbstractContextManager[Any]:
        lane = self._lanes[number]
        return nullcontext() if lane is None else torch.cuda.stream(lane)

    @torch.no_grad()
    def _load(
        self, bucket: tuple[int, int, list[_Piece]], slot: _Slot, before: Future[Any] | None
    ) -> Any:
        """Home to slot, once what the slot held has left it; an event on a GPU."""
        if before is not None:
            before.result()
        start, stop, _ = bucket
        with self._lane(0):
            if slot.freed is not None:
                self._lanes[0].wait_event(slot.freed)
            for role, held in slot.held.items():
                source = self._home[role][start:stop]
                if slot.pinned:
                    source = slot.pinned[role][: stop - start].copy_(source)
                held[: stop - start].copy_(source, non_blocking=True)
            return self._lanes[0].record_event() if self._lanes[0] is not None else None

    @torch.no_grad()
    def _store(self, bucket: tuple[int, int, list[_Piece]], slot: _Slot) -> None:
        """Slot to home, once its step has run."""
        start, stop, _ = bucket
        with self._lane(1):
            if slot.done is not None:
                self._lanes[1].wait_event(slot.done)
            for role, held in slot.held.items():
                target = slot.pinned[role][: stop - start] if slot.pinned else None
                target = self._home[role][start:stop] if target is None else target
                target.copy_(held[: stop - start], non_blocking=True)
            if self._lanes[1] is not None:
                slot.freed = self._lanes[1].record_event()
        if slot.pinned:
            slot.freed.synchronize()
            for role, pinned in slot.pinned.items():
                self._home[role][start:stop].copy_(pinned[: stop - start])

    def _compute(
        self,
        bucket: tuple[int, int, list[_Piece]],
        slot: _Slot,
        gradients: Mapping[str, Tensor],
        lr: float,
        copies: Mapping[str, Tensor],
    ) -> None:
        """AdamW over the pieces of a bucket that have gradients."""
        for decay in dict.fromkeys(self.decays.values()):
            lists: list[list[Tensor]] = [[], [], [], [], []]
            outside: list[
                tuple[Tensor, Tensor]
            ] = []  # weights that lie elsewhere, and their pieces
            for name, start, stop, at in bucket[2]:
                gradient = gradients.get(name)
                if gradient is None or self.decays[name] != decay:
                    continue
                held = {role: t[at : at + stop - start] for role, t in slot.held.items()}
                if "weight" not in held:
                    own = local(self.weights[name]).detach().view(-1)[start:stop]
                    held["weight"] = own.to(self.device)
                    if held["weight"] is not own:
                        outside.append((own, held["weight"]))
                part = local(gradient).reshape(-1)[start:stop].to(self.device)
                count = torch.full((), float(self.steps[name]), device=self.device)
                made = (held["weight"], part, *(held[role] for role in MOMENTS), count)
                for values, value in zip(lists, made, strict=True):
                    values.append(value)
                if name in copies:
                    outside.append((copies[name].detach().view(-1)[start:stop], held["weight"]))
            weights, parts, first, second, counts = lists
            if weights:
                adamw(
                    weights, parts, first, second, [], counts, fused=True, amsgrad=False,
                    beta1=self.betas[0], beta2=self.betas[1], lr=lr, weight_decay=decay,
                    eps=self.eps, maximize=False,
                )  # fmt: skip
            for target, value in outside:
                target.copy_(value)
