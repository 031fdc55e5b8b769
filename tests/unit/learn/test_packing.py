"""Packing: the plan, the layout, and attention that equals one sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
@given(lengths)
def test_layout_positions_offsets_and_buckets_cover_the_row(sizes):
    made = packing.layout(sizes)
    assert made.offsets.tolist() == [0, *np.cumsum(sizes).tolist()]
    assert made.positions[0].tolist() == [i for size in sizes for i in range(size)]
    at, rows = 0, 0
    for bucket in made.buckets:
        assert bucket.start == at
        inside = sizes[rows : rows + bucket.rows]
        assert bucket.width == inside.max()
        at, rows = bucket.stop, rows + bucket.rows
        tokens = torch.arange(bucket.stop - bucket.start)
        if bucket.pad is None:
            assert bucket.rows * bucket.width == len(tokens)
            continue
        padded = tokens[bucket.pad]
        assert (padded[bucket.unpad] == tokens).all()
        first = 0
        for row, size in zip(padded.view(bucket.rows, bucket.width), inside, strict=True):
            assert row[:size].tolist() == list(range(first, first + size))
            assert (row[size:] == first + size - 1).all()
            first += size
    assert (at, rows) == (int(sizes.sum()), len(sizes))


def test_layout_of_like_lengths_is_one_bucket_and_of_unlike_ones_several():
    assert len(packing.layout(np.array([25, 24, 20, 12])).buckets) == 1
    assert len(packing.layout(np.array([400, 390, 100, 90, 10])).buckets) == 3


def tiny(kind, config, **more):
    torch.manual_seed(0)
    made = config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attn_implementation="eager",
        initializer_range=0.3,
        **more,
    )
    return kind(made).double()


def gap(found, expected):
    """Largest difference, as a share of the largest value or of 1."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()


MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "sliding": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("short", [packing.SHORT, 0], ids=["products", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_attention_equals_one_sequence_at_a_time(monkeypatch, name, short):
    """Hidden states and every parameter's gradient, over equal, unlike and single-token samples.

    The models are in float64, but take their norms and eager softmax through float32.
    """
    monkeypatch.setattr(packing, "SHORT", short)
    kind, config, more = MODELS[name]
    model = tiny(kind, config, **more)
    for sizes in ([9, 9, 9], [40, 9, 7, 6, 1, 1], [1]):
        rows = [torch.randint(0, 50, (1, size)) for size in sizes]
        weight = torch.randn(sum(sizes), 32, dtype=torch.float64)
        model.set_attn_implementation("eager")
        model.zero_grad()
        expected = torch.cat([model.model(input_ids=row).last_hidden_state[0] for row in rows])
        (expected * weight).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        packing.register_attention()
        model.set_attn_implementation(packing.ATTENTION)
        model.zero_grad()
        made = packing.layout(np.array(sizes))
        found = model.model(
            input_ids=torch.cat(rows, 1), position_ids=made.positions, packing=made
        ).last_hidden_state[0]
        (found * weight).sum().backward()
        assert gap(found, expected) < 1e-5
        for n, p in model.named_parameters():
            if n in gradients:
                assert gap(p.grad, gradients[n]) < 1e-5, n


def test_packed_attention_lets_no_sample_see_another():
    packing.register_attention()
    model = tiny(*MODELS["qwen3"][:2], head_dim=8)
    model.set_attn_implementation(packing.ATTENTION)
    made = packing.layout(np.array([7, 6, 3]))
    tokens = torch.randint(0, 50, (1, 16))
    other = tokens.clone()
    other[0, 7:13] = (other[0, 7:13] + 1) % 50
    with torch.no_grad():
        a, b = (
            model.model(input_ids=t, position_ids=made.positions, packing=made).last_hidden_state[0]
            for t in (tokens, other)
        )
    same = (a == b).all(-1)
    assert same.tolist() == [True] * 7 + [False] * 6 + [True] * 3


def test_packed_attention_refuses_what_it_would_leave_out():
    made = packing.layout(np.array([2]))
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="no soft cap and no sinks"):
        packing.packed_attention(torch.nn.Identity(), q, q, q, None, packing=made, softcap=30.0)
