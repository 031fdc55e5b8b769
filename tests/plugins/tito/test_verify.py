"""`miles tito verify`: which handler a checkpoint gets, what is reported, and a live engine."""

import asyncio
import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web

from miles import ConfigError, Context, EngineError, Request, Sampling
from miles.cli import main
from miles.plugins import Registry
from miles.testing.tito_grid import verify
from miles.testing.tito_live import verify_live
from miles.testing.tito_verify import detect, find, report
from miles_plugins.tito.bytes import Bytes
from miles_plugins.tito.families import Glm4, Qwen3, Qwen35
from miles_plugins.tito.surrogate import MARK
from tests.plugins.tito.checkpoints import PUBLISHED, bytes_checkpoint, handler

TYPES = {
    "qwen3/Qwen-Qwen3-0.6B": "qwen3",
    "qwen3/trl_qwen3": "qwen3_moe",
    "qwen3.5/Qwen3.5-4B": "qwen3_5",
    "qwen3.5/trl_qwen3_6": "qwen3_5_moe",
    "glm/GLM-4.6": "glm4_moe",
    "glm/GLM-4.7-Flash": "glm4_moe_lite",
    "nemotron/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron_h",
    "nemotron/trl_nemotron_3_ultra": "nemotron_h",
    "kimi/Kimi-K2-Instruct": "kimi_k2",
    "kimi/Kimi-K2-Thinking": "kimi_k2",
    "kimi/moonshotai-Kimi-K2": "kimi_k2",
    "minimax/MiniMax-M2": "minimax_m2",
    "deepseek/trl_deepseekv3": "deepseek_v3",
    "deepseek/deepseek-ai-DeepSeek-V3.1": "deepseek_v3",
    "deepseek/deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek/deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "inkling/inkling": "inkling",
}


@pytest.fixture(scope="module")
def registry():
    return Registry.load()


# ---------------------------------------------------------------- detection


@pytest.mark.parametrize("name", TYPES)
def test_checkpoint_is_given_its_family_and_fits_it(registry, tmp_path, name):
    family, _ = PUBLISHED[name]
    directory = bytes_checkpoint(tmp_path, family, name, model_type=TYPES[name])
    chosen, why = detect(registry, directory)
    assert (chosen, why.startswith("warning")) == (family.name, False)
    assert find(directory, registry=registry).name == family.name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3/Qwen3-Coder", "qwen3_moe"),
        ("qwen3/trl_qwen3_instruct_2507", "qwen3"),
        ("qwen3/Qwen-Qwen2.5-7B-Instruct", "qwen2"),
        ("qwen3/trl_qwen3_training", "qwen3"),
        ("qwen3.5/trl_qwen3_5_think_training", "qwen3_5"),
    ],
)
def test_any_other_template_falls_back_to_generic_with_a_warning(registry, tmp_path, name, kind):
    directory = bytes_checkpoint(tmp_path, Qwen3, name, model_type=kind)
    chosen, why = detect(registry, directory)
    assert chosen == "generic"
    assert why.startswith(f"warning: the checkpoint {directory} ({kind}) has no handler of its own")
    assert not [line for line in verify(find(directory, registry=registry).handler) if line.faults]


@pytest.mark.parametrize(
    ("family", "kind", "name"),
    [
        ("Glm4", "glm4_moe", "glm4"),
        ("Glm5", "glm_moe_dsa", "glm5"),
        ("KimiK25", "kimi_k25", "kimi_k2_5"),
        ("Qwen3VL", "qwen3_vl", "qwen3_vl"),
        ("DeepSeekV4", "deepseek_v4", "deepseek_v4"),
    ],
)
def test_checkpoint_without_a_template_is_given_the_family_of_its_type(
    registry, tmp_path, family, kind, name
):
    import miles_plugins.tito.families as families

    directory = bytes_checkpoint(tmp_path, getattr(families, family), model_type=kind)
    assert detect(registry, directory)[0] == name


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_checkpoint_of_a_byte_model_is_given_bytes(registry, tmp_path, kind):
    Bytes(Bytes.Config(), Context(directory=tmp_path)).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    chosen, why = detect(registry, tmp_path)
    assert (chosen, why.startswith("warning")) == ("bytes", False)
    assert find(tmp_path, registry=registry).handler.vocab_size == 259


