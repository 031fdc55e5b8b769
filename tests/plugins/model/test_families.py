"""Registrations of dense families: what is made, what is read, what is refused; no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles import ConfigError, Context, Decoder, Model
from miles_plugins.model.llama import Llama
from miles_plugins.model.qwen3 import Qwen3

FAMILIES = [Qwen3, Llama]


def _make(kind, **config):
    return kind(kind.Config(**config), Context(directory=Path()))


def _checkpoint(folder: Path, **changes) -> Path:
    config = {**_make(Llama).hf_config(), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _loaded(folder: Path, **changes):
    return _make(Llama, init="load", path=str(_checkpoint(folder, **changes)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_a_random_model_of_about_100k_parameters(kind):
    from miles_plugins.engine.torch.decoder import wanted

    model = _make(kind)
    assert isinstance(model, Model)
    assert model.random
    assert model.directory() is None
    sizes = [rows * (columns[0] if columns else 1) for rows, *columns in _shapes(wanted, model)]
    assert 95_000 < sum(sizes) < 110_000


def _shapes(wanted, model):
    return [shape for name, shape in wanted(model.decoder()).items()]


@pytest.mark.parametrize("kind", FAMILIES)
def test_decoder_follows_the_configuration(kind):
    model = _make(kind, rope_theta=77.0, norm_eps=1e-5, tied=False, max_len=99)
    assert model.decoder() == Decoder(
        vocab_size=264,
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=160,
        rope_theta=77.0,
        norm_eps=1e-5,
        qk_norm=kind is Qwen3,
        tied=False,
        max_len=99,
    )


def test_decoder_reads_older_checkpoints(tmp_path):
    """rope_theta at the top, no head_dim, no key heads."""
    config = _make(Llama).hf_config()
    for name in ("rope_parameters", "head_dim", "num_key_value_heads"):
        del config[name]
    config.update(rope_theta=500000.0, rope_scaling=None, attention_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = _make(Llama, init="load", path=str(tmp_path)).decoder()
    assert (decoder.rope_theta, decoder.head_dim, decoder.kv_heads) == (500000.0, 16, 4)
    assert decoder.attention_bias


def test_engine_name_drops_a_tied_head_and_leaves_strangers_to_the_engine(tmp_path):
    tied, untied = _make(Qwen3), _make(Qwen3, tied=False)
    assert tied.engine_name("lm_head.weight") is None
    assert untied.engine_name("lm_head.weight") == "lm_head.weight"
    assert tied.engine_name("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert tied.engine_name("model.norm.weight") == "model.norm.weight"
    assert tied.engine_name("who.knows") == "who.knows"


def test_matches_by_model_type():
    assert Qwen3.matches({"model_type": "qwen3"})
    assert not Qwen3.matches({"model_type": "qwen3_moe"})
    assert Llama.matches({"model_type": "llama"})
    assert not Llama.matches({})


def test_hf_config_is_a_fresh_one_each_time():
    model = _make(Qwen3)
    model.hf_config()["model_type"] = "changed"
    assert model.hf_config()["model_type"] == "qwen3"


def test_path_may_hold_any_character(tmp_path):
    folder = tmp_path / "a b=c,(d)"
    folder.mkdir()
    model = _loaded(folder)
    assert model.directory() == folder
    assert model.hf_config()["hidden_size"] == 64


def test_load_without_a_usable_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="model llama: init is load, but path is empty; give mod"):
        _make(Llama, init="load").hf_config()
    with pytest.raises(ConfigError, match="path '/nowhere' is not a directory"):
        _make(Llama, init="load", path="/nowhere").directory()
    (tmp_path / "notes.txt").touch()
    load = {"init": "load", "path": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"config\.json does not exist; the dir.* notes\.txt"):
        _make(Llama, **load).decoder()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        _make(Llama, **load).hf_config()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "head_dim": "x"}')
    with pytest.raises(ConfigError, match=r"config\.json: head_dim is 'x', no whole number"):
        _make(Llama, **load).hf_config()
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_attention_heads": null}'
    )
    with pytest.raises(ConfigError, match=r"config\.json has no num_attention_heads"):
        _make(Llama, **load).decoder()
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    with pytest.raises(ConfigError, match="has model_type 'gemma', not 'llama'"):
        _make(Llama, **load).hf_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ({"head_dim": 15}, r"head_dim \(15\) must be even"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"vocab_size": 1}, "vocab_size is 1; it must be at least 2"),
    ],
)
def test_impossible_random_shapes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=f"model qwen3: {message}"):
        _make(Qwen3, **changes).hf_config()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_decoder_refuses_what_the_engine_cannot_run(tmp_path, changes, what):
    with pytest.raises(ConfigError, match=f"the embedded engine cannot run {what}; use another"):
        _loaded(tmp_path, **changes).decoder()


def test_registrations_import_no_torch():
    code = (
        "import sys; from miles_plugins.model import llama, qwen3; import miles_plugins.hooks, "
        "miles_plugins.precision.fp32, miles_plugins.transport.memory, miles_plugins.model.gguf; "
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", FAMILIES)
def test_random_model_is_initialized_by_its_width_unless_told(kind):
    assert _make(kind, hidden_size=256).hf_config()["initializer_range"] == 1 / 16
    assert _make(kind, init_std=0.02).hf_config()["initializer_range"] == 0.02


@pytest.mark.parametrize("family", [Qwen3, Llama])
def test_random_model_with_a_path_is_refused(family: type, tmp_path: Path) -> None:
    """Nothing of the path would be read, its tokenizer neither."""
    config = family.Config(path=str(tmp_path))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="init is random, which reads nothing of it; give model"):
        family(config, Context(directory=tmp_path))
