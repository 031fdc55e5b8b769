"""Masters and AdamW: float32 copies of the weights, their gradients, and the learning rate of each
step.

It knows nothing of batches or losses; `worker` fills the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from miles import CheckpointError
from miles_plugins.trainer.fsdp.ranks import local, place, whole

__all__ = ["Masters", "learning_rate"]


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
    complete; sharded models do the same inside FSDP.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute: torch.dtype,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        seen: set[int] = set()
        self.named: dict[str, Tensor] = {}  # parameters and saved buffers, tied ones once
        self.trained: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            master = tensor
            if isinstance(tensor, nn.Parameter):
                if compute != torch.float32 and not sharded:
                    master = self._split(tensor, compute)
                self.trained[name] = master
            self.named[name] = master
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

    def _split(self, parameter: nn.Parameter, compute: torch.dtype) -> Tensor:
        master = parameter.detach().clone().requires_grad_(True)
        parameter.data = parameter.data.to(compute)
        self._copies.append((parameter, master))

        def hand_over(copy: Tensor) -> None:
            if copy.grad is None:
                return
            grad = copy.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            copy.grad = None

        parameter.register_post_accumulate_grad_hook(hand_over)
        return master

    def norm(self) -> float:
        """Global 2-norm of the gradients; every rank has to ask."""
        grads = [m.grad for m in self.trained.values() if m.grad is not None]
        return float(whole(nn.utils.get_total_norm(grads))) if grads else 0.0

    def not_finite(self) -> list[str]:
        """Names of weights whose gradient, in this rank's part, is not finite."""
        return [
            name
            for name, master in self.trained.items()
            if master.grad is not None and not bool(local(master.grad).isfinite().all())
        ]

    def update(self, lr: float, *, norm: float, clip: float) -> None:
        """Scale gradients down to norm `clip` (0: never), take one step, drop the gradients."""
        if clip and norm > clip:
            shrink = clip / (norm + 1e-6)
            torch._foreach_mul_(
                [local(m.grad) for m in self.trained.values() if m.grad is not None], shrink
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.drop_gradients()
        self.spread()

    def drop_gradients(self) -> None:
        """Free them."""
        self.optimizer.zero_grad(set_to_none=True)
        for copy, _ in self._copies:
            copy.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Bring the model's copies, if it has any, up to date with the masters."""
        for copy, master in self._copies:
            copy.copy_(master)

    @torch.no_grad()
    def write(self, name: str, full: Tensor) -> None:
        """Replace a whole weight; `spread` has to follow."""
        master = self.named[name]
        local(master).copy_(place(full.to(master.dtype), master))

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

    def moments(self) -> dict[str, Tensor]:
        """This rank's part of AdamW's state as `<weight>:<state>`; empty before the first step."""
        found = {}
        for name, master in self.trained.items():
            for key, value in self.optimizer.state.get(master, {}).items():
                found[f"{name}:{key}"] = local(value)
        return found

    def set_moments(self, stored: Mapping[str, Tensor], where: str) -> None:
        """Replace AdamW's state by one from `moments`, or reset it with nothing. Raises
        `CheckpointError`."""
        self.optimizer.state.clear()
        if not stored:
            return
        faults = []
        for name, master in self.trained.items():
            state: dict[str, Any] = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = stored.get(f"{name}:{key}")
                wanted = () if key == "step" else tuple(local(master).shape)
                if value is None:
                    faults.append(f"{name}:{key} is missing")
                elif tuple(value.shape) != wanted:
                    faults.append(f"{name}:{key} has shape {tuple(value.shape)}, not {wanted}")
                elif key == "step":
                    state[key] = value.to(master.device, copy=True)  # where a fused AdamW keeps it
                else:
                    state[key] = torch.zeros_like(master, requires_grad=False)
                    local(state[key]).copy_(value)
            self.optimizer.state[master] = state
        known = {f"{n}:{k}" for n in self.trained for k in ("step", "exp_avg", "exp_avg_sq")}
        faults += [f"{name} is extra" for name in sorted(set(stored) - known)]
        if faults:
            self.optimizer.state.clear()
            raise CheckpointError(f"{where}: optimizer state does not fit: {'; '.join(faults[:8])}")

    def move(self, device: torch.device) -> None:
        """Move masters that are not the model's own, and the moments."""
        for _, master in self._copies:
            master.data = master.data.to(device)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if key != "step":
                    state[key] = value.to(device)
