"""This rank's micro-batches of a batch: which samples, how they lie, which tokens that is.

The plan is the same in every rank, and nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from miles import Array, Tokens
from miles.learn.attention import SHORT
from miles.learn.packing import Layout, layout, micro_batches, prompt_families, shares, token_index
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
    """(T,) int64: which of its tokens each packed one is."""
    before: Array
    """(tokens,) int64: where in the row the token before each is; of no meaning for first ones."""
    idle: bool
    """Only keeps this rank in step with the others: none of its tokens count."""
    positions: Array
    """(tokens,) int64: each token's position in its sample."""

    def work(self, rows: int) -> Work:
        """What a pass over it computes, with `rows` tokens through the head."""
        seen = self.positions[self.source] + 1
        return Work(len(seen), int(seen.sum()), rows)


def pieces(
    tokens: Tokens,
    ranks: Ranks,
    *,
    budget: int,
    share_prompts: bool,
    way: str,
    cost: Cost | None,
) -> Iterator[Piece]:
    """This rank's micro-batches of at most `budget` tokens, as many as any rank has: in FSDP all
    gather and reduce together. Samples are dealt by `cost`, by their tokens without one."""
    lengths_S = tokens.lengths
    families_S, prompts_S = prompt_families(tokens.tokens, lengths_S, tokens.sampled)
    if not share_prompts:
        families_S = np.arange(len(lengths_S))
    computed_S = np.maximum(lengths_S - 1, 1)
    shortest_S = np.array(computed_S, np.int64)
    np.minimum.at(shortest_S, families_S, computed_S)
    prompts_S = np.minimum(prompts_S, shortest_S[families_S])
    costs_S = None if cost is None or ranks.world == 1 else cost.of_samples(lengths_S)
    dealt = shares(lengths_S, ranks.world, costs_S)
    cut = [micro_batches(lengths_S[own], budget, families_S[own]) for own in dealt]
    own, mine = dealt[ranks.rank], cut[ranks.rank]
    idle = max(map(len, cut)) - len(mine)
    shortest = np.argmin(lengths_S, keepdims=True)
    for samples in (*(own[chosen] for chosen in mine), *[shortest] * idle):
        lengths = np.asarray(lengths_S[samples], np.int64)
        packing = layout(
            computed_S[samples],
            ranks.device,
            families_S=families_S[samples],
            prompts_S=prompts_S[samples],
            trim=SHORT if ranks.device.type == "cpu" else 0,
            way=way,
        )
        positions = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        computed = np.flatnonzero(positions < np.repeat(computed_S[samples], lengths))
        before = np.zeros(len(positions) + 1, np.int64)
        before[computed + 1] = packing.place
        yield Piece(
            index=token_index(lengths_S, samples),
            packing=packing,
            source=computed[packing.source],
            before=before[:-1],
            idle=samples is shortest,
            positions=positions,
        )
