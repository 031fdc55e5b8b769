"""Modules from checkpoints: seeds, every tensor accounted for, and faults by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles import ConfigError, Context
from miles_plugins.model.build import causal_lm
from miles_plugins.model.llama import Llama
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.model.registered import Qwen3Moe


def _make(kind=Qwen3, **config):
    return kind(kind.Config(**config), Context(directory=Path()))


def _module(model, seed=0):
    torch.manual_seed(seed)
    return causal_lm(model.hf_config(), model.directory())


def _saved(folder: Path, kind=Qwen3, **config):
    _module(_make(kind, **config)).save_pretrained(folder)
    return _make(kind, init="load", path=str(folder))


def _rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _equal(one, two):
    ours, theirs = one.state_dict(), two.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_random_module_follows_the_current_seed():
    model = _make()
    _equal(_module(model, 3), _module(model, 3))
    other = _module(model, 4).state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(other, _module(model, 3).state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", [Qwen3, Llama])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_module_comes_back(tmp_path, kind, tied):
    model = _saved(tmp_path, kind, tied=tied)
    again = _module(model, seed=99)
    torch.manual_seed(0)
    _equal(again, causal_lm(_make(kind, tied=tied).hf_config(), None))
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    head, embedding = again.lm_head.weight, again.model.embed_tokens.weight
    assert (head is embedding) == tied


def test_half_checkpoint_is_built_in_float32(tmp_path):
    _module(_make()).to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    module = _module(_make(init="load", path=str(tmp_path)))
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_sharded_checkpoint_is_read_whole(tmp_path):
    _module(_make()).save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    model = _make(init="load", path=str(tmp_path))
    _equal(_module(model, seed=99), _module(_make()))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=f"{shards[1].name} does not exist"):
        _module(model)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    model = _saved(tmp_path)

    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["stray.weight"] = torch.zeros(2)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)

    _rewrite(tmp_path, spoil)
    with pytest.raises(ConfigError) as caught:
        _module(model)
    said = str(caught.value)
    assert f"weights in {tmp_path} do not fit: " in said
    assert "model.norm.weight is missing" in said
    assert "stray.weight is extra" in said
    assert "model.layers.0.mlp.up_proj.weight has shape (3, 3), not (160, 64)" in said


def test_tied_head_may_be_there_if_it_is_the_embedding(tmp_path):
    model = _saved(tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _rewrite(tmp_path, add)
    _equal(_module(model, seed=99), _module(_make()))

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1

    _rewrite(tmp_path, differ)
    with pytest.raises(ConfigError, match=r"differs from .*, to which it is tied"):
        _module(model)


def test_position_buffers_of_old_checkpoints_are_ignored(tmp_path):
    model = _saved(tmp_path)
    _rewrite(
        tmp_path,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}),
    )
    _equal(_module(model, seed=99), _module(_make()))


def test_damaged_and_absent_files_are_named(tmp_path):
    model = _saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        _module(model)
    file.unlink()
    with pytest.raises(
        ConfigError, match=r"model\.safetensors does not exist; weights are read fr"
    ):
        _module(model)


def test_unknown_architecture_is_named():
    with pytest.raises(
        ConfigError, match=r"architectures \['NoSuchForCausalLM'\] of model_type 'x'"
    ):
        causal_lm({"architectures": ["NoSuchForCausalLM"], "model_type": "x"}, None)


def _experts(folder: Path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, intermediate_size=12, moe_intermediate_size=6, num_experts=3,
        num_experts_per_tok=2, vocab_size=20, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    module = Qwen3MoeForCausalLM(config)
    module.save_pretrained(folder)
    return module, Qwen3Moe(Qwen3Moe.Config(path=str(folder)), Context(directory=Path()))


def test_experts_of_a_checkpoint_are_stacked_as_the_module_has_them(tmp_path):
    theirs, model = _experts(tmp_path)
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in load_file(
        tmp_path / "model.safetensors"
    )
    ours = _module(model, seed=99)
    assert any(name.endswith("experts.gate_up_proj") for name in ours.state_dict())
    _equal(ours, theirs)


def test_expert_that_is_missing_or_misshapen_is_named(tmp_path):
    _, model = _experts(tmp_path)

    def spoil(tensors):
        del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
        tensors["model.layers.0.mlp.experts.0.down_proj.weight"] = torch.zeros(3, 3)
        tensors["model.layers.0.mlp.experts.3.down_proj.weight"] = torch.zeros(8, 6)

    _rewrite(tmp_path, spoil)
    with pytest.raises(ConfigError) as caught:
        _module(model)
    said = str(caught.value)
    assert "model.layers.1.mlp.experts.2.up_proj.weight is missing" in said
    assert "model.layers.0.mlp.experts.0.down_proj.weight has shape (3, 3), not (8, 6)" in said
    assert "model.layers.0.mlp.experts.3.down_proj.weight is extra" in said
    assert "gate_up_proj" not in said
