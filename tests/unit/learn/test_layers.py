"""Quicker layers: same values and gradients, and nothing replaced that differs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as rotate_halves

from miles.learn.layers import ROTARY, quicken, rms_norm, rotate


@pytest.mark.parametrize("shape", [(6, 8), (1, 5, 3, 8)])
def test_rms_norm_passes_gradcheck_and_equals_its_formula(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))


def test_quicken_keeps_values_and_gradients_of_a_model():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    tokens = torch.randint(0, 50, (2, 9))

    def run():
        model.zero_grad()
        out = model(input_ids=tokens).logits
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    before = run()
    assert quicken(model) == 11  # 4 norms and an attention a layer, and the last norm
    for found, expected in zip(run(), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_quicken_leaves_other_formulas_and_types_alone():
    class Shifted(GemmaRMSNorm):
        def __init__(self):
            super().__init__(8)
            self.variance_epsilon = 1e-6

    half = Qwen3RMSNorm(8).bfloat16()
    assert quicken(nn.ModuleList([Shifted(), nn.LayerNorm(8), half])) == 0


def test_quicken_falls_back_when_the_type_of_the_input_changes():
    norm = Qwen3RMSNorm(8)
    assert quicken(norm) == 1
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x), Qwen3RMSNorm(8)(x))


def test_rotate_passes_gradcheck_and_turns_pairs_by_their_angle():
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    cos, sin = (f(angle.repeat(1, 1, 1, 2)) for f in (torch.cos, torch.sin))
    found = rotate(x, cos, sin)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], -1))
    assert torch.autograd.gradcheck(lambda a: rotate(a, cos, sin), (x,))


def rotate_neighbours(q, k, cos, sin):
    """The interleaved form: elements 2i and 2i + 1 turn together."""

    def turn(x):
        a, b, c, s = x[..., ::2], x[..., 1::2], cos[:, None, :, ::2], sin[:, None, :, ::2]
        return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)

    return turn(q), turn(k)


def test_quicken_leaves_another_rotation_alone(monkeypatch):
    class Attention(nn.Module):
        def forward(self, q, k, cos, sin):
            return apply_rotary_pos_emb(q, k, cos, sin)  # noqa: F821 - a global that the test sets

    made = Attention()
    monkeypatch.setitem(globals(), ROTARY, rotate_neighbours)
    assert quicken(made) == 0
    monkeypatch.setitem(globals(), ROTARY, rotate_halves)
    assert quicken(made) == 1
    assert "forward" not in vars(Attention()) and "forward" in vars(made)
    x = torch.randn(1, 2, 3, 8)
    angle = torch.randn(1, 3, 4).repeat(1, 1, 2)
    for found, wanted in zip(
        made(x, x, angle.cos(), angle.sin()),
        rotate_halves(x, x, angle.cos(), angle.sin()),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)
