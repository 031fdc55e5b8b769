"""Whose model a checkpoint is, and what a command line that names one leaves out."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from miles import ConfigError
from miles.plugins import Registry
from miles.registry.families import family, filled_in, hf_config


@pytest.fixture(scope="module")
def registry():
    return Registry.load(allow=["miles"])


def checkpoint(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_a_family_of_its_own_comes_before_the_last_resort(registry):
    assert family({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, registry) == (
        "qwen3"
    )
    assert family({"model_type": "bloom"}, registry) == "huggingface"
    assert family({"model_type": "of nobody"}, registry) is None


def test_a_family_that_is_known_asks_no_last_resort():
    """Its answer takes transformers and torch, which the driver does without."""

    class Own:
        @classmethod
        def matches(cls, config):
            return config["model_type"] == "own"

    class Last:
        fallback = True

        @classmethod
        def matches(cls, config):
            return asked.append(config) or True

    asked = []
    kinds = {"a_last": Last, "own": Own}
    known = SimpleNamespace(names=lambda kind: kinds, component=lambda kind, name: kinds[name])
    assert family({"model_type": "own"}, known) == "own" and not asked
    assert family({"model_type": "other"}, known) == "a_last" and asked


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ([], ["model=qwen3", "model.init=load"]),
        (["model=llama"], ["model.init=load"]),
        (["model.init=random"], ["model=qwen3"]),
        (["model=nobody"], []),
    ],
    ids=str,
)
def test_a_path_says_the_model_and_that_it_is_read(tmp_path, registry, more, wanted):
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    folder = checkpoint(tmp_path / "c", json.dumps(config))
    assert filled_in([f"model.path={folder}", *more], registry) == wanted
    assert registry.filled_in([f"model.path={folder}", *more]) == wanted


def test_without_a_path_nothing_is_filled_in(registry):
    assert filled_in(["model=qwen3", "steps=2"], registry) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is no checkpoint: "), ("[]", r"is no checkpoint: config\.json holds no object")],
)
def test_a_directory_that_is_none_is_one_error(tmp_path, registry, text, words):
    folder = checkpoint(tmp_path / "c", text)
    with pytest.raises(ConfigError, match=words):
        hf_config(folder)
    with pytest.raises(ConfigError, match=f"^model.path: .*{words}"):
        filled_in([f"model.path={folder}"], registry)
    with pytest.raises(ConfigError, match="No such file"):
        hf_config(tmp_path / "nowhere")
