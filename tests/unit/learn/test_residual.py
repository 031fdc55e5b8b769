"""A residual stream in float32: nearer to the exact model, and gradients that arrive."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from miles import ConfigError
from miles.learn.attention import ATTENTION, register_attention
from miles.learn.packing import layout
from miles.learn.residual import widen

SHAPE = {
    "vocab_size": 90, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 10,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
}  # fmt: skip
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config),  # whose norms come after its layers
}


def made(kind):
    """A bfloat16 model whose stream is large beside what its layers say, and the same weights in
    float64."""
    register_attention()
    torch.manual_seed(0)
    model, config = KINDS[kind]
    half, exact = (model(config(**SHAPE)) for _ in range(2))
    with torch.no_grad():
        for (name, one), other in zip(half.named_parameters(), exact.parameters(), strict=True):
            if one.ndim > 1:
                one.normal_(std=8.0 if "embed" in name else 0.1)
            one.copy_(one.bfloat16())
            other.copy_(one)
    for one in (half, exact):
        one.set_attn_implementation(ATTENTION)
    return half.bfloat16(), exact.double()


def hidden(model, tokens):
    packing = layout([len(tokens)])
    return model.base_model(
        input_ids=torch.tensor(tokens)[None],
        position_ids=packing.positions,
        packing=packing,
        use_cache=False,
    ).last_hidden_state[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_stream_is_nearer_to_the_exact_model(kind):
    half, exact = made(kind)
    tokens = [7 * i % 90 for i in range(40)]
    wanted = hidden(exact, tokens)
    plain = (hidden(half, tokens).double() - wanted).abs().mean()
    assert widen(half, torch.bfloat16) == 21 + (0 if kind == "llama" else 20)
    found = hidden(half, tokens)
    assert found.dtype == torch.bfloat16
    fine = (found.double() - wanted).abs().mean()
    assert fine < 0.75 * plain
    toward = torch.linspace(-1, 2, wanted.numel(), dtype=torch.float64).sin().view(wanted.shape)
    (found.double() * toward).sum().backward()
    (wanted * toward).sum().backward()
    for (name, one), other in zip(half.named_parameters(), exact.parameters(), strict=True):
        if other.grad is not None:
            away = (one.grad.double() - other.grad).norm() / other.grad.norm()
            assert away < 0.1, name


@pytest.mark.parametrize(
    ("part", "words"), [(nn.Linear(2, 2), "no norms that"), (nn.LayerNorm(2), "torch's LayerNorm")]
)
def test_a_model_without_norms_that_take_float32_is_refused(part, words):
    match = f"residual is float32, but Sequential has {words}.*use precision.residual=float16"
    with pytest.raises(ConfigError, match=match):
        widen(nn.Sequential(part), torch.float16)
