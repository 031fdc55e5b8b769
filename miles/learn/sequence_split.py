"""One packed row over several ranks: by tokens outside attention, by heads inside it.

Everything but attention treats tokens one by one, so a rank holds a stretch of the row. For
attention ranks exchange, and each has all tokens of its share of the heads; results are exchanged
back (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509). The kernel sees the whole row, so
packed samples and shared prompts are what they are without a split. It knows no model.
"""

from __future__ import annotations

import itertools
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

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rank."""
        return [stop - start for start, stop in itertools.pairwise(self.edges)]

    def to_heads(self, own_1HtD: Tensor) -> Tensor:
        """(1, H, own tokens, D) of all heads in, (1, H / ranks, T, D) of this rank's heads out.
        Fewer heads than ranks are repeated first, as key heads may be. Every rank has to call."""
        heads = own_1HtD.shape[1]
        if heads < self.ranks:
            own_1HtD = own_1HtD.repeat_interleave(self.ranks // heads, dim=1)
        _, heads, tokens, width = own_1HtD.shape
        share = heads // self.ranks
        sizes = [share * length * width for length in self.lengths]
        got = self._exchange(own_1HtD, [share * tokens * width] * self.ranks, sizes)
        parts = zip(torch.split(got, sizes), self.lengths, strict=True)
        return torch.cat([part.view(1, share, length, width) for part, length in parts], dim=2)

    def to_tokens(self, heads_1ThD: Tensor) -> Tensor:
        """(1, T, H / ranks, D) of this rank's heads in, (1, own tokens, H, D) of all heads out.
        Every rank has to call."""
        _, _, share, width = heads_1ThD.shape
        heads_hTD = heads_1ThD[0].transpose(0, 1)
        sent = torch.cat([part.reshape(-1) for part in torch.split(heads_hTD, self.lengths, 1)])
        own = self.lengths[self.rank]
        sizes = [share * length * width for length in self.lengths]
        got = self._exchange(sent, sizes, [share * own * width] * self.ranks)
        return got.view(1, self.ranks * share, own, width).transpose(1, 2)

    def _exchange(self, sent: Tensor, sizes: list[int], wanted: list[int]) -> Tensor:
        """`sizes` elements to each rank, in order, and `wanted` from each, (elements,)."""
        got: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
            sent.reshape(-1), sizes, wanted, self.group
        )
        return got


def _all_to_all(sent: Tensor, sizes: list[int], wanted: list[int], group: Any) -> Tensor:
    got = sent.new_empty(sum(wanted))
    dist.all_to_all_single(got, sent.contiguous(), wanted, sizes, group=group)
    return got


class _AllToAll(torch.autograd.Function):
    """Gradients go back the way the values came; torch's own is deprecated for a private one."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sizes: list[int], wanted: list[int], group: Any) -> Tensor:
        ctx.back = wanted, sizes, group
        return _all_to_all(sent, sizes, wanted, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.back), None, None, None
