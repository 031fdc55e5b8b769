"""Headers tell what a checkpoint holds, and what does not fit, without reading a tensor."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from miles import ConfigError, Context, Spec
from miles.plugins import Registry
from miles_plugins.model import headers


@pytest.fixture
def decoder(tmp_path):
    def make(name: str = "qwen3", **config):
        spec = Spec(kind="model", name=name, config=config)
        return Registry.load().build(spec, Context(directory=tmp_path)).decoder()

    return make


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_dense_shapes_are_those_of_transformers(decoder, tmp_path, name, tied):
    import torch

    from miles_plugins.model.build import causal_lm

    spec = Spec(kind="model", name=name, config={"tied": tied})
    config = Registry.load().build(spec, Context(directory=tmp_path)).hf_config()
    torch.manual_seed(0)
    theirs = {n: tuple(t.shape) for n, t in causal_lm(config, None).state_dict().items()}
    if tied:
        theirs.pop("lm_head.weight")
    assert dict(headers.dense_shapes(decoder(name, tied=tied))) == theirs


def test_shapes_are_read_from_every_file(tmp_path):
    for name in ("a", "b"):
        save_file({name: np.zeros((2, 3), np.float32)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert headers.shapes(headers.weight_files(tmp_path)) == {"a": (2, 3), "b": (2, 3)}
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors does not exist"):
        headers.weight_files(tmp_path)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda data: data[:4], "its header cannot be"),
        (lambda data: b"\xff" * 8 + data[8:], "its header cannot be"),
        (lambda data: data[:8] + b"!" + data[9:], "its header is not JSON"),
        (lambda data: data[:-5], "5 bytes are missing at its end"),
    ],
)
def test_shapes_of_a_damaged_file_name_it(tmp_path, cut, message):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(8, np.float32)}, path)
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(ConfigError, match=message) as caught:
        headers.shapes([path])
    assert str(path) in str(caught.value)


def test_faults_name_what_is_missing_extra_and_of_another_shape():
    held = {"a": (2,), "b": (3,), "x": (1,), "lm_head.weight": (1,), "r.rotary_emb.inv_freq": (1,)}
    assert headers.faults(held, {"a": (2,), "b": (4,), "c": (1,)}) == [
        "c is missing",
        "b has shape (3,), not (4,)",
        "x is extra",
    ]
    assert headers.faults({"a": (2,)}, {"a": (2,)}) == []
