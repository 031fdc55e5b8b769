"""Packed attention equals one sequence at a time, and shared prompts equal repeated ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from miles import ConfigError
from miles.learn import attention, kernels, packing


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


@pytest.mark.parametrize("short", [attention.SHORT, 0], ids=["products", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_attention_equals_one_sequence_at_a_time(monkeypatch, name, short):
    """Hidden states and every parameter's gradient, over equal, unlike and single-token samples.

    The models are in float64, but take their norms and eager softmax through float32.
    """
    monkeypatch.setattr(attention, "SHORT", short)
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
        attention.register_attention()
        model.set_attn_implementation(attention.ATTENTION)
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
    attention.register_attention()
    model = tiny(*MODELS["qwen3"][:2], head_dim=8)
    model.set_attn_implementation(attention.ATTENTION)
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
        attention.packed_attention(torch.nn.Identity(), q, q, q, None, packing=made, softcap=30.0)


@pytest.mark.parametrize("name", ["qwen3", "sliding"])
@pytest.mark.parametrize(("short", "trim"), [(96, 0), (96, 20), (96, 96), (0, 0)])
def test_a_shared_prompt_equals_a_repeated_one(monkeypatch, name, short, trim):
    """Hidden states and gradients, with families of unlike lengths and a sample that is all prompt;
    with and without the prompt's queries, by products and by the fused kernel."""
    monkeypatch.setattr(attention, "SHORT", short)
    attention.register_attention()
    kind, config, more = MODELS[name]
    model = tiny(kind, config, **more)
    model.set_attn_implementation(attention.ATTENTION)
    rows = [[1, 2, 3, 9], [1, 2, 3, 8, 7, 6], [4, 5], [1, 2, 3], [4, 9, 9], [1, 2, 3, 9, 9] * 8]
    prompts = [3, 3, 1, 3, 1, 3]
    tokens, sizes = np.concatenate(rows), np.array([len(row) for row in rows])
    sampled = np.concatenate([np.arange(n) >= p for n, p in zip(sizes, prompts, strict=True)])
    kinds, prompts = packing.prompt_families(tokens, sizes, sampled)
    weight = torch.randn(len(tokens), 32, dtype=torch.float64)
    found = []
    for families in (np.arange(len(sizes)), kinds):
        made = packing.layout(sizes, families_S=families, prompts_S=prompts, trim=trim)
        model.zero_grad()
        ids = torch.from_numpy(tokens[made.source])[None]
        out = model.model(input_ids=ids, position_ids=made.positions, packing=made)
        hidden = out.last_hidden_state[0][torch.from_numpy(made.place)]
        (hidden * weight).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([hidden.detach(), *gradients])
    assert made.shared
    assert len(made.source) == len(tokens) - 3 * 3 - 1
    for one, other in zip(*found, strict=True):
        assert gap(one, other) < 1e-5


def plain_varlen(query, key, value, edges_q, edges_k, longest_q, longest_k, **options):
    """What torch's kernel is asked for, one stretch at a time."""
    asked, held = edges_q.diff().tolist(), edges_k.diff().tolist()
    assert (max(asked), max(held)) == (longest_q, longest_k)
    assert (edges_q[-1], edges_k[-1]) == (len(query), len(key))
    left, right = options["window_size"]
    assert right == 0
    out = []
    for q, k, v in zip(query.split(asked), key.split(held), value.split(held), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        seen = (behind >= 0) if left < 0 else (behind >= 0) & (behind <= left)
        scores = torch.einsum("qhd,khd->hqk", q, k) * options["scale"]
        scores = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", scores, v))
    return torch.cat(out)


@pytest.mark.parametrize("name", ["qwen3", "sliding"])
@pytest.mark.parametrize("shared", [False, True])
def test_unpadded_attention_equals_padded(monkeypatch, name, shared):
    """Hidden states and gradients with the variable-length kernel's contract in place of the
    kernel, hidden states with FlexAttention; with families, one sample all prompt."""
    options = {"call": plain_varlen, "grouped": False}
    monkeypatch.setattr(kernels, "_varlen_options", lambda: options)
    attention.register_attention()
    kind, config, more = MODELS[name]
    model = tiny(kind, config, **more)
    model.set_attn_implementation(attention.ATTENTION)
    rows = [[1, 2, 3, 9], [1, 2, 3, 8, 7, 6], [4, 5], [1, 2, 3], [4, 9, 9], [1, 2, 3, 9, 9] * 4]
    prompts = np.array([3, 3, 1, 3, 1, 3])
    tokens, sizes = np.concatenate(rows), np.array([len(row) for row in rows])
    sampled = np.concatenate([np.arange(n) >= p for n, p in zip(sizes, prompts, strict=True)])
    families = packing.prompt_families(tokens, sizes, sampled)[0] if shared else np.arange(6)
    weight = torch.randn(len(tokens), 32, dtype=torch.float64)
    found = {}
    for way in ("padded", "varlen", "flex"):
        made = packing.layout(sizes, families_S=families, prompts_S=prompts, way=way)
        assert made.shared == shared
        model.zero_grad()
        ids = torch.from_numpy(tokens[made.source])[None]
        with torch.set_grad_enabled(way != "flex"):
            out = model.model(input_ids=ids, position_ids=made.positions, packing=made)
        hidden = out.last_hidden_state[0][torch.from_numpy(made.place)]
        found[way] = [hidden.detach()]
        if way != "flex":
            (hidden * weight).sum().backward()
            found[way] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for way in ("varlen", "flex"):
        for one, other in zip(found["padded"], found[way], strict=way == "varlen"):
            assert gap(one, other) < 1e-5, way


def test_attention_is_chosen_by_what_can_be_used_here():
    cpu = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "head_dim": 64}
    assert attention.choose_attention("auto", **cpu) == "padded"
    for way in ("varlen", "flex", "cudnn"):
        with pytest.raises(ConfigError, match=f"attention '{way}' cannot be used.*needs a GPU"):
            attention.choose_attention(way, **cpu)


def test_attention_says_once_on_a_gpu_what_it_took(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_varlen_options", lambda: {"call": plain_varlen})
    gpu = torch.device("cuda")
    with caplog.at_level("INFO"):
        for dtype, way in ((torch.bfloat16, "varlen"), (torch.float32, "padded")):
            chosen = attention.choose_attention("auto", device=gpu, dtype=dtype, head_dim=64)
            assert chosen == way
    assert [record.message for record in caplog.records] == [
        "attention: varlen",
        "attention: padded (no varlen: it computes in bfloat16 and float16, not torch.float32; "
        "no cudnn: it computes in bfloat16 and float16, not torch.float32)",
    ]
    with pytest.raises(ConfigError, match="heads of 300 are not for it"):
        attention.choose_attention("varlen", device=gpu, dtype=torch.bfloat16, head_dim=300)
