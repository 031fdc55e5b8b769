"""Attention kernels of torch for sequences of unlike lengths that lie end to end.

Which of them can be used depends on torch, device and type: `reasons` says why not. Choosing one is
`attention`'s business.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.learn.packing import Stretches

__all__ = ["HALF", "first_cudnn", "flex", "reasons", "varlen"]

HALF = (torch.bfloat16, torch.float16)
"""Types that fused attention kernels compute in."""


def reasons(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, str]:
    """Why each way cannot be used here, empty where it can."""
    gpu = "" if device.type == "cuda" else "it needs a GPU"
    half = "" if dtype in HALF else f"it computes in bfloat16 and float16, not {dtype}"
    size = "" if head_dim <= 256 and head_dim % 8 == 0 else f"heads of {head_dim} are not for it"
    return {
        "padded": "",
        "varlen": gpu or half or size or ("" if _varlen_options() else "torch 2.11 brought it"),
        "flex": gpu or ("" if head_dim >= 16 else f"heads of {head_dim} are too small"),
        "cudnn": gpu or half or size,
    }


@functools.cache
def _varlen_options() -> dict[str, Any]:
    """What `varlen_attn` is called with in this torch; empty when it lacks a scale or a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known or "window_size" not in known:
        return {}
    return {"call": varlen_attn, "grouped": "enable_gqa" in known}


def varlen(
    query_THD: Tensor,
    key_NKD: Tensor,
    value_NKD: Tensor,
    stretches: Stretches,
    scale: float,
    window: int | None,
) -> Tensor:
    """(T, H, D) by torch's variable-length FlashAttention, causal from the end of each stretch."""
    options = _varlen_options()
    more = {"enable_gqa": query_THD.shape[1] != key_NKD.shape[1]} if options["grouped"] else {}
    out: Tensor = options["call"](
        query_THD,
        key_NKD,
        value_NKD,
        stretches.queries,
        stretches.keys,
        stretches.longest_query,
        stretches.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **more,
    )
    return out


@functools.cache
def _compiled(name: str) -> Any:
    from torch.nn.attention import flex_attention as module

    return torch.compile(getattr(module, name), dynamic=True)


def flex(
    query_THD: Tensor,
    key_NKD: Tensor,
    value_NKD: Tensor,
    stretches: Stretches,
    scale: float,
    window: int | None,
) -> Tensor:
    """(T, H, D) by torch's FlexAttention, compiled on a GPU; its block mask is made once a layout
    and window."""
    from torch.nn.attention import flex_attention as module

    compiled = query_THD.is_cuda
    if window not in stretches.masks:
        make = _compiled("create_block_mask") if compiled else module.create_block_mask
        sizes = len(query_THD), len(key_NKD)
        seen = _sees(stretches, *sizes, window)
        stretches.masks[window] = make(seen, None, None, *sizes, device=query_THD.device)
    attend = _compiled("flex_attention") if compiled else module.flex_attention
    out = attend(
        query_THD.transpose(0, 1)[None],
        key_NKD.transpose(0, 1)[None],
        value_NKD.transpose(0, 1)[None],
        block_mask=stretches.masks[window],
        scale=scale,
        enable_gqa=query_THD.shape[1] != key_NKD.shape[1],
    )
    return out[0].transpose(0, 1)  # type: ignore[no-any-return]


def _sees(stretches: Stretches, queries: int, keys: int, window: int | None) -> Any:
    """Whether a query sees a key: of one stretch, not after it, less than `window` before it."""
    device = stretches.queries.device

    def of(edges: Tensor, count: int) -> Tensor:
        return torch.bucketize(torch.arange(count, device=device), edges[1:], right=True)

    of_query, of_key = of(stretches.queries, queries), of(stretches.keys, keys)
    # Both end together: counted from the end, a key at or after the query's own place is seen.
    left_query = stretches.queries[1:][of_query] - torch.arange(queries, device=device)
    left_key = stretches.keys[1:][of_key] - torch.arange(keys, device=device)

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        behind = left_key[key] - left_query[query]
        near = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        return (of_query[query] == of_key[key]) & near

    return seen


def first_cudnn() -> AbstractContextManager[Any]:
    """Prefer cuDNN's fused attention to the others inside."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)
