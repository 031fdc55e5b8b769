"""Quicker forms of small layers on a CPU, with the same values and fewer passes over memory.

Only `quicken` is public. It changes instances, never classes, and only where a trial shows that
nothing changes but rounding; anything it does not recognise stays as it is.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["quicken", "rms_norm"]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows_nH = x.reshape(-1, x.shape[-1])
        scale_n = torch.linalg.vecdot(rows_nH, rows_nH).div_(x.shape[-1]).add_(eps).rsqrt_()
        unit_nH = rows_nH * scale_n[:, None]
        ctx.save_for_backward(unit_nH, scale_n, weight)
        out_nH: Tensor = unit_nH * weight
        return out_nH.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit_nH, scale_n, weight = ctx.saved_tensors
        grad_nH = grad.reshape(unit_nH.shape)
        for_weight_nH = grad_nH * unit_nH
        along_n = (for_weight_nH @ weight).div_(-unit_nH.shape[1])
        out_nH = grad_nH * weight
        out_nH.addcmul_(unit_nH, along_n[:, None]).mul_(scale_n[:, None])
        return out_nH.view(grad.shape), for_weight_nH.sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last axis (Zhang and Sennrich 2019,
    arXiv:1910.07467).

    `x` (..., H) and `weight` (H,) in one type, float32 or float64; gradients to both, once.
    """
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _forward(self: Any, hidden_states: Tensor) -> Any:
    if hidden_states.dtype != torch.float32 or hidden_states.is_cuda:
        return type(self).forward(self, hidden_states)
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def quicken(model: nn.Module) -> int:
    """Replace the forward of root-mean-square norms in `model`; how many were.

    A module qualifies when it has one vector parameter `weight` and a number `variance_epsilon` and
    its own forward agrees with `rms_norm` on a random input.
    """
    changed = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", None)
        if not isinstance(eps, float) or [n for n, _ in module.named_parameters()] != ["weight"]:
            continue
        weight = module.get_parameter("weight")
        if weight.ndim != 1 or weight.dtype != torch.float32 or weight.is_cuda:
            continue
        trial = torch.linspace(-2.0, 3.0, 4 * len(weight)).view(4, -1).sin_()
        with torch.no_grad():
            if torch.allclose(module(trial), rms_norm(trial, weight, eps), rtol=1e-5, atol=1e-6):
                module.forward = types.MethodType(_forward, module)
                changed += 1
    return changed
