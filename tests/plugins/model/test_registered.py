"""Families that are registered for their checkpoints: which are whose, and what they refuse."""

import json
import re

import pytest

from miles import ConfigError, Context
from miles.plugins import Registry
from miles_plugins.model.registered import DeepSeek, Glm, HuggingFace, Kimi, Qwen3Moe
from miles_plugins.model.templates import Signs, handler_for, template_of

FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_vl_moe": "qwen3_vl",
    "glm4_moe": "glm",
    "glm_moe_dsa": "glm",
    "nemotron_h": "nemotron",
    "kimi_k2": "kimi",
    "kimi_k25": "kimi",
    "minimax_m2": "minimax",
    "deepseek_v3": "deepseek",
    "deepseek_v4": "deepseek",
    "inkling": "inkling",
    "llama": "llama",
}


def checkpoint(directory, kind, template=""):
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def test_each_type_is_claimed_by_one_family_and_the_last_resort():
    registry = Registry.load()
    models = {name: registry.component("model", name) for name in registry.names("model")}
    for kind, name in FAMILIES.items():
        own = [n for n, m in models.items() if m.matches({"model_type": kind})]
        assert set(own) - {"huggingface"} == {name}, kind


def test_handlers_that_registrations_name_exist():
    registry = Registry.load()
    for name in registry.names("model"):
        model = registry.component("model", name)
        named = {model.tito, *(s.tito for s in getattr(model, "signs", ()))}
        assert named <= set(registry.names("tito")), name


@pytest.mark.parametrize(
    ("model", "kind", "template", "tito"),
    [
        (Glm, "glm4_moe", "<arg_key> /nothink", "glm4"),
        (Glm, "glm4_moe", "[gMASK]<sop> <arg_key>", "glm5"),
        (Glm, "glm4_moe", "", "glm4"),
        (Glm, "glm4_moe_lite", "", "glm5"),
        (Glm, "glm4_moe", "something else", "generic"),
        (Kimi, "kimi_k2", "", "kimi_k2"),
        (Kimi, "kimi_k25", "", "kimi_k2_5"),
        (DeepSeek, "deepseek_v4", "<｜Assistant｜>", "deepseek_v4"),
        (DeepSeek, "deepseek_v32", "<｜Assistant｜>", "deepseek_v3"),
        (Qwen3Moe, "qwen3_moe", "<function= reasoning_content", "generic"),
        (HuggingFace, "llama", "anything", "generic"),
    ],
)
def test_handler_follows_the_template_and_without_one_the_type(
    tmp_path, model, kind, template, tito
):
    directory = checkpoint(tmp_path, kind, template)
    assert model.choose_tito({"path": str(directory)}) == tito


def test_embedded_engine_is_refused_by_name(tmp_path):
    model = Glm(Glm.Config(path=str(checkpoint(tmp_path, "glm4_moe"))), Context(directory=tmp_path))
    with pytest.raises(
        ConfigError, match="model glm: the embedded engine cannot run model_type 'glm4_moe'; use an"
    ):
        model.decoder()
    assert model.engine_name("model.norm.weight") == "model.norm.weight" and not model.random


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (None, "model glm: path is empty; give model.path=DIRECTORY"),
        ("", r"config\.json does not exist; the directory holds nothing"),
        ("llama", "model_type 'llama', not glm4_moe, glm4_moe_lite, glm_moe_dsa"),
    ],
)
def test_checkpoint_that_is_not_the_familys_is_refused(tmp_path, kind, words):
    if kind:
        checkpoint(tmp_path, kind)
    path = "" if kind is None else str(tmp_path)
    with pytest.raises(ConfigError, match=words):
        Glm(Glm.Config(path=path), Context(directory=tmp_path)).hf_config()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": "x"}, "num_hidden_layers is 'x', no whole number"),
        ({"vocab_size": [1]}, "vocab_size is [1], no whole number"),
        ({"text_config": []}, "text_config is [], no object"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8', no object"),
        ({"text_config": {"vocab_size": True}}, "text_config.vocab_size is True, no whole number"),
        ({"num_experts": 10**30}, "num_experts is a number of more than 64 bits"),
        ({"model_type": ["glm"]}, "model_type is ['glm'], no name"),
    ],
)
def test_config_of_another_type_is_named_and_ends_no_check(tmp_path, config, words):
    """`miles check` ended in a TypeError, AttributeError or OverflowError, far from the file."""
    whole = {"model_type": "glm4_moe", **config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    path = str(tmp_path)
    for family in (Glm, HuggingFace):
        with pytest.raises(ConfigError, match=re.escape(f"config.json: {words}")):
            family(family.Config(path=path), Context(directory=tmp_path)).hf_config()


def test_sizes_that_some_families_have_one_a_layer_are_read(tmp_path):
    config = {"model_type": "glm4_moe", "intermediate_size": [1, 2], "text_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = Glm(Glm.Config(path=str(tmp_path)), Context(directory=tmp_path))
    assert made.hf_config() == config


def test_template_is_found_wherever_tokenizers_keep_it(tmp_path):
    assert template_of(tmp_path) == ""
    path = tmp_path / "tokenizer_config.json"
    for held in ("x", {"default": "x"}, [{"name": "default", "template": "x"}]):
        path.write_text(json.dumps({"chat_template": held}))
        assert template_of(tmp_path) == "x"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert template_of(tmp_path) == "own"
    signs = (Signs(tito="a", has=("y",)), Signs(tito="b", has=("w",)))
    assert handler_for(signs, str(tmp_path)) == "b"
    path.write_text("[")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not a JSON object"):
        template_of(tmp_path)
