"""Causal attention inside each sample of a packed row, in the form that `transformers` calls.

Samples are padded inside buckets of like length, at a cost of samples × length² and not of tokens²,
or go unpadded to a kernel of `kernels`; no sample sees another. How a row was laid out is
`packing`'s business.
"""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.errors import ConfigError
from miles.learn import kernels
from miles.learn.packing import Bucket, Layout, Stretches

__all__ = ["ATTENTION", "choose_attention", "packed_attention", "register_attention"]

_log = logging.getLogger(__name__)

ATTENTION = "miles_packed"
"""The name under which `register_attention` tells `transformers` about `packed_attention`."""

SHORT = 96
"""Up to this length plain products beat a fused attention kernel on a CPU."""


class _Spread(torch.autograd.Function):
    """Packed rows to padded places. A place of padding never influences a real one, so its gradient
    is 0; `back` names the one place of each row that has another, None when there may be
    several."""

    @staticmethod
    def forward(ctx: Any, rows_TX: Tensor, gather: Tensor, back: Tensor | None) -> Tensor:
        ctx.save_for_backward(gather, back)
        ctx.rows = len(rows_TX)
        return rows_TX.index_select(0, gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PX: Tensor) -> tuple[Tensor, None, None]:
        gather, back = ctx.saved_tensors
        if back is not None:
            return grad_PX.index_select(0, back), None, None
        grad_TX = grad_PX.new_zeros(ctx.rows, *grad_PX.shape[1:])
        return grad_TX.index_add_(0, gather, grad_PX), None, None


class _Collect(torch.autograd.Function):
    """Padded places to packed rows; the gradient of a place that nobody picks is 0."""

    @staticmethod
    def forward(ctx: Any, places_PX: Tensor, pick: Tensor) -> Tensor:
        ctx.save_for_backward(pick)
        ctx.places = len(places_PX)
        return places_PX.index_select(0, pick)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, None]:
        (pick,) = ctx.saved_tensors
        grad_PX = grad_TX.new_zeros(ctx.places, *grad_TX.shape[1:])
        return grad_PX.index_copy_(0, pick, grad_TX), None


