"""This rank's micro-batches of a batch: which samples, how they lie, which tokens that is.

The plan is the same in every rank, and nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from miles import Array, Tokens
from miles.learn.attention import SHORT
from miles.learn.packing import Layout, layout, micro_batches, prompt_families, shares, token_index
from miles.learn.sequence_split import Split
from miles_plugins.trainer.fsdp.ranks import Ranks
from miles_plugins.trainer.fsdp.speed import Cost, Work

__all__ = ["Piece", "pieces"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One micro-batch of this rank."""

    index: Array
    """(tokens,) int64: its tokens' places in the batch."""
    packing: Layout
    """How those that are computed lie in one row: all but each sample's last, which nothing comes
    after."""
    source: Array
    """(T,) int64: which of its tokens each packed one is; its first for those that only fill a row
    of fewer tokens than ranks."""
    before: Array
    """(tokens,) int64: where in the row the token before each is; of no meaning for first ones."""
    idle: bool
    """Only keeps this rank in step with the others: none of its tokens count."""
    positions: Array
    """(tokens,) int64: each token's position in its sample."""

    @property
    def split(self) -> Split | None:
        """How ranks share its row."""
        return self.packing.split

    @property
    def ids(self) -> Array:
        """(t,) int64: which of its tokens this rank computes."""
        return self.source if self.split is None else self.source[self.split.own]

    def own(self, rows: Array) -> Array:
        """Those of `rows`, tokens to be predicted, that this rank predicts."""
        if self.split is None:
            return rows
        at, own = self.before[rows], self.split.own
        return rows[(at >= own.start) & (at < own.stop)]

    def at(self, rows: Array) -> Array:
        """Where in this rank's part of the row the tokens before `rows` are."""
        return self.before[rows] - (0 if self.split is None else self.split.own.start)

    def work(self, rows: int) -> Work:
        """What this rank computes of a pass over it, with `rows` tokens through the head."""
        seen = self.positions[self.source] + 1
        ranks = 1 if self.split is None else self.split.ranks
        return Work(len(seen) / ranks, int(seen.sum()) / ranks, rows)


def pieces(
    tokens: Tokens,
    ranks: Ranks,
    *,
    budget: int,
    share_prompts: bool,
    way: str,
    cost: Cost | None,
) -> Iterator[Piece]:
    """This rank's micro-batches of at most `budget` tokens a rank, as many as any rank has: in FSDP
    all gather and reduce together. Samples are dealt by `cost`, by their tokens without one; ranks
    that share rows have the same ones."""
    lengths_S = tokens.lengths
    families_S, prompts_S = prompt_families(tokens.tokens, lengths_S, tokens.sampled)
    if not share_prompts:
        families_S = np.arange(len(lengths_S))
    computed_S = np.maximum(lengths_S - 1, 1)
    shortest_S = np.array(computed_S, np.int64)
    np.minimum.at(shortest_S, families_S, computed_S)
    prompts_S = np.minimum(prompts_S, shortest_S[families_S])
    costs_S = None if cost is None or ranks.teams == 1 else cost.of_samples(lengths_S)
    dealt = shares(lengths_S, ranks.teams, costs_S)
    budget *= ranks.sharing
    cut = [micro_batches(lengths_S[own], budget, families_S[own]) for own in dealt]
    own, mine = dealt[ranks.team], cut[ranks.team]
    idle = max(map(len, cut)) - len(mine)
    shortest = np.argmin(lengths_S, keepdims=True)
    for samples in (*(own[chosen] for chosen in mine), *[shortest] * idle):
        lengths = np.asarray(lengths_S[samples], np.int64)
        laid, families, prompts = (x[samples] for x in (computed_S, families_S, prompts_S))
        if laid.max() < ranks.sharing:  # a rank would have none, which models cannot compute
            laid, families, prompts = (
                np.append(x, more)
                for x, more in ((laid, ranks.sharing), (families, len(lengths_S)), (prompts, 0))
            )
        packing = layout(
            laid,
            ranks.device,
            families_S=families,
            prompts_S=prompts,
            trim=SHORT if ranks.device.type == "cpu" else 0,
            way=way,
        )
        positions = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        computed = np.flatnonzero(positions < np.repeat(computed_S[samples], lengths))
        before = np.zeros(len(positions) + 1, np.int64)
        before[computed + 1] = packing.place[: len(computed)]
        computed = np.append(computed, np.zeros(int(laid.sum()) - len(computed), np.int64))
        if ranks.sharers is not None:
            split = Split.of(packing.positions.shape[1], ranks.sharers)
            packing = replace(packing, split=split, positions=packing.positions[:, split.own])
        yield Piece(
            index=token_index(lengths_S, samples),
            packing=packing,
            source=computed[packing.source],
            before=before[:-1],
            idle=samples is shortest,
            positions=positions,
        )
