"""The environment over real OpenEnv servers: contract, each way of speaking, faults by name."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from miles_plugin_openenv.serve import server_of

from miles import ChildServer, ConfigError, EpisodeError, Spec
from miles.testing import play_episode, tool_call

PACKAGES = str(Path(__file__).parent / "packages")


@pytest.mark.miles_contract("environment", "openenv", {"train": 4, "heldout": 2})
def test_environment_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.fixture(scope="module", autouse=True)
def served(tmp_path_factory):
    """One server of the guessing game for all of this file, the contract's checks included."""
    log = tmp_path_factory.mktemp("guess") / "log"
    return server_of("miles_plugin_openenv.guess", log)


@pytest.fixture
def build(miles_registry, miles_context, monkeypatch):
    monkeypatch.syspath_prepend(PACKAGES)
    monkeypatch.setenv("PYTHONPATH", PACKAGES)

    def make(**config):
        if isinstance(server := config.get("url"), ChildServer):
            monkeypatch.setenv("GUESS_TOKEN", server.headers["Authorization"].split()[1])
            config |= {"url": server.url(), "token_variable": "GUESS_TOKEN"}
        spec = Spec(kind="environment", name="openenv", config=config)
        return miles_registry.build(spec, miles_context)

    return make


def play(environment, replies, *, task=0):
    return asyncio.run(play_episode(environment, environment.tasks("train")[task], replies))


def halving():
    bounds = [1, 9]

    def reply(messages):
        heard = messages[-1]["content"]
        if "than" in heard:
            guess = int(heard.rstrip(".").split()[-1])
            bounds[:] = [guess + 1, bounds[1]] if "higher" in heard else [bounds[0], guess - 1]
        return f"My guess is {sum(bounds) // 2}"

    return reply


def test_real_task_is_solved_over_a_session_of_a_server_elsewhere(build, served):
    environment = build(url=served, instruction="Be quick.")
    for task in range(4):
        played = play(environment, halving(), task=task)
        assert played.done and played.metrics["finished"] == 1.0
        assert played.reward == pytest.approx(0.7 + 0.1 * (4 - played.turns))
    assert [m["role"] for m in played.messages[:2]] == ["system", "user"]
    assert played.messages[1]["content"].startswith("I think of a number from 1 to 9")
    lost = play(environment, ["none", "nope", "no", "0"])
    assert (lost.reward, lost.done) == (0.0, True)
    assert lost.messages[3]["content"] == "That is no number."


def test_attempts_at_a_task_begin_alike_and_tasks_differ(build, served):
    environment = build(url=served)
    said = ["1", "2", "3", "4"]
    ends = [play(environment, said, task=t).messages[-1]["content"] for t in (0, 0, 1, 2, 3, 4)]
    assert ends[0] == ends[1] and len(set(ends)) > 1


def test_json_actions_are_taken_from_the_reply_and_others_are_refused(build, served):
    environment = build(url=served, speak="json")
    replies = ["no braces", 'so: {"message": "0"}!', '{"words": "0"}', "{broken}"]
    played = play(environment, replies)
    heard = [m["content"] for m in played.messages if m["role"] == "user"]
    assert "one JSON object" in heard[1] and heard[2] == "It is higher than 0."
    assert "does not accept" in heard[3]
    assert played.metrics["refused_actions"] == 3.0 and played.metrics["steps"] == 1.0


def test_tools_of_the_environment_are_offered_and_called(build):
    environment = build(package="calculator", speak="tools", train=2, heldout=0)
    played = play(environment, [tool_call("add", a=2, b=3), "It is 5."])
    function = played.tools[0]["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert set(function["parameters"]["properties"]) == {"a", "b"}
    answer = next(m for m in played.messages if m["role"] == "tool")
    assert (answer["content"], answer["tool_call_id"]) == ("5", "call_add")
    assert played.reward == 1.0 and played.turns == 2
    wrong = play(environment, [tool_call("subtract", a=2), "sorry"])
    assert wrong.reward == 0.0
    assert "subtract" in next(m for m in wrong.messages if m["role"] == "tool")["content"]


def test_attempts_wait_for_a_session_and_say_so_when_none_is_free(build, served):
    environment = build(url=served, sessions=1, wait_s=0.2)
    task = environment.tasks("train")[0]

    async def run():
        first, second = environment.episode(task, 0), environment.episode(task, 1)
        await first.reset()
        with pytest.raises(EpisodeError, match=r"no session of .* was free within 0.2 s; 1 are"):
            await second.reset()
        await first.close()
        third = environment.episode(task, 2)
        await third.reset()
        await third.close()

    asyncio.run(run())


def test_server_that_prints_more_than_a_pipe_holds_still_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PACKAGES)
    server = server_of("talks", tmp_path / "log")
    url = server.url()

    async def ask():
        limit = aiohttp.ClientTimeout(total=20)
        async with aiohttp.ClientSession(headers=server.headers, timeout=limit) as client:
            for _ in range(3):
                async with client.get(url) as got:
                    assert got.status == 200

    asyncio.run(ask())
    assert (tmp_path / "log").read_text().startswith("loading")


def test_server_answers_its_token_alone_and_ends_with_its_owner(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from miles_plugin_openenv.serve import server_of\n"
        "server = server_of('plain', Path(sys.argv[1]))\n"
        "print(server.url(), server._running[0].pid, server.headers['Authorization'], flush=True)\n"
        "time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGES},
    )
    url, child, *token = owner.stdout.readline().split()
    token = " ".join(token)

    async def status(**headers):
        async with aiohttp.ClientSession(headers=headers) as client, client.get(url) as got:
            return got.status

    assert asyncio.run(status()) == asyncio.run(status(Authorization="Bearer x")) == 401
    assert asyncio.run(status(Authorization=token)) == 200
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 20
    while _alive(int(child)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(int(child))


def _alive(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_server_that_does_not_start_says_why(build):
    with pytest.raises(EpisodeError, match=r"(?s)server of breaks did not start.*no luck today"):
        play(build(package="breaks", train=1), ["x"])


def test_server_that_is_not_there_is_named(build):
    with pytest.raises(EpisodeError, match=r"http://127.0.0.1:9 cannot be reached"):
        play(build(url="http://127.0.0.1:9"), ["x"])


def test_field_that_is_not_there_is_named_with_those_that_are(build, served):
    with pytest.raises(EpisodeError, match=r"no field 'board' to show.*it has .*text"):
        play(build(url=served, observation="board"), ["1"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"url": "localhost:8000"}, "begins with none of http, https, ws, wss"),
        ({"package": "no_such.package"}, "package 'no_such.package' is not installed"),
        ({"package": "json"}, "has no server/app.py"),
        ({"url": "http://x", "token_variable": "NOT_SET"}, "NOT_SET .token_variable. is not set"),
        ({"sessions": 0}, "sessions is 0"),
        ({"heldout": -1}, "heldout is -1"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused(build, config, words):
    with pytest.raises(ConfigError, match=f"environment openenv: .*{words}"):
        build(**config)


def test_importing_the_component_imports_neither_torch_nor_the_library():
    code = (
        "import sys, miles_plugin_openenv.environment\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'openenv', 'fastapi')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
