"""Packing: the plan of micro-batches and shares, and the layout of a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.learn import packing

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.int32)
)


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 200))
def test_micro_batches_hold_every_sample_once_within_the_budget(sizes, budget):
    batches = packing.micro_batches(sizes, budget)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
    for batch in batches:
        assert sizes[batch].sum() <= budget or len(batch) == 1
    again = packing.micro_batches(sizes.copy(), budget)
    assert all((a == b).all() for a, b in zip(batches, again, strict=True))


def test_micro_batches_refuse_a_budget_of_nothing():
    with pytest.raises(ValueError, match="token budget is 0; it must be at least 1"):
        packing.micro_batches(np.array([3]), 0)


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 5), st.floats(0, 1))
def test_shares_by_cost_hold_every_sample_once_and_none_is_far_from_the_best(sizes, ranks, square):
    """Costs grow faster than lengths, as attention's do; at most 4/3 of what nobody can beat, and
    adding up over ranks what one rank adds up."""
    costs = sizes + square * sizes.astype(np.float64) ** 2
    dealt = packing.shares(sizes, ranks, costs)
    assert len(dealt) == ranks
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(sizes)))
    loads = [float(costs[share].sum()) for share in dealt]
    assert sum(loads) == pytest.approx(costs.sum())
    best_possible = max(float(costs.max()), float(costs.sum()) / ranks)
    assert max(loads) <= best_possible * (4 / 3) + 1e-6 or max(loads) - min(loads) <= costs.max()


def test_shares_differ_less_than_a_greedy_deal():
    """Greedy deals 8 7 | 6 5 4 as 8 5 4 against 7 6."""
    dealt = packing.shares(np.array([8, 7, 6, 5, 4]), 2)
    assert sorted(int(np.array([8, 7, 6, 5, 4])[share].sum()) for share in dealt) == [14, 16]


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 5))
def test_shares_hold_every_sample_once_and_balance_tokens(sizes, ranks):
    dealt = packing.shares(sizes, ranks)
    assert len(dealt) == ranks
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(sizes)))
    assert all((np.diff(share) > 0).all() for share in dealt)
    loads = [int(sizes[share].sum()) for share in dealt]
    best_possible = max(int(sizes.max()), -(-int(sizes.sum()) // ranks))
    assert max(loads) <= best_possible * (4 / 3) + 1e-9 or max(loads) - min(loads) <= sizes.max()


@settings(max_examples=100, deadline=None)
@given(lengths, st.randoms(use_true_random=False))
def test_token_index_finds_the_tokens_of_samples_in_the_order_asked(sizes, random):
    chosen = random.sample(range(len(sizes)), random.randint(1, len(sizes)))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    index = packing.token_index(sizes, np.array(chosen))
    assert owner[index].tolist() == [s for s in chosen for _ in range(sizes[s])]
    steps = np.diff(index)[np.diff(owner[index]) == 0]
    assert (steps == 1).all()


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 200), st.integers(1, 4))
def test_micro_batches_keep_families_together(sizes, budget, kinds):
    families = np.arange(len(sizes)) % kinds
    batches = packing.micro_batches(sizes, budget, families)
    order = np.concatenate(batches)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert np.count_nonzero(np.diff(families[order])) == min(kinds, len(sizes)) - 1
    assert all(sizes[batch].sum() <= budget or len(batch) == 1 for batch in batches)


def test_prompt_families_are_the_first_samples_with_equal_prompts():
    rows = [[5, 6, 9], [5, 6], [5, 6, 9, 9], [7, 1], [5, 6, 6, 2], [3]]
    drawn = [[0, 0, 1], [0, 0], [0, 0, 1, 0], [1, 1], [0, 0, 0, 1], [0]]
    families, prompts = packing.prompt_families(
        np.concatenate([np.array(row, np.int32) for row in rows]),
        np.array([len(row) for row in rows], np.int32),
        np.concatenate([np.array(row, np.bool_) for row in drawn]),
    )
    assert families.tolist() == [0, 0, 0, 3, 4, 5]
    assert prompts.tolist() == [2, 2, 2, 0, 3, 1]


@st.composite
def families(draw):
    """Samples that begin with prompts of few kinds: (tokens, lengths, sampled)."""
    prompts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    rows, drawn = [], []
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.integers(0, len(prompts) - 1))
        own = draw(st.integers(0 if prompts[kind] else 1, 12))
        rows.append([100 + kind] * prompts[kind] + [200 + number] * own)
        drawn.append([False] * prompts[kind] + [True] * own)
    return (
        np.concatenate(rows).astype(np.int32),
        np.array([len(row) for row in rows], np.int32),
        np.concatenate(drawn).astype(np.bool_),
    )


@settings(max_examples=150, deadline=None)
@given(families(), st.booleans(), st.sampled_from([0, 10, 1000]))
def test_layout_puts_every_token_in_its_place(samples, share, trim):
    """Packed tokens, their positions, and what each padded place holds and gives back."""
    tokens, sizes, sampled = samples
    kinds, prompts = packing.prompt_families(tokens, sizes, sampled)
    if not share:
        kinds = np.arange(len(sizes))
    made = packing.layout(sizes, families_S=kinds, prompts_S=prompts, trim=trim)
    row = tokens[made.source]
    position = np.concatenate([np.arange(size) for size in sizes])
    assert (row[made.place] == tokens).all()
    assert (made.positions[0].numpy()[made.place] == position).all()
    lent = sum(int(p) for p, k, i in zip(prompts, kinds, range(len(sizes)), strict=True) if k != i)
    assert len(row) == len(tokens) - lent
    assert made.shared == (lent > 0)
    if made.pick is None:
        assert not made.shared
        assert [b.width for b in made.buckets for _ in range(b.rows)] == sizes.tolist()
        return
    # every packed token has one query, which sees the tokens of its sample up to itself and no
    # other
    assert (made.queries.numpy()[made.pick.numpy()] == np.arange(len(row))).all()
    sees, at = [], []
    held = np.split(made.keys.numpy(), np.cumsum([b.rows * b.width for b in made.buckets])[:-1])
    for bucket, keys in zip(made.buckets, held, strict=True):
        usual = np.broadcast_to(np.arange(bucket.queries), (bucket.rows, bucket.queries))
        asked = usual if bucket.at is None else bucket.at.numpy()
        for keys_L, asked_Q in zip(keys.reshape(bucket.rows, bucket.width), asked, strict=True):
            sees += [keys_L[: i + 1].tolist() for i in asked_Q]
            at += asked_Q.tolist()
        assert bucket.at is None or bucket.width <= trim
    first = np.cumsum(sizes) - sizes
    for sample, size in enumerate(sizes):
        mine = made.place[first[sample] : first[sample] + size]
        for position, packed in enumerate(mine):
            chosen = made.pick[packed]
            assert at[chosen] == position
            assert sees[chosen] == mine[: position + 1].tolist()


def test_layout_of_equal_lengths_pads_nothing():
    made = packing.layout(np.array([4, 4, 4]))
    assert made.queries is made.keys is made.pick is None
    assert made.buckets == (packing.Bucket(rows=3, width=4, queries=4),)


def test_layout_of_like_lengths_is_one_bucket_and_of_unlike_ones_several():
    assert len(packing.layout(np.array([25, 24, 20, 12])).buckets) == 1
    assert len(packing.layout(np.array([400, 390, 100, 90, 10])).buckets) == 3