def test_unknown_type_says_how_to_choose(registry, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(ConfigError, match=r"knows model_type 'no_such_family' .*--tito NAME"):
        detect(registry, tmp_path)


# ---------------------------------------------------------------- a run's check


def check(capsys, *overrides):
    code = main(["check", "environment=arithmetic", *overrides])
    return code, capsys.readouterr().out


def test_check_refuses_a_family_that_does_not_fit(tmp_path, capsys):
    directory = bytes_checkpoint(tmp_path, Qwen3, "qwen3/Qwen-Qwen3-0.6B", model_type="llama")
    code, out = check(capsys, "model=huggingface", f"model.path={directory}", "tito=glm5")
    assert code == 1
    assert "tito glm5 does not fit the tokenizer" in out and "no special token [gMASK]" in out


def test_check_warns_of_a_checkpoint_without_a_handler_and_names_it(tmp_path, capsys):
    name = "qwen3/Qwen-Qwen2.5-7B-Instruct"
    directory = bytes_checkpoint(tmp_path, Qwen3, name, model_type="qwen2")
    _, out = check(capsys, "model=huggingface", f"model.path={directory}")
    assert f"warning: tito: the checkpoint {directory} (qwen2) has no handler of its own" in out


def test_check_refuses_what_is_unverified_unless_told(tmp_path, capsys):
    directory = bytes_checkpoint(tmp_path, Qwen35, model_type="qwen3_5")
    code, out = check(capsys, "model=qwen3_5", f"model.path={directory}")
    assert code == 1 and "tito qwen3_5 is unverified" in out and "tito.unverified=true" in out
    _, out = check(capsys, "model=qwen3_5", f"model.path={directory}", "tito.unverified=true")
    assert "warning: tito qwen3_5 is unverified" in out
    assert "tito qwen3_5: the tokenizer in" in out and "is a surrogate" in out


# ---------------------------------------------------------------- the command


def test_command_reports_each_talk_and_marks_surrogates(tmp_path, capsys):
    directory = bytes_checkpoint(tmp_path, Glm4, "glm/GLM-4.6", model_type="glm4_moe")
    assert main(["tito", "verify", "--model", str(directory)]) == 0
    out = capsys.readouterr().out
    assert (
        "tito glm4 for" in out and "variant: glm-4.5" in out and "oracle: the chat template" in out
    )
    assert "surrogate: the tokenizer of 'bytes' stands in" in out
    assert "reasoning_dropped   ok: 3 turns" in out and "2 kept that it would take back" in out
    assert "cut anywhere        ok" in out and "any text            ok" in out
    assert out.endswith("good: all 14\n")


def test_command_does_not_count_as_good_what_it_did_not_try(tmp_path, capsys, monkeypatch):
    directory = bytes_checkpoint(tmp_path, Glm4, "glm/GLM-4.6", model_type="glm4_moe")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert main(["tito", "verify", "--model", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "any text            not tried: hypothesis is not installed: pip install" in out
    assert out.endswith("good: 13, 1 not tried\n")


def test_command_fails_where_another_template_disagrees(tmp_path, capsys):
    directory = bytes_checkpoint(tmp_path, Qwen3, "qwen3/Qwen-Qwen3-0.6B", model_type="qwen3")
    (directory / MARK).unlink()
    other = tmp_path / "other.jinja"
    text = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    other.write_text(text.replace("<|im_start|>assistant", "<|im_start|>model"))
    args = ["tito", "verify", "--model", str(directory), "--template", str(other)]
    assert main(args) == 1
    out = capsys.readouterr().out
    assert "surrogate" not in out
    assert "plain               WRONG: turn 0: prompts differ at token" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model", "nowhere"), "--model: nowhere is not a directory"),
        (("--model", ".", "--template", "nowhere"), "--template: nowhere is not a file"),
        (("--model", ".", "--tito", "qwen33"), "there is no tito 'qwen33'; did you mean"),
    ],
)
def test_command_refuses_what_is_not_there(capsys, args, words):
    assert main(["tito", "verify", *args]) == 2
    assert words in capsys.readouterr().err


def test_grid_finds_a_handler_that_loses_a_line_break():
    from miles_plugins.tito.bytes import Bytes

    class Loses(Bytes):
        def extend(self, stored, history, messages, *, tools=()):
            return super().extend(stored, history, messages, tools=tools)[:-1]

        def parse(self, tokens, *, tools=()):
            return {**super().parse(tokens), "content": "else"}

    context = Context(directory=None)
    faults = {line.talk: line.faults for line in verify(Loses(Bytes.Config(), context))}
    assert "parsed 'else'" in faults["plain"][0]


# ---------------------------------------------------------------- a live engine


@contextmanager
def served(engine, *, change=None):
    """SGLang's `/generate` over an engine, in a thread; `change` may falsify the reply."""
    started, ended, found = threading.Event(), threading.Event(), []

    async def generate(request):
        body = await request.json()
        params = body["sampling_params"]
        sampling = Sampling(
            max_new_tokens=params["max_new_tokens"], stop_ids=tuple(params["stop_token_ids"])
        )
        tokens = np.array(body["input_ids"], np.int32)
        done = await engine.generate(
            Request(id="r", key="k", tokens=tokens, sampling=sampling, seed=len(tokens))
        )
        matched = {"type": done.finish}
        info = {
            "prompt_tokens": len(tokens),
            "completion_tokens": len(done.tokens),
            "finish_reason": matched,
            "input_token_logprobs": [[None, int(t), None] for t in tokens],
            "output_token_logprobs": [
                [float(p), int(t), None] for p, t in zip(done.logprobs, done.tokens, strict=True)
            ],
        }
        reply = {"meta_info": info}
        return web.json_response(change(reply) if change else reply)

    async def run():
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            started.set()
            while not ended.is_set():
                await asyncio.sleep(0.01)
        finally:
            await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield found[0]
    finally:
        ended.set()
        thread.join(20)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A handler and the embedded engine with a random model of its vocabulary."""
    from miles_plugins.engine.torch import Torch
    from miles_plugins.model import qwen3
    from miles_plugins.model.build import causal_lm
    from miles_plugins.precision.fp32 import Fp32

    directory = tmp_path_factory.mktemp("live")
    bytes_checkpoint(directory, Qwen3, "qwen3/Qwen-Qwen3-0.6B", model_type="qwen3")
    built = handler(Qwen3, directory)
    context = Context(directory=directory, precision=Fp32(Fp32.Config(), None))
    shape = qwen3.Qwen3.Config(layers=1, vocab_size=built.vocab_size, max_len=4096)
    context = replace(context, model=qwen3.Qwen3(shape, context))
    engine = Torch(Torch.Config(rows=4, max_len=4096), context)
    module = causal_lm(context.model.hf_config(), None)
    asyncio.run(engine.load(0, [(n, p.detach()) for n, p in module.named_parameters()]))
    return built, engine, directory


def test_live_engine_sees_prompts_that_only_grow(live):
    built, engine, _ = live
    with served(engine) as url:
        lines = verify_live(built, url)
    assert not [line for line in lines if line.faults or line.skipped]
    turns = {line.talk: line.turns for line in lines}
    assert turns["multi_turn"] == turns["reasoning_dropped"] == turns["one_call"] == 3


def test_live_engine_that_changes_a_prompt_is_found_out(live):
    def change(reply):
        reply["meta_info"]["input_token_logprobs"][3][1] = 97
        reply["meta_info"]["prompt_tokens"] += 1
        return reply

    built, engine, directory = live
    with served(engine, change=change) as url:
        found = find(directory)
        good, lines = report(found, directory, live=url)
    text = "\n".join(lines)
    assert not good and built.stop_ids == found.handler.stop_ids
    assert "WRONG: turn 0: the engine counts" in text and "7 of 7 are wrong" in text


def test_live_engine_that_is_not_there_is_an_error(live):
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/sessions: Client"):
        verify_live(live[0], "http://127.0.0.1:9")


def test_live_session_server_records_tokens_that_only_grow(live):
    from tests.unit.session.server.conftest import ADMIN, running

    built, engine, _ = live
    with running(engine, tito=built) as server:
        lines = verify_live(built, server.address, key=ADMIN)
    assert not [line for line in lines if line.faults or line.skipped]
    assert all(line.turns for line in lines)
