"""One conversion: names and shapes of the checkpoint, types, tied weights, buffers, experts."""

from __future__ import annotations

import torch
from torch import nn

from miles.learn.convert import Conversion


class Module(nn.Module):
    """A tied weight, a frozen one, a buffer that is saved and one that follows from others."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(4, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.head = self.embed
        self.register_buffer("steps", torch.tensor([3]))
        self.register_buffer("angles", torch.rand(2), persistent=False)


def test_conversion_exports_tied_weights_once_and_casts_numbers_with_a_point_alone(monkeypatch):
    module = Module()
    conversion = Conversion(module)
    monkeypatch.setattr(conversion, "_module", None)  # it is none of `transformers`
    found = dict(conversion.stream(module.state_dict().items(), dtype=torch.bfloat16))
    assert list(found) == ["embed", "frozen", "steps"]
    assert found["embed"].dtype == found["frozen"].dtype == torch.bfloat16
    assert torch.equal(found["embed"], module.embed.detach().bfloat16())
    assert found["steps"].dtype == torch.int64


def test_stacked_experts_become_those_of_the_checkpoint(tmp_path):
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, intermediate_size=12, moe_intermediate_size=6, num_experts=3,
        num_experts_per_tok=2, vocab_size=20, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    module = Qwen3MoeForCausalLM(config)
    named = module.state_dict(keep_vars=True)
    assert any(name.endswith("experts.gate_up_proj") for name in named)
    found = dict(Conversion(module).stream(named.items(), dtype=torch.float32))
    module.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor), name
