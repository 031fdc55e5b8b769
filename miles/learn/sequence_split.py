"""One packed row over several ranks: by tokens outside attention, by heads inside it.

Everything but attention treats tokens one by one, so a rank holds a stretch of the row. For
attention ranks exchange, and each has all tokens of its share of the heads; results are exchanged
back (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509). The kernel sees the whole row, so
packed samples and shared prompts are what they are without a split. It knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Split"]


@dataclass(frozen=True, slots=True)
class Split:
    """A row of T tokens over the ranks of a process group, in stretches of near equal length."""

    group: Any
    """The process group."""
    rank: int
    """This process among them."""
    edges: tuple[int, ...]
    """Where stretches begin and end: rank r has the tokens from `edges[r]` to `edges[r + 1]`."""

    @classmethod
    def of(cls, tokens: int, group: Any) -> Split:
        """Of a row of that many tokens; stretches may be empty."""
        ranks = dist.get_world_size(group)
        edges = tuple(tokens * rank // ranks for rank in range(ranks + 1))
        return cls(group, dist.get_rank(group), edges)

    @property
    def ranks(self) -> int:
        """How many share the row."""
        return len(self.edges) - 1

    @property
    def own(self) -> slice:
        """This rank's tokens."""
        return slice(self.edges[self.rank], self.edges[self.rank + 1])

    def to_heads(self, own_1HtD: Tensor) -> Tensor:
        """(1, H, own tokens, D) of all heads in, (1, H / ranks, T, D) of this rank's heads out.
        Fewer heads than ranks are repeated first, as key heads may be. Every rank has to call."""
        heads = own_1HtD.shape[1]
        if heads < self.ranks:
            own_1HtD = own_1HtD.repeat_interleave(self.ranks // heads, dim=1)
        out: Tensor = _ToHeads.apply(own_1HtD[0], self)  # type: ignore[no-untyped-call]
        return out[None]

    def to_tokens(self, heads_1ThD: Tensor) -> Tensor:
        """(1, T, H / ranks, D) of this rank's heads in, (1, own tokens, H, D) of all heads out.
        Every rank has to call."""
        heads_hTD = heads_1ThD[0].transpose(0, 1)
        out: Tensor = _ToTokens.apply(heads_hTD, self)  # type: ignore[no-untyped-call]
        return out.transpose(0, 1)[None]


def _gather(own_HtD: Tensor, split: Split) -> Tensor:
    heads, tokens, width = own_HtD.shape
    share = heads // split.ranks
    mine = share * width
    lengths = [stop - start for start, stop in zip(split.edges, split.edges[1:], strict=False)]
    got = own_HtD.new_empty(mine * split.edges[-1])
    sizes = [mine * length for length in lengths]
    sent = [mine * tokens] * split.ranks
    dist.all_to_all_single(got, own_HtD.contiguous().view(-1), sizes, sent, group=split.group)
    parts = torch.split(got, sizes)
    shaped = [p.view(share, n, width) for p, n in zip(parts, lengths, strict=True)]
    return torch.cat(shaped, dim=1)


def _scatter(heads_hTD: Tensor, split: Split) -> Tensor:
    heads, _, width = heads_hTD.shape
    lengths = [stop - start for start, stop in zip(split.edges, split.edges[1:], strict=False)]
    sent = torch.cat([part.reshape(-1) for part in torch.split(heads_hTD, lengths, 1)])
    own = lengths[split.rank]
    got = heads_hTD.new_empty(split.ranks * heads * own * width)
    sizes = [heads * length * width for length in lengths]
    dist.all_to_all_single(got, sent, [heads * own * width] * split.ranks, sizes, group=split.group)
    return got.view(split.ranks * heads, own, width)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_HtD: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return _gather(own_HtD, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hTD: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad_hTD, ctx.split), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_hTD: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return _scatter(heads_hTD, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_HtD: Tensor) -> tuple[Tensor, None]:
        return _gather(grad_HtD, ctx.split), None
