"""Packing: which samples share a micro-batch, and causal attention inside each sample of a packed
row.

Samples lie end to end in one row of tokens, so that linear layers do no work on padding; attention
pads inside buckets of like length, at a cost of samples × length², and no sample sees another.
Nothing here knows a model, beyond the interface through which `transformers` calls an attention
function.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = [
    "ATTENTION",
    "Bucket",
    "Layout",
    "layout",
    "micro_batches",
    "packed_attention",
    "register_attention",
    "shares",
    "token_index",
]

ATTENTION = "miles_packed"
"""The name under which `register_attention` tells `transformers` about `packed_attention`."""

BUCKET_RATIO = 0.7
BUCKET_SLACK = 16
"""A shorter sample joins a bucket when it fills this share of its length, or lacks at most this
many tokens."""
SHORT = 96
"""Up to this length plain products beat a fused attention kernel on a CPU."""


def micro_batches(lengths_S: np.ndarray, budget: int) -> list[np.ndarray]:
    """Split samples into micro-batches of at most `budget` tokens each; a longer sample gets one of
    its own.

    Returns arrays of sample indices, (samples,) int64, every sample in exactly one. Samples are
    taken longest first (ties by index), so that those of a micro-batch are alike; the result
    depends on nothing but the arguments.
    """
    if budget < 1:
        raise ValueError(f"token budget is {budget}; it must be at least 1")
    order = np.argsort(-np.asarray(lengths_S, np.int64), kind="stable")  # (S,) int64
    cuts, room = [], 0
    for place, length in enumerate(np.asarray(lengths_S)[order].tolist()):
        if place == 0 or length > room:
            cuts.append(place)
            room = budget
        room -= length
    return np.split(order, cuts[1:]) if len(order) else []


def shares(lengths_S: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Deal samples to ranks so that token counts are near equal: longest first, each to the
    lightest rank.

    Returns `ranks` arrays of sample indices in rising order, some empty when samples are few. The
    heaviest share is at most 4/3 of the best possible (Graham 1969), and every rank computes the
    same answer.
    """
    if ranks == 1:
        return [np.arange(len(lengths_S))]
    load = [0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for sample in np.argsort(-np.asarray(lengths_S, np.int64), kind="stable").tolist():
        lightest = load.index(min(load))
        load[lightest] += int(lengths_S[sample])
        dealt[lightest].append(sample)
    return [np.array(sorted(samples), np.int64) for samples in dealt]


def token_index(lengths_S: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """(tokens,) int64: where the tokens of `samples`, in that order, lie in the flat arrays of a
    batch."""
    starts_S = np.cumsum(lengths_S, dtype=np.int64) - lengths_S
    chosen = np.asarray(lengths_S, np.int64)[samples]
    packed = np.cumsum(chosen) - chosen
    shift = np.repeat(starts_S[samples] - packed, chosen)  # (tokens,) int64
    index: np.ndarray = np.arange(len(shift)) + shift
    return index


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive packed samples of like length."""

    start: int
    """First packed token."""
    stop: int
    """After the last packed token."""
    rows: int
    """Samples."""
    width: int
    """Length of the longest."""
    pad: Tensor | None
    """(rows × width,) int64 from padded place to packed token, counted from `start`; None when
    nothing is padded."""
    unpad: Tensor | None
    """(stop - start,) int64 from packed token to padded place."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples lie in one packed row of T tokens."""

    positions: Tensor
    """(1, T) int64: position of each token in its own sample."""
    offsets: Tensor
    """(S + 1,) int32: where samples begin and end (cu_seqlens)."""
    buckets: tuple[Bucket, ...]
    """For attention; they cover the row in order."""


def layout(lengths_S: np.ndarray, device: torch.device | str = "cpu") -> Layout:
    """Describe samples of these lengths, in this order, laid end to end. Few buckets result when
    like lengths are neighbours, as `micro_batches` leaves them."""
    lengths_S = np.asarray(lengths_S, np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths_S)])  # (S + 1,) int64
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths_S)
    buckets = [
        _bucket(lengths_S[a:b], int(offsets[a]), device) for a, b in _runs(lengths_S.tolist())
    ]
    return Layout(
        positions=torch.from_numpy(positions)[None].to(device),
        offsets=torch.from_numpy(offsets.astype(np.int32)).to(device),
        buckets=tuple(buckets),
    )


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive samples that are alike enough for one bucket."""
    runs, first, low, high = [], 0, 0, 0
    for sample, length in enumerate(lengths):
        new_low, new_high = min(low, length), max(high, length)
        if sample == first:
            low = high = length
        elif new_low >= BUCKET_RATIO * new_high or new_high - new_low <= BUCKET_SLACK:
            low, high = new_low, new_high
        else:
            runs.append((first, sample))
            first, low, high = sample, length, length
    return [*runs, (first, len(lengths))] if lengths else []


def _bucket(lengths_s: np.ndarray, start: int, device: torch.device | str) -> Bucket:
    rows, width, total = len(lengths_s), int(lengths_s.max()), int(lengths_s.sum())
    if rows * width == total:
        return Bucket(start, start + total, rows, width, None, None)
    first_s = np.cumsum(lengths_s) - lengths_s
    column = np.arange(width)
    # A padded place repeats its sample's last token: it lies after every real one, so causality
    # hides it.
    pad = first_s[:, None] + np.minimum(column, lengths_s[:, None] - 1)
    unpad = np.flatnonzero((column < lengths_s[:, None]).ravel())
    return Bucket(
        start,
        start + total,
        rows,
        width,
        torch.from_numpy(pad.ravel()).to(device),
        torch.from_numpy(unpad).to(device),
    )


class _Pad(torch.autograd.Function):
    """Rows to padded rows. Padded places never influence a real one, so their gradient is 0 and is
    not added up."""

    @staticmethod
    def forward(ctx: Any, rows_tX: Tensor, pad: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        return rows_tX.index_select(0, pad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_pX: Tensor) -> tuple[Tensor, None, None]:
        (unpad,) = ctx.saved_tensors
        return grad_pX.index_select(0, unpad), None, None


class _Unpad(torch.autograd.Function):
    """Padded rows to rows; the gradient of a padded place is 0."""

    @staticmethod
    def forward(ctx: Any, padded_pX: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        ctx.places = len(padded_pX)
        return padded_pX.index_select(0, unpad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tX: Tensor) -> tuple[Tensor, None]:
        (unpad,) = ctx.saved_tensors
        grad_pX = grad_tX.new_zeros(ctx.places, *grad_tX.shape[1:])
        return grad_pX.index_copy_(0, unpad, grad_tX), None


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
    scores and attention sinks.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__}: packed attention has no soft cap and no sinks")
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    # (T, heads, D): rows of tokens, as the projections made them
    query, key, value = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    done = [_attend(bucket, query, key, value, scale, sliding_window) for bucket in packing.buckets]
    out_THD = done[0] if len(done) == 1 else torch.cat(done)
    return out_THD[None], None


def _attend(
    bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """One bucket of `packed_attention`: (tokens, heads, D) in and out."""
    if bucket.rows == 0:
        return query
    S, L, (H, D), K = bucket.rows, bucket.width, query.shape[1:], key.shape[1]
    parts = [x[bucket.start : bucket.stop] for x in (query, key, value)]
    if bucket.pad is not None:
        parts = [_Pad.apply(x, bucket.pad, bucket.unpad) for x in parts]  # type: ignore[no-untyped-call]
    q_SLHD, k_SLKD, v_SLKD = (x.reshape(S, L, x.shape[1], D) for x in parts)
    window = window if window is not None and window < L else None
    if query.is_cuda or L > SHORT:
        mask = None if window is None else _hidden(L, 1, window, query.device) == 0
        out_SLHD = F.scaled_dot_product_attention(
            q_SLHD.transpose(1, 2),
            k_SLKD.transpose(1, 2),
            v_SLKD.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=H != K,
        ).transpose(1, 2)
    else:
        # Query heads that share a key head are stacked as more queries, so keys are never repeated.
        G = H // K
        q = q_SLHD.reshape(S, L, K, G, D).permute(0, 2, 3, 1, 4).reshape(S * K, G * L, D)
        k, v = (x.transpose(1, 2).reshape(S * K, L, D) for x in (k_SLKD, v_SLKD))
        hidden = _hidden(L, G, window, query.device).to(q.dtype)
        scores = torch.baddbmm(hidden, q, k.transpose(1, 2), alpha=scale)
        work = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        out = torch.bmm(scores.softmax(-1, dtype=work).to(v.dtype), v)
        out_SLHD = out.view(S, K, G, L, D).permute(0, 3, 1, 2, 4)
    out_pHD = out_SLHD.reshape(S * L, H, D)
    if bucket.unpad is None:
        return out_pHD
    return cast(Tensor, _Unpad.apply(out_pHD, bucket.unpad))  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=64)
def _hidden(length: int, repeats: int, window: int | None, device: torch.device) -> Tensor:
    """(repeats × length, length) float32: 0 where a query sees a key, -inf where it does not."""
    place = torch.arange(length, device=device)
    behind = place[:, None] - place
    sees = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return (
        torch.zeros(length, length, device=device)
        .masked_fill_(~sees, float("-inf"))
        .repeat(repeats, 1)
    )


def register_attention() -> None:
    """Tell `transformers` of `packed_attention`. No mask function goes with it: without one, models
    make no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
