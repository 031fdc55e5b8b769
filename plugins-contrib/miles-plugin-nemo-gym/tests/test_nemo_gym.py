"""The environment over a resources server: a small one of our own everywhere, the package's real
ones where it is installed (Python 3.12 and later)."""

import asyncio
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from aiohttp import web
from miles_plugin_nemo_gym.serve import server_of
from miles_plugin_nemo_gym.spelling import to_items, to_messages, to_response, to_tools

from miles import ConfigError, EpisodeError, Spec
from miles.testing import play_episode, tool_call

installed = pytest.mark.skipif(
    find_spec("nemo_gym") is None,
    reason="the package nemo-gym is not installed; it needs Python 3.12 or later",
)
ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}


@pytest.fixture(scope="module", autouse=True)
def _one_server(tmp_path_factory):
    """Keeps the default server from being started by every test that asks it."""
    return server_of("mcqa", "{}", tmp_path_factory.mktemp("mcqa") / "log")


@installed
@pytest.mark.miles_contract("environment", "nemo_gym")
def test_environment_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.fixture
def build(miles_registry, miles_context):
    def make(**config):
        spec = Spec(kind="environment", name="nemo_gym", config=config)
        return miles_registry.build(spec, miles_context)

    return make


@pytest.fixture
def rows(tmp_path):
    """Three tasks of a server that adds."""
    path = tmp_path / "tasks.jsonl"
    asked = [
        {"responses_create_params": {
            "input": [{"role": "developer", "content": "Add."},
                      {"role": "user", "content": [{"type": "input_text", "text": f"{i} + 1?"}]}],
            "tools": [ADD]}, "expected": i + 1}
        for i in range(3)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return str(path)


def with_server(run, *, broken=()):
    """Run a test's coroutine beside a resources server; what was posted to it."""
    posted = []

    async def answer(request):
        body, path = await request.json(), request.path[1:]
        posted.append((path, body, dict(request.cookies)))
        if path in broken:
            return web.Response(status=500, text="out of order")
        if path == "seed_session":
            done = web.json_response({})
            done.set_cookie("session", str(body["expected"]))
            return done
        if path == "verify":
            text = body["response"]["output"][-1]["content"][0]["text"]
            right = float(str(body["expected"]) in text)
            return web.json_response({**body, "reward": right, "words": len(text.split())})
        return web.json_response({"sum": body["a"] + body["b"]})

    async def outer():
        app = web.Application()
        app.router.add_post("/{path}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await run(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(outer()), posted


def play(build, rows, replies, *, finish="stop", broken=()):
    async def run(url):
        environment = build(url=url, data=rows)
        task = environment.tasks("train")[1]
        return await play_episode(environment, task, replies, finish=finish)

    return with_server(run, broken=broken)


def test_calls_go_to_the_server_in_one_session_and_the_whole_output_is_verified(build, rows):
    played, posted = play(build, rows, [tool_call("add", "let me see", a=1, b=1), "It is 2."])
    assert [path for path, _, _ in posted] == ["seed_session", "add", "verify"]
    assert [cookies for _, _, cookies in posted] == [{}, {"session": "2"}, {"session": "2"}]
    assert [m["role"] for m in played.messages] == [
        "system", "user", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert played.messages[3]["content"] == '{"sum": 2}'
    assert played.tools[0]["function"]["name"] == "add"
    verified = posted[-1][1]["response"]["output"]
    assert [item["type"] for item in verified] == [
        "message", "function_call", "function_call_output", "message"
    ]  # fmt: skip
    assert (played.reward, played.done) == (1.0, True)
    assert played.metrics == {"words": 3.0, "calls": 1.0, "failed_calls": 0.0}


def test_call_that_cannot_be_made_is_answered_to_the_model(build, rows):
    bad = tool_call("add", a=1)
    bad["tool_calls"][0]["function"]["arguments"] = "{a: 1"
    played, _ = play(build, rows, [bad, tool_call("verify", reward=1), "2"])
    answers = [m["content"] for m in played.messages if m["role"] == "tool"]
    assert "not JSON" in answers[0] and "there is no tool 'verify'" in answers[1]
    assert (played.reward, played.metrics["failed_calls"]) == (1.0, 2.0)
    played, _ = play(build, rows, [tool_call("add", a=1, b=2), "2"], broken=("add",))
    assert [m["content"] for m in played.messages if m["role"] == "tool"] == ["out of order"]


def test_turn_that_was_cut_ends_the_attempt_as_incomplete(build, rows):
    played, posted = play(build, rows, ["It is 2 bec"], finish="length")
    assert played.done and played.reward == 1.0
    response = posted[-1][1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"


def test_server_that_fails_or_is_not_there_is_the_attempts_failure(build, rows):
    with pytest.raises(EpisodeError, match=r"verify of .*-train-1-\w+ answered 500: out of order"):
        play(build, rows, ["2"], broken=("verify",))
    environment = build(url="http://127.0.0.1:9", data=rows)
    with pytest.raises(EpisodeError, match=r"seed_session of .* failed: ClientConnectorError"):
        asyncio.run(play_episode(environment, environment.tasks("train")[0], ["x"]))


def test_last_rows_are_held_out_and_ids_change_with_their_rows(build, rows, tmp_path):
    environment = build(url="http://127.0.0.1:9", data=rows)
    train, heldout = (environment.tasks(s) for s in ("train", "heldout"))
    assert [t.prompt[-1]["content"] for t in train] == ["0 + 1?", "1 + 1?"]
    assert [t.prompt[-1]["content"] for t in heldout] == ["2 + 1?"]
    other = tmp_path / "other.jsonl"
    other.write_text(Path(rows).read_text().replace('"expected": 1', '"expected": 7'))
    changed = build(url="http://127.0.0.1:9", data=str(other), heldout_data=rows)
    assert changed.tasks("train")[0].id != train[0].id and len(changed.tasks("heldout")) == 3


def test_spellings_carry_history_calls_and_reasoning():
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = to_messages(items, "here")
    assert messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    said = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    assert [i["type"] for i in to_items(said, 0, finished=True)] == ["reasoning", "function_call"]
    with pytest.raises(ConfigError, match="here: content holds 'input_image'"):
        to_messages([{"role": "user", "content": [{"type": "input_image"}]}], "here")
    with pytest.raises(ConfigError, match="here: a tool is 'web_search'; functions alone"):
        to_tools([{"type": "web_search"}], "here")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"url": "http://x"}, "comes without tasks; give them in data"),
        ({"url": "x:8000", "data": "y"}, "begins with neither http:// nor https"),
        ({"url": "http://x", "data": "/no/such.jsonl"}, "there is no file /no/such.jsonl"),
        ({"heldout": -1}, "heldout is -1"),
        ({"url": "http://x", "data": "ROWS", "heldout": 3}, "3 rows, of which .* leaves none"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused(build, rows, config, words):
    if config.get("data") == "ROWS":
        config = {**config, "data": rows}
    with pytest.raises(ConfigError, match=f"environment nemo_gym: .*{words}"):
        build(**config)


def test_line_that_is_no_task_is_named(build, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"responses_create_params": {"input": "hi"}}\n{"prompt": 1}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl line 2 is no task: KeyError"):
        build(url="http://x", data=str(path))


@pytest.mark.skipif(find_spec("nemo_gym") is not None, reason="the package nemo-gym is installed")
def test_missing_package_is_said_with_what_helps(build):
    with pytest.raises(ConfigError, match=r"needs Python 3.12.*reached by environment.url"):
        build()


@installed
def test_real_question_is_verified_by_its_real_server(build):
    environment = build()
    task = environment.tasks("train")[0]
    expected = environment._rows["train"][0]["expected_answer"]

    async def both():
        right = await play_episode(environment, task, [f"so \\boxed{{{expected}}}"])
        wrong = await play_episode(environment, task, ["no idea"])
        return right.reward, wrong.reward

    assert asyncio.run(both()) == (1.0, 0.0)


@installed
def test_real_server_of_several_steps_answers_calls(build):
    environment = build(server="example_multi_step")
    task = environment.tasks("train")[0]
    row = environment._rows["train"][0]
    asked = [tool_call("get_synonym_value", synonym=s) for s in row["expected_synonyms"]]
    last = tool_call("extract_synonym_values", synonym_values=row["expected_synonym_values"])
    played = asyncio.run(play_episode(environment, task, [*asked, last, "done"]))
    values = [json.loads(m["content"]) for m in played.messages if m["role"] == "tool"][:-1]
    assert [v["synonym_value"] for v in values] == row["expected_synonym_values"]
    assert (played.reward, played.metrics["set_overlap"]) == (1.0, 1.0)


@installed
def test_response_is_one_that_the_package_accepts():
    from nemo_gym.openai_utils import NeMoGymResponse

    said = {**tool_call("f", "text", a=1), "reasoning_content": "hm"}
    output = to_items(said, 0, finished=True)
    found = NeMoGymResponse.model_validate(to_response(output, {"tools": [ADD]}, truncated=True))
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]


@installed
def test_unknown_server_is_refused(build):
    with pytest.raises(ConfigError, match=re.escape("no resources server 'no_such'")):
        build(server="no_such")


def test_importing_the_component_imports_neither_torch_nor_the_library():
    code = (
        "import sys, miles_plugin_nemo_gym.environment\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'nemo_gym', 'ray')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
