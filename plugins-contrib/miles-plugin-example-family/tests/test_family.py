"""The family keeps both contracts, speaks its markup, and learns the default task in the real
loop."""

import json

import numpy as np
import pytest
from miles_plugin_example_family.tito import ID, MARKS, ROLES

from miles import ConfigError, EpisodeError, Spec
from miles.cli import main

NAME = "example_family"


@pytest.mark.miles_contract("model", NAME)
@pytest.mark.miles_contract("model", NAME, {"depth": 1, "shared": 4, "width": 48})
@pytest.mark.miles_contract("tito", NAME)
def test_family_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.fixture
def build(miles_registry, miles_context):
    def make(kind, **config):
        return miles_registry.build(Spec(kind=kind, name=NAME, config=config), miles_context)

    return make


# ---------------------------------------------------------------- markup

CALLS = [{"id": "call-0", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
CONVERSATION = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "so ", "reasoning_content": "hm", "tool_calls": CALLS},
    {"role": "tool", "content": "4"},
]


def test_render_writes_the_markup(build):
    tito = build("tito")
    assert tito.decode(tito.render(CONVERSATION)) == (
        "<|lantern|><|system|>Add.<|over|><|user|>2+2=<|over|>"
        "<|assistant|><|think|>hm<|/think|>so <|call|>add\n{}<|/call|><|over|>"
        "<|tool|>4<|over|><|assistant|>"
    )


def test_parse_inverts_what_render_wrote(build):
    tito = build("tito")
    ids = tito.render(CONVERSATION[:3]).tolist()
    start = ids.index(ROLES["assistant"]) + 1
    completion = ids[start : ids.index(ID["<|over|>"], start) + 1]
    assert tito.parse(np.array(completion, np.int32)) == CONVERSATION[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (["<|think|>", "hm"], {"content": "", "reasoning_content": "hm"}),
        (["4", "<|/think|>"], {"content": "4<|/think|>"}),
        (["<|think|>", "<|/think|>", "4"], {"content": "4", "reasoning_content": ""}),
    ],
)
def test_parse_of_broken_parts(build, text, message):
    tito = build("tito")
    pieces = [np.array([ID[t]]) if t in ID else tito.encode(t) for t in text]
    tokens = np.concatenate(pieces).astype(np.int32)
    assert tito.parse(tokens) == {"role": "assistant", **message}


def test_template_of_the_saved_tokenizer_writes_the_same(build, tmp_path):
    from transformers import AutoTokenizer

    tito = build("tito")
    tito.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(
        CONVERSATION, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids == tito.render(CONVERSATION).tolist()
    assert tokenizer.convert_tokens_to_ids(list(MARKS)) == list(range(256, 266))


def test_render_refuses_unknown_roles(build):
    with pytest.raises(EpisodeError, match="'narrator'; valid: system, user, assistant, tool"):
        build("tito").render([{"role": "narrator", "content": "x"}])


# ---------------------------------------------------------------- registration


def test_engine_names_keep_strangers(build):
    model = build("model")
    assert model.engine_name("lantern.blocks.1.look.key.bias") == (
        "model.layers.1.self_attn.k_proj.bias"
    )
    assert model.engine_name("lantern.blocks.1.look.lamp") == "lantern.blocks.1.look.lamp"


def test_load_refuses_what_is_not_there(build, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        build("model", init="load", path=str(tmp_path)).hf_config()


def test_load_refuses_another_family(build, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="'llama', not 'lantern'"):
        build("model", init="load", path=str(tmp_path)).hf_config()


def test_build_refuses_a_missing_tensor(build, tmp_path):
    from miles_plugin_example_family.modeling import build as module
    from safetensors.torch import load_file, save_file

    config = build("model").hf_config()
    module(config, None).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lantern.norm.gain"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lantern\.norm\.gain"):
        module(config, tmp_path)


# ---------------------------------------------------------------- the loop


def _run(tmp_path, *more):
    where = (f"run.dir={tmp_path}", "run.name=run", "tracker=[jsonl]")
    code = main(["run", f"model={NAME}", "tito=auto", *where, *more])
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return code, [json.loads(row) for row in rows]


def test_default_task_runs_on_the_family(tmp_path, capfd):
    code, rows = _run(
        tmp_path,
        "environment.chat=true",
        "evaluator.tasks=4",
        "selector.admit=[]",
        *("stages.sft.steps=3", "stages.grpo.steps=2", "stages.grpo.groups_per_step=4"),
    )
    assert code == 0, capfd.readouterr()
    mismatch = [r["mismatch/logprob_abs_max"] for r in rows if "mismatch/logprob_abs_max" in r]
    assert len(mismatch) == 2
    assert max(mismatch) < 1e-4
    model = tmp_path / "run" / "checkpoints" / "step_000005" / "model"
    assert json.loads((model / "config.json").read_text())["model_type"] == "lantern"
    assert (model / "tokenizer.json").is_file()


@pytest.mark.slow
def test_default_task_is_learned_by_the_family(tmp_path, capfd):
    code, rows = _run(tmp_path)
    assert code == 0, capfd.readouterr()
    scores = [row["eval/heldout/score"] for row in rows if "eval/heldout/score" in row]
    assert scores[-1] >= 0.9, scores
