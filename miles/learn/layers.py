"""Quicker forms of two small layers on a CPU, with the same values and fewer passes over memory.

Only `quicken` is meant for others. It changes instances, never classes or modules, and only where a
trial shows that nothing changes but rounding; anything it does not recognise stays as it is.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["quicken", "rms_norm", "rotate"]

ROTARY = "apply_rotary_pos_emb"
"""What attention modules of `transformers` call to rotate queries and keys."""


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


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-way)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=way)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split form (Su et al. 2021, arXiv:2104.09864): element i and i +
    D/2 of the last axis turn together. `cos` and `sin` broadcast to `x` (..., D), their two halves
    are equal, and they get no gradient; that of `x` is the rotation back."""
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def quicken(model: nn.Module) -> int:
    """Replace the forward of root-mean-square norms, and the rotation inside attention modules; how
    many were."""
    norms = sum(_quicken_norm(module) for module in model.modules())
    return norms + sum(_quicken_rotary(module) for module in model.modules())


def _plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and not x.is_cuda


def _quicken_norm(module: nn.Module) -> bool:
    """A norm has one vector parameter `weight` and a number `variance_epsilon`, and its values are
    `rms_norm`'s."""
    eps = getattr(module, "variance_epsilon", None)
    if not isinstance(eps, float) or [n for n, _ in module.named_parameters()] != ["weight"]:
        return False
    weight = module.get_parameter("weight")
    if weight.ndim != 1 or not _plain(weight):
        return False
    trial = torch.linspace(-2.0, 3.0, 4 * len(weight)).view(4, -1).sin_()
    with torch.no_grad():
        same = torch.allclose(module(trial), rms_norm(trial, weight, eps), rtol=1e-5, atol=1e-6)
    if same:
        module.forward = types.MethodType(_norm_forward, module)
    return same


def _norm_forward(self: Any, hidden_states: Tensor) -> Any:
    if not (_plain(hidden_states) and _plain(self.weight)):
        return type(self).forward(self, hidden_states)
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _quicken_rotary(module: nn.Module) -> bool:
    """An attention module's forward calls a global function for the rotation: this instance gets a
    copy of the forward that calls another, if the function's values are `rotate`'s."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType) or ROTARY not in forward.__code__.co_names:
        return False
    original = forward.__globals__.get(ROTARY)
    if not callable(original) or not _rotates_halves(original):
        return False

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not (_plain(q) and _plain(k) and _plain(cos)):
            return original(q, k, cos, sin, *args, **kwargs)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    copy = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: rotary},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(copy, module)
    return True


def _rotates_halves(function: Callable[..., Any]) -> bool:
    x = torch.linspace(-1.0, 2.0, 2 * 3 * 8).view(1, 2, 3, 8)
    angle = torch.linspace(0.1, 2.0, 12).view(1, 3, 4).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    try:
        found = function(x, x[:, :1], cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # another signature: nothing to do with ours
    wanted = rotate(x, cos[:, None], sin[:, None])
    return (
        isinstance(found, tuple)
        and len(found) == 2
        and found[0].shape == wanted.shape
        and torch.allclose(found[0], wanted, rtol=1e-5, atol=1e-6)
        and torch.allclose(found[1], wanted[:, :1], rtol=1e-5, atol=1e-6)
    )