def packed_attention(
    module: torch.nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sample of a packed row, as `transformers` calls it; returns (1,
    T, H, D).

    H query heads share K key heads. `packing` arrives through the model's keyword arguments.
    Dropout is never applied: rollout has none, and log-probs must agree with it. Raises
    `ValueError` for features that would change the result and are not computed here: soft-capped
    scores and attention sinks. Queries and keys that were rotated in a finer type than the values'
    are rounded to it here. Where ranks share the row, T are this rank's tokens, in and out.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__}: packed attention has no soft cap and no sinks")
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    query_1HTD, key_1KTD = (x.to(value_1KTD.dtype) for x in (query_1HTD, key_1KTD))
    if packing.split is None:
        return _whole(packing, query_1HTD, key_1KTD, value_1KTD, scale, sliding_window), None
    query, key, value = map(packing.split.to_heads, (query_1HTD, key_1KTD, value_1KTD))
    out_1THD = _whole(packing, query, key, value, scale, sliding_window)
    return packing.split.to_tokens(out_1THD), None


def _whole(
    packing: Layout,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """`packed_attention` of a row that is all here."""
    if packing.stretches is not None:
        kernel = kernels.flex if packing.way == "flex" else kernels.varlen
        out_THD = kernel(
            *_unpadded(packing.stretches, query_1HTD, key_1KTD, value_1KTD),
            packing.stretches,
            scale,
            window,
        )
        return out_THD[None]
    # (T, heads, D): rows of tokens, as the projections made them
    query, key, value = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    if packing.pick is not None:
        # A query is picked at one place, wherever else it was spread to. So are the keys of a token
        # that belongs to one sample; those of a shared prompt are used, and have a gradient, at
        # many.
        query = _spread(query, packing.queries, packing.pick)
        back = None if packing.shared else packing.pick
        key, value = _spread(key, packing.keys, back), _spread(value, packing.keys, back)
    asked = [bucket.rows * bucket.queries for bucket in packing.buckets]
    held = [bucket.rows * bucket.width for bucket in packing.buckets]
    parts = zip(
        packing.buckets,
        torch.split(query, asked),
        torch.split(key, held),
        torch.split(value, held),
        strict=True,
    )
    with kernels.first_cudnn() if packing.way == "cudnn" else nullcontext():
        done = [_attend(bucket, q, k, v, scale, window) for bucket, q, k, v in parts]
    out_PHD = done[0] if len(done) == 1 else torch.cat(done)
    if packing.pick is not None:
        out_PHD = _Collect.apply(out_PHD, packing.pick)  # type: ignore[no-untyped-call]
    return out_PHD[None]


def _unpadded(
    stretches: Stretches, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, H, D) queries as they lie in the row, (keys, K, D) keys and values of the stretches."""
    query, key, value = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    if stretches.gather is not None:
        key = _spread(key, stretches.gather, None)
        value = _spread(value, stretches.gather, None)
    return query, key, value


def choose_attention(asked: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """One of `padded`, `cudnn`, `varlen` and `flex`: what is asked for, or with `auto` the first of
    varlen, flex and padded that can be used here (in float32 padded), told in the log on a GPU.

    Raises `ConfigError`, with the reason, when what is asked for cannot be used.
    """
    reasons = kernels.reasons(device, dtype, head_dim)
    if asked == "auto":
        order = ("varlen", "flex", "padded") if dtype in kernels.HALF else ("padded",)
        asked = next(way for way in order if not reasons.get(way))
        if device.type == "cuda":
            missed = "; ".join(f"no {w}: {r}" for w, r in reasons.items() if r)
            _log.info("attention: %s%s", asked, f" ({missed})" if missed else "")
    elif reasons.get(asked):
        raise ConfigError(f"attention {asked!r} cannot be used here: {reasons[asked]}")
    return asked


def _spread(rows_TX: Tensor, gather: Tensor | None, back: Tensor | None) -> Tensor:
    out: Tensor = _Spread.apply(rows_TX, gather, back)  # type: ignore[no-untyped-call]
    return out


def _attend(
    bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """One bucket of `packed_attention`: (rows × queries, H, D) and twice (rows × width, K, D) in,
    (rows × queries, H, D) out."""
    S, Q, L, (H, D), K = bucket.rows, bucket.queries, bucket.width, query.shape[1:], key.shape[1]
    q_SQHD, k_SLKD, v_SLKD = query.view(S, Q, H, D), key.view(S, L, K, D), value.view(S, L, K, D)
    window = window if window is not None and window < L else None
    if bucket.at is None and (query.is_cuda or L > SHORT):
        mask = None if window is None else _hidden(L, window, query.device) == 0
        out_SHQD = F.scaled_dot_product_attention(
            q_SQHD.transpose(1, 2),
            k_SLKD.transpose(1, 2),
            v_SLKD.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=H != K,
        )
        return out_SHQD.transpose(1, 2).reshape(S * Q, H, D)
    # Query heads that share a key head are stacked as more queries, so keys are never repeated.
    G = H // K
    q_SKGQD = (q_SQHD * scale).view(S, Q, K, G, D).permute(0, 2, 3, 1, 4)
    q, k, v = q_SKGQD.reshape(S, K, G * Q, D), k_SLKD.transpose(1, 2), v_SLKD.transpose(1, 2)
    scores = torch.matmul(q, k.transpose(2, 3))  # (S, K, G × Q, L)
    scores.add_(_mask(bucket, G, window, query.device))
    work = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    out = torch.matmul(scores.softmax(-1, dtype=work).to(v.dtype), v)
    return out.view(S, K, G, Q, D).permute(0, 3, 1, 2, 4).reshape(S * Q, H, D)


def _mask(bucket: Bucket, groups: int, window: int | None, device: torch.device) -> Tensor:
    """What is added to a bucket's (S, K, groups × Q, L) scores, made once for all layers."""
    key = groups, window
    if key not in bucket.masks:
        if bucket.at is None:
            bucket.masks[key] = _hidden(bucket.width, window, device).repeat(groups, 1)
        else:
            hidden_SQL = _hidden_at(bucket.at, bucket.width, window)
            bucket.masks[key] = hidden_SQL.repeat(1, groups, 1)[:, None]
    return bucket.masks[key]


@functools.lru_cache(maxsize=64)
def _hidden(length: int, window: int | None, device: torch.device) -> Tensor:
    """(length, length) float32: 0 where a query sees a key, -inf where it does not."""
    return _hidden_at(torch.arange(length, device=device), length, window)


def _hidden_at(at: Tensor, length: int, window: int | None) -> Tensor:
    """(..., length) float32 for queries at positions `at` (...), as `_hidden`."""
    behind = at[..., None] - torch.arange(length, device=at.device)
    unseen = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return torch.zeros(behind.shape, device=at.device).masked_fill_(unseen, float("-inf"))


def register_attention(*, opaque: bool = False) -> None:
    """Tell `transformers` of `packed_attention`. No mask function goes with it: without one, models
    make no mask. `opaque` keeps torch.compile from looking inside: its layout differs from row to
    row, and the kernels are fused already."""
    from transformers import AttentionInterface

    function: Any = packed_attention
    if opaque:
        function = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, function)
