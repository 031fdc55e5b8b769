"""Log-probs and entropies of tokens from hidden states and an output head, never holding (tokens ×
vocab) whole.

It knows nothing of models, batches or losses. The matrix of logits is made a tile at a time and
made again in the backward pass; one tile is enough for a small vocabulary, and then nothing is
computed twice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["product", "token_logprobs"]

TILE_CPU = 1 << 22
TILE_CUDA = 1 << 26
"""Elements of one tile of logits: 16 MiB in float32 on a CPU, 256 MiB on a GPU, where small
products are slow."""
TILE_VOCAB = 1 << 13
"""Widest tile when the vocabulary has to be cut, so that a tile still has many rows."""


def token_logprobs(
    hidden_RH: Tensor,
    head_VH: Tensor,
    targets_R: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    tile: int | None = None,
    fused: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each row's target under softmax(hidden @ head.T / temperature), and that
    distribution's entropy.

    `hidden_RH` (rows, hidden) and `head_VH` (vocab, hidden) share a floating type; `targets_R` is
    (rows,) int64. Products are taken in that type, everything after in float32 (float64 stays
    float64). Returns (rows,) log-probs in nats and, when `entropy` is true, (rows,) entropies in
    nats, otherwise None. Both have gradients to hidden and head:

        d logp / d z_j = [j = target] - p_j        d entropy / d z_j = -p_j (z_j - sum_i p_i z_i)

    with z the logits after the temperature. Peak extra memory is about two tiles of `tile` elements
    and, where the head is trained, one float32 gradient of it. `fused` compiles the arithmetic on
    a tile into one kernel each way (torch.compile), so that a tile is read in the products' type
    and never written in float32; values differ by rounding. With `wide` logits are not rounded to
    the shared type: see `product`.
    """
    if hidden_RH.ndim != 2 or head_VH.ndim != 2 or hidden_RH.shape[1] != head_VH.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_RH.shape)} does not fit head {tuple(head_VH.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if tile is None:
        tile = TILE_CUDA if hidden_RH.is_cuda else TILE_CPU
    logprobs_R, entropy_R = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_RH, head_VH, targets_R, 1.0 / temperature, entropy, tile, fused, wide
    )
    return logprobs_R, entropy_R if entropy else None


def _tiles(rows: int, vocab: int, tile: int) -> list[tuple[slice, list[slice]]]:
    """Blocks of rows, each with its slices of the vocabulary; one of each spans at most `tile`
    logits."""
    width = vocab if rows * vocab <= tile else min(vocab, TILE_VOCAB, tile)
    height = max(1, tile // width)
    across = [slice(i, min(i + width, vocab)) for i in range(0, vocab, width)]
    return [(slice(i, min(i + height, rows)), across) for i in range(0, rows, height)]


def product(hidden_RH: Tensor, head_VH: Tensor, *, wide: bool = False) -> Tensor:
    """(R, V) logits, rounded to the type of both; with `wide` to float32 at least, while what is
    multiplied stays in its type: products of bfloat16 or float16 are exact in float32."""
    if not wide or hidden_RH.dtype in (torch.float32, torch.float64):
        return hidden_RH @ head_VH.t()
    if hidden_RH.is_cuda:
        return torch.mm(hidden_RH, head_VH.t(), out_dtype=torch.float32)
    return hidden_RH.float() @ head_VH.float().t()


def _logits(hidden_rH: Tensor, head_vH: Tensor, scale: float, wide: bool) -> Tensor:
    logits_rv = product(hidden_rH, head_vH, wide=wide)
    if logits_rv.dtype not in (torch.float32, torch.float64):
        logits_rv = logits_rv.float()
    return logits_rv if scale == 1.0 else logits_rv.mul_(scale)


def _locate(targets_r: Tensor, v: slice) -> tuple[Tensor, Tensor]:
    """Column of each row's target inside the slice, and 1 where it is inside, 0 where the column
    means nothing."""
    inside_r = (targets_r >= v.start) & (targets_r < v.stop)
    return (targets_r - v.start).clamp_(0, v.stop - v.start - 1)[:, None], inside_r


def _summary(
    logits_rv: Tensor, column_r1: Tensor, inside_r: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a tile of logits as the product left them: (rows,) highest, sum of exponentials below it,
    their product with the logits, and the target's logit, 0 where it is outside."""
    z_rv = logits_rv.float() * scale
    high_r = z_rv.amax(1)
    powers_rv = (z_rv - high_r[:, None]).exp()
    picked_r = z_rv.gather(1, column_r1)[:, 0] * inside_r
    return high_r, powers_rv.sum(1), (powers_rv * z_rv).sum(1), picked_r


def _slope(
    logits_rv: Tensor,
    total_r: Tensor,
    mean_r: Tensor,
    grad_r: Tensor,
    grad_entropy_r: Tensor,
    column_r1: Tensor,
    inside_r: Tensor,
    scale: float,
) -> Tensor:
    """Gradient of a tile of logits as the product left them, in their type."""
    z_rv = logits_rv.float() * scale
    p_rv = (z_rv - total_r[:, None]).exp()
    hit_rv = (torch.arange(z_rv.shape[1], device=z_rv.device) == column_r1) & inside_r[:, None]
    slope_rv = torch.where(hit_rv, grad_r[:, None], 0.0) - p_rv * grad_r[:, None]
    slope_rv = slope_rv - p_rv * (z_rv - mean_r[:, None]) * grad_entropy_r[:, None]
    return (slope_rv * scale).to(logits_rv.dtype)


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


class _Running:
    """Sum of exponentials and their mean logit over slices of the vocabulary, each rescaled to the
    highest so far."""

    def __init__(self) -> None:
        self.top_r: Tensor | None = None
        self.sum_r: Any = 0.0
        self.dot_r: Any = 0.0

    def add(self, logits_rv: Tensor, *, dot: bool) -> Tensor:
        """Take in a slice; its exponentials below the highest so far, in the slice's own place
        unless `dot` asks for the mean."""
        high_r = logits_rv.amax(1)
        if self.top_r is not None:
            high_r = torch.maximum(self.top_r, high_r)
            shrink_r = (self.top_r - high_r).exp_()
            self.sum_r, self.dot_r = self.sum_r * shrink_r, self.dot_r * shrink_r
        below_rv = logits_rv - high_r[:, None] if dot else logits_rv.sub_(high_r[:, None])
        powers_rv = below_rv.exp_()
        self.top_r = high_r
        self.sum_r = self.sum_r + powers_rv.sum(1)
        if dot:
            self.dot_r = self.dot_r + torch.linalg.vecdot(powers_rv, logits_rv)
        return powers_rv

    def join(self, high_r: Tensor, sum_r: Tensor, dot_r: Tensor) -> None:
        """Take in a slice that was summed up elsewhere, below its own highest."""
        top_r = high_r if self.top_r is None else torch.maximum(self.top_r, high_r)
        shrink_r = (high_r - top_r).exp()
        if self.top_r is not None:
            before_r = (self.top_r - top_r).exp()
            self.sum_r, self.dot_r = self.sum_r * before_r, self.dot_r * before_r
        self.top_r = top_r
        self.sum_r, self.dot_r = self.sum_r + sum_r * shrink_r, self.dot_r + dot_r * shrink_r


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        head_VH: Tensor,
        targets_R: Tensor,
        scale: float,
        entropy: bool,
        tile: int,
        fused: bool,
        wide: bool,
    ) -> tuple[Tensor, Tensor]:
        fused = fused and hidden_RH.dtype != torch.float64
        work = torch.float64 if hidden_RH.dtype == torch.float64 else torch.float32
        total_R = hidden_RH.new_empty(len(hidden_RH), dtype=work)  # log of the sum of exponentials
        mean_R = hidden_RH.new_zeros(len(hidden_RH), dtype=work)  # expected logit
        picked_R = hidden_RH.new_zeros(len(hidden_RH), dtype=work)  # the target's logit
        blocks = _tiles(len(hidden_RH), len(head_VH), tile)
        kept, kept_sum_R = None, None  # of a single tile: logits with entropy, else exponentials
        for r, across in blocks:
            running = _Running()
            for v in across:
                column_r1, inside_r = _locate(targets_R[r], v)
                if fused:
                    logits_rv = product(hidden_RH[r], head_VH[v], wide=wide)
                    found = _compiled(_summary)(logits_rv, column_r1, inside_r, scale)
                    running.join(*found[:3])
                    picked_R[r] += found[3]
                    continue
                logits_rv = _logits(hidden_RH[r], head_VH[v], scale, wide)
                picked_R[r] += logits_rv.gather(1, column_r1)[:, 0].mul_(inside_r)
                powers_rv = running.add(logits_rv, dot=entropy)
                if len(blocks) == len(across) == 1:
                    kept, kept_sum_R = (logits_rv if entropy else powers_rv), running.sum_r
            if running.top_r is not None:
                total_R[r] = running.top_r + running.sum_r.log()
                mean_R[r] = running.dot_r / running.sum_r
        ctx.scale, ctx.entropy, ctx.tile, ctx.fused, ctx.wide = scale, entropy, tile, fused, wide
        ctx.save_for_backward(hidden_RH, head_VH, targets_R, total_R, mean_R, kept, kept_sum_R)
        entropy_R = total_R - mean_R
        if not entropy:
            ctx.mark_non_differentiable(entropy_R)
        return picked_R - total_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_R: Tensor, grad_entropy_R: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None]:
        hidden_RH, head_VH, targets_R, total_R, mean_R, kept, kept_sum_R = ctx.saved_tensors
        want_hidden, want_head = ctx.needs_input_grad[:2]
        # Sums over tiles are kept in the type of the log-probs: many small bfloat16 parts would
        # lose bits.
        for_hidden_RH = torch.zeros_like(hidden_RH, dtype=total_R.dtype) if want_hidden else None
        for_head_VH = torch.zeros_like(head_VH, dtype=total_R.dtype) if want_head else None
        for r, across in _tiles(len(hidden_RH), len(head_VH), ctx.tile):
            for v in across:
                column_r1, inside_r = _locate(targets_R[r], v)
                if ctx.fused:
                    entropy_r = grad_entropy_R[r] if ctx.entropy else torch.zeros_like(total_R[r])
                    grad_rv = _compiled(_slope)(
                        product(hidden_RH[r], head_VH[v], wide=ctx.wide), total_R[r], mean_R[r],
                        grad_R[r], entropy_r, column_r1, inside_r, ctx.scale,
                    ).to(hidden_RH.dtype)  # fmt: skip
                elif kept is not None and not ctx.entropy:
                    grad_rv = kept * (grad_R / kept_sum_R).neg_()[:, None]
                else:
                    logits_rv = kept
                    if logits_rv is None:
                        logits_rv = _logits(hidden_RH[r], head_VH[v], ctx.scale, ctx.wide)
                    # the probabilities, to begin with
                    grad_rv = (logits_rv - total_R[r, None]).exp_()
                    if ctx.entropy:
                        slope_rv = logits_rv - mean_R[r, None]
                        slope_rv.mul_(grad_entropy_R[r, None]).add_(grad_R[r, None])
                        grad_rv.mul_(slope_rv.neg_())
                        del slope_rv
                    else:
                        grad_rv.mul_(grad_R[r, None].neg())
                    del logits_rv
                if not ctx.fused:
                    grad_rv.scatter_add_(1, column_r1, (grad_R[r] * inside_r)[:, None])
                    if ctx.scale != 1.0:
                        grad_rv.mul_(ctx.scale)
                    grad_rv = grad_rv.to(hidden_RH.dtype)
                if for_hidden_RH is not None:
                    for_hidden_RH[r] += grad_rv @ head_VH[v]
                if for_head_VH is not None:
                    for_head_VH[v] += grad_rv.t() @ hidden_RH[r]
        return (
            None if for_hidden_RH is None else for_hidden_RH.to(hidden_RH.dtype),
            None if for_head_VH is None else for_head_VH.to(head_VH.dtype),
            None,
            None,
            None,
            None,
            None,
            None,
        )
