"""Recorded rollouts and conversations as ground truth for the Qwen3 handler and the generic one."""

import json

import numpy as np
import pytest

from miles.testing.tito_oracle import Oracle
from miles_plugins.tito.families import Nemotron3, Qwen3
from miles_plugins.tito.generic import Generic
from tests.plugins.tito.checkpoints import DATA, handler, real_checkpoint, tokenizers

pytestmark = pytest.mark.slow

TEMPLATE = "qwen3/Qwen-Qwen3-0.6B"


def user(text):
    return {"role": "user", "content": text}


def rows(name):
    path = DATA / "trajectories" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip("no shared data beside the project")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    source = tokenizers(tmp_path_factory) / "qwen3"
    return real_checkpoint(tmp_path_factory.mktemp("qwen3"), source, Qwen3, TEMPLATE)


@pytest.fixture(scope="module")
def handlers(directory):
    return {"qwen3": handler(Qwen3, directory), "generic": handler(Generic, directory)}


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory, directory):
    """The family that `ns_tools` was recorded with; Qwen3's vocabulary stands in for its own."""
    made = tmp_path_factory.mktemp("nemotron")
    name = "nemotron/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    real_checkpoint(made, directory, Nemotron3, name)
    return handler(Nemotron3, made), Oracle(made)


@pytest.mark.parametrize("name", ["qwen3", "generic"])
def test_recorded_prompts_and_completions_are_rendered_and_parsed_five_of_five(handlers, name):
    built, good = handlers[name], 0
    for row in rows("competitive_coding_challenges"):
        output = row["response"]["output"]
        thought = next(o for o in output if o["type"] == "reasoning")["summary"][0]["text"]
        turn = next(o for o in output if o["type"] == "message")
        prompt = built.render([user(row["responses_create_params"]["input"])])
        np.testing.assert_array_equal(prompt, turn["prompt_token_ids"])
        message = built.parse(np.array(turn["generation_token_ids"], np.int32))
        assert message == {
            "role": "assistant",
            "content": turn["content"][0]["text"],
            "reasoning_content": thought,
        }
        good += 1
    assert good == 5


def conversation(row):
    """Messages and tools of a recorded Responses-API conversation, and where turns end."""
    asked = row["responses_create_params"]
    messages = [{"role": m["role"], "content": m["content"]} for m in asked["input"]]
    said = None
    for item in row["response"]["output"]:
        kind = item["type"]
        if kind == "function_call_output":
            answer = {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
            messages.append(answer)
            said = None
            continue
        if said is None:
            said = {"role": "assistant", "content": ""}
            messages.append(said)
        if kind == "reasoning":
            said["reasoning_content"] = item["summary"][0]["text"]
        elif kind == "message":
            said["content"] += item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
    for message in messages:  # a prompt that opens the reasoning leaves its close in the text
        thought, mark, content = message["content"].partition("</think>")
        if mark and message["role"] == "assistant":
            message.update(reasoning_content=thought, content=content)
    tools = []
    for tool in asked["tools"]:
        function = {key: tool[key] for key in ("name", "description", "parameters")}
        tools.append({"type": "function", "function": function})
    return messages, tools


CASES = [
    pytest.param(name, index, marks=[pytest.mark.slow] if name == "ns_tools" and index > 1 else [])
    for name in ("xlam_fc", "ns_tools")
    for index in range(5)
]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_recorded_tool_conversation_is_append_only_turn_by_turn(
    handlers, directory, nemotron, name, index
):
    messages, tools = conversation(rows(name)[index])
    oracle = Oracle(directory)
    sides = [(built, oracle) for built in handlers.values()]
    for built, asked in [*sides, *([nemotron] if name == "ns_tools" else [])]:
        append_only(built, asked, messages, tools)


def append_only(built, oracle, messages, tools):
    """Stored tokens only ever grow, and each whole prompt is what the template writes."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    assert len(turns) >= 2
    stored, at = np.zeros(0, np.int32), 0
    for end in turns:
        told, history = messages[at:end], messages[:at]
        if at:
            assert not built.rewrites(history, told, tools=tools)
            added = built.extend(stored, history, told, tools=tools)
        else:
            added = built.render(told, tools=tools)
        stored = np.concatenate([stored, added])
        text = oracle.text(messages[:end], tools=tools, opened=True)
        np.testing.assert_array_equal(stored, oracle.encode(text))
        said = built.demonstrate(messages[end])
        heard = built.parse(said, tools=tools)
        for field in ("content", "reasoning_content"):
            both = [str(m.get(field) or "").strip() for m in (heard, messages[end])]
            assert both[0] == both[1]
        assert calls(heard) == calls(messages[end])
        stored, at = np.concatenate([stored, said]), end + 1


def calls(message):
    found = [call["function"] for call in message.get("tool_calls", ())]
    return [(f["name"], json.loads(f["arguments"])) for f in found]
