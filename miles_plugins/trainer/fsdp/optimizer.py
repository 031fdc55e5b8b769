"""Masters and AdamW: float32 copies of the weights, their gradients, and the learning rate of each
step.

It knows nothing of batches or losses; `worker` fills the gradients.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles import CheckpointError
from miles_plugins.trainer.fsdp.ranks import local, place, whole
from miles_plugins.trainer.fsdp.streaming import Streamed

__all__ = ["Away", "Masters", "learning_rate"]

STATE = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a weight once it had a gradient."""


@dataclass(frozen=True, slots=True)
class Away:
    """Where optimizer state is kept that does not stay on the device."""

    device: torch.device
    """Where steps are computed."""
    bucket: int
    """Elements of each array that visit the device at a time."""
    directory: Path | None
    """Files are kept here; None for pinned host memory."""


def learning_rate(
    step: int, *, peak: float, warmup: int, schedule: str, steps: int, min_ratio: float
) -> float:
    """Learning rate of a stage's step, counted from 0.

    Rises linearly over `warmup` steps, reaching `peak` at the last of them; then stays, or follows
    a half cosine down to `min_ratio` × `peak` at step `steps` - 1 (Loshchilov and Hutter 2017,
    arXiv:1608.03983).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    span = max(1, steps - 1 - warmup)
    done = min(1.0, (step - warmup) / span)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done)))


class Masters:
    """The weights that the optimizer keeps, by Hugging Face name.

    In float32 they are the model's own parameters. When one rank computes in another type, the
    model holds a copy in that type, whose gradients are added into the masters' as soon as they are
    complete; sharded models do the same inside FSDP. With `away` the moments, and masters that are
    not the model's own, live in host memory or on disk; their gradients are kept apart, on the
    device.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute: torch.dtype,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        away: Away | None = None,
    ) -> None:
        seen: set[int] = set()
        self.named: dict[str, Tensor] = {}  # parameters and saved buffers, tied ones once
        self.trained: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}  # the model's own, where masters are others
        self._apart: dict[str, Tensor] = {}  # gradients of masters that are not on the device
        self._streamed: Streamed | None = None
        sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
        split = compute != torch.float32 and not sharded
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            self.named[name] = tensor
            if isinstance(tensor, nn.Parameter):
                self.trained[name] = tensor
        decays = {n: weight_decay if t.ndim >= 2 else 0.0 for n, t in self.trained.items()}
        if away is not None:
            self._streamed = Streamed(
                self.trained,
                device=away.device,
                betas=betas,
                eps=eps,
                decays=decays,
                bucket=away.bucket,
                directory=away.directory,
                take=split,
            )
        if split:
            for name, parameter in list(self.trained.items()):
                self._split(name, parameter, compute)
        if self._streamed is None:
            matrices = [m for m in self.trained.values() if m.ndim >= 2]
            vectors = [m for m in self.trained.values() if m.ndim < 2]
            self.optimizer = torch.optim.AdamW(
                [
                    {"params": matrices, "weight_decay": weight_decay},
                    {"params": vectors, "weight_decay": 0.0},
                ],
                betas=betas,
                eps=eps,
                fused=True,
            )

    def _split(self, name: str, parameter: Tensor, compute: torch.dtype) -> None:
        """Make the model's parameter a copy in `compute`, and its float32 values the master."""
        if self._streamed is not None:
            master = self._streamed.weights[name]
        else:
            master = parameter.detach().clone().requires_grad_(True)
        parameter.data = parameter.data.to(compute)
        self.named[name] = self.trained[name] = master
        self._copies[name] = parameter

        # weakly: the collector does not see what a parameter's hook holds, and all would stay
        held = weakref.ref(self)

        def hand_over(copy: Tensor) -> None:
            if copy.grad is not None and (masters := held()) is not None:
                masters._take(name, copy)

        parameter.register_post_accumulate_grad_hook(hand_over)

    def _take(self, name: str, copy: Tensor) -> None:
        """Add a copy's gradient to its master's."""
        grad, copy.grad = copy.grad.float(), None  # type: ignore[union-attr]
        before = self._gradient(name)
        if before is not None:
            before.add_(grad)
        elif self._streamed is None:
            self.trained[name].grad = grad
        else:
            self._apart[name] = grad

    def _gradient(self, name: str) -> Tensor | None:
        found = self._apart.get(name)
        return self.trained[name].grad if found is None else found

    def _gradients(self) -> dict[str, Tensor]:
        """Those that there are, in the order of the weights."""
        found = {name: self._gradient(name) for name in self.trained}
        return {name: grad for name, grad in found.items() if grad is not None}

    def scale_gradients(self, factor: float) -> None:
        """Multiply them, in float32."""
        gradients = self._gradients().values()
        if gradients and factor != 1.0:
            torch._foreach_mul_([local(grad) for grad in gradients], factor)

    def norm(self) -> float:
        """Global 2-norm of the gradients; every rank has to ask."""
        grads = list(self._gradients().values())
        return float(whole(nn.utils.get_total_norm(grads))) if grads else 0.0

    def not_finite(self) -> list[str]:
        """Names of weights whose gradient, in this rank's part, is not finite."""
        found = self._gradients().items()
        return [name for name, grad in found if not bool(local(grad).isfinite().all())]

    def update(self, lr: float, *, norm: float, clip: float) -> None:
        """Scale gradients down to norm `clip` (0: never), take one step, drop the gradients."""
        gradients = self._gradients()
        if clip and norm > clip and gradients:
            shrink = clip / (norm + 1e-6)
            torch._foreach_mul_([local(grad) for grad in gradients.values()], shrink)
        if self._streamed is not None:
            self._streamed.step(gradients, lr=lr, copies=self._copies)
            self.drop_gradients()
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.drop_gradients()
        self.spread()

    def drop_gradients(self) -> None:
        """Free them."""
        self._apart.clear()
        for tensor in (*self.trained.values(), *self._copies.values()):
            tensor.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Bring the model's copies, if it has any, up to date with the masters."""
        for name, copy in self._copies.items():
            copy.copy_(self.named[name])

    @torch.no_grad()
    def write(self, name: str, full: Tensor) -> None:
        """Replace a whole weight; `spread` has to follow."""
        master = self.named[name]
        local(master).copy_(place(full.to(master.dtype), master))

    @torch.no_grad()
    def exported(self, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every whole weight in `dtype` (others than floating ones as they are) on `device`; every
        rank has to iterate. May be the live tensor."""
        for name, master in self.named.items():
            copy = self._copies.get(name)
            if self._streamed is not None and copy is not None and copy.dtype == dtype:
                yield name, copy.detach()  # the same bits, without a way through the host
                continue
            full = whole(master, device).detach()
            yield name, full.to(dtype) if full.is_floating_point() else full

    def tensors(self) -> Iterator[Tensor]:
        """Everything held on the device: masters, copies, moments."""
        yield from self._copies.values()
        if self._streamed is None:
            for state in self.optimizer.state.values():
                yield from state.values()
        apart = self._streamed.weights if self._streamed is not None and self._copies else {}
        yield from (m for name, m in self.named.items() if name not in apart)

    @property
    def streamed(self) -> Streamed | None:
        """The optimizer when its state is kept away from the device."""
        return self._streamed

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of this rank's part of every weight."""
        return {name: local(m).detach().clone() for name, m in self.named.items()}

    @torch.no_grad()
    def swap(self, other: dict[str, Tensor]) -> None:
        """Exchange the weights with a snapshot, in place; the model's copies follow."""
        for name, master in self.named.items():
            mine = local(master)
            kept = mine.detach().clone()
            mine.copy_(other[name])
            other[name] = kept
        self.spread()

    def _state(self, name: str) -> Mapping[str, Tensor]:
        """AdamW's state of one weight; empty before its first step."""
        if self._streamed is not None:
            return self._streamed.state(name)
        return dict(self.optimizer.state.get(self.trained[name], {}))

    def moments(self) -> dict[str, Tensor]:
        """This rank's part of AdamW's state as `<weight>:<state>`; empty before the first step."""
        return {
            f"{name}:{key}": local(value)
            for name in self.trained
            for key, value in self._state(name).items()
        }

    def set_moments(self, stored: Mapping[str, Tensor], where: str) -> None:
        """Replace AdamW's state by one from `moments`, or reset it with nothing. A weight of which
        nothing is stored never had a gradient and has no state. Raises `CheckpointError`, with the
        state reset."""
        self._reset()
        faults, found = [], {}
        for name, master in self.trained.items():
            state = {key: stored[f"{name}:{key}"] for key in STATE if f"{name}:{key}" in stored}
            if not state:
                continue
            found[name] = state
            for key in STATE:
                wanted = () if key == "step" else tuple(local(master).shape)
                if key not in state:
                    faults.append(f"{name}:{key} is missing")
                elif tuple(state[key].shape) != wanted:
                    faults.append(f"{name}:{key} has shape {tuple(state[key].shape)}, not {wanted}")
        known = {f"{n}:{k}" for n in self.trained for k in STATE}
        faults += [f"{name} is extra" for name in sorted(set(stored) - known)]
        if faults:
            raise CheckpointError(f"{where}: optimizer state does not fit: {'; '.join(faults[:8])}")
        for name, state in found.items():
            self._set_state(name, state)

    def _reset(self) -> None:
        if self._streamed is None:
            self.optimizer.state.clear()
            return
        for name in self.trained:
            self._streamed.set_state(name, {})

    def _set_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        if self._streamed is not None:
            self._streamed.set_state(name, state)
            return
        master = self.trained[name]
        held: dict[str, Any] = {}
        for key, value in state.items():
            if key == "step":
                held[key] = value.to(master.device, copy=True)  # where a fused AdamW keeps it
            else:
                held[key] = torch.zeros_like(master, requires_grad=False)
                local(held[key]).copy_(value)
        self.optimizer.state[master] = held
