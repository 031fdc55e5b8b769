"""Black-box agents: told where the model is, graded, stopped with their children, replayed."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles import ConfigError, Context, EpisodeError, EpisodeTimeout, Sampling, Settings, Tools
from miles.session.conversation import SessionConversation
from miles.testing import FakeEngine, fake_serve, tool_call
from miles_plugins.engine.demonstration import Demonstration
from miles_plugins.environment.harness import Harness
from miles_plugins.environment.harness.openai_agent import answer, calculate, solve
from miles_plugins.tito.bytes import Bytes

HERE = Path(".")
TITO = Bytes(Bytes.Config(), Context(directory=HERE))
CALL = tool_call("python", code="20+3")


def make(function=None, **config):
    agents = {"mine": function} if function else {}
    if function:
        config = {"agent": "mine", **config}
    return Harness(Harness.Config(**config), Context(directory=HERE, agents=agents))


def play(environment, script, task=None, engine=None):
    task = task or environment.tasks("train")[0]
    engine = engine or FakeEngine(FakeEngine.Config())
    serve = fake_serve(script, tito=TITO)
    sampling = Sampling(max_new_tokens=64)
    tools = Tools(
        id="g0.0", group=0, samples=1, seed=1, sampling=sampling, engine=engine, tito=TITO,
        sandbox=None, serve=serve,
        conversation=lambda key: SessionConversation(
            key=key, tito=TITO, engine=engine, sampling=sampling, seed=1, solution=task.solution
        ),
    )  # fmt: skip
    return asyncio.run(environment.play(task, 1, tools))


def python(source, *more):
    return (sys.executable, "-c", source, *more)


# ---------------------------------------------------------------- functions


def test_openai_client_code_calls_its_tool_and_answers():
    environment = make(solve)
    task = environment.tasks("train")[0]
    asked = []

    def script(messages, tools):
        asked.append((messages, tools))
        if messages[-1]["role"] == "tool":
            return messages[-1]["content"]
        return tool_call("python", code=task.id)

    done = play(environment, script, task)
    assert done.reward == 1.0
    assert done.metrics["tools/calls"] == 1 and done.metrics["tools/errors"] == 0
    assert done.metrics["turns"] == 2 and done.metrics["agent/failed"] == 0
    (first, offered), (second, _) = asked
    assert [m["content"] for m in first] == [task.id]
    assert [t["function"]["name"] for t in offered] == ["python"]
    assert [m["role"] for m in second] == ["user", "assistant", "tool"]


def test_function_is_told_address_key_model_and_task_but_not_the_answer():
    seen = {}

    async def agent(task, **given):
        seen.update(given, task=task)
        await solve(task, **given)
        return 0.25, {"steps": 3.0}

    environment = make(agent, system="Be brief.")
    done = play(environment, ["1"])
    assert (done.reward, done.metrics["steps"]) == (0.25, 3.0)
    assert set(seen) == {"task", "base_url", "api_key", "model"}
    assert seen["base_url"].startswith("http://127.0.0.1:")
    assert set(seen["task"]) == {"id", "prompt", "tools", "data"}
    assert seen["task"]["prompt"][0] == {"role": "system", "content": "Be brief."}


def test_function_that_raises_is_a_value_with_its_words():
    async def agent(task, **given):
        raise KeyError("lost")

    with pytest.raises(EpisodeError, match="agent 'mine' raised KeyError: 'lost'"):
        play(make(agent), ["1"])


def test_function_that_takes_too_long_is_cancelled():
    ended = []

    async def agent(task, **given):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(EpisodeTimeout, match=r"longer than 0\.2 s and was stopped"):
        play(make(agent, timeout_s=0.2), ["1"])
    assert ended


def test_agent_that_asks_nothing_is_an_error():
    async def agent(task, **given):
        return 1.0

    with pytest.raises(EpisodeError, match="asked nothing"):
        play(make(agent), ["1"])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('{"code": "20+3*2"}', "26"),
        ('{"code": "-(4-9)"}', "5"),
        ('{"code": "2**9"}', "error: ValueError: only whole numbers"),
        ('{"code": "__import__(\'os\')"}', "error: ValueError: only whole numbers"),
        ('{"code": "1+"}', "error: SyntaxError"),
        ('{"code": 3}', "error: TypeError"),
        ("[", "error: JSONDecodeError"),
        ("{}", "error: KeyError: 'code'"),
        (json.dumps({"code": "1" * 999}), "error: ValueError: the expression is too long"),
    ],
)
def test_calculator_of_the_client_runs_arithmetic_and_nothing_else(code, said):
    assert answer(code).startswith(said)


def test_calculator_takes_no_booleans():
    with pytest.raises(ValueError, match="only whole numbers"):
        calculate("True+1")


# ---------------------------------------------------------------- commands

ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"model": os.environ["MILES_MODEL"], "messages": task["prompt"]}).encode()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print("thinking")
print(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]["content"])
"""


def test_command_is_graded_by_its_last_line():
    environment = make(command=python(ASK))
    task = environment.tasks("train")[0]
    assert play(environment, [task.answer], task).reward == 1.0
    assert play(environment, ["no"], task).reward == 0.0


def test_command_is_graded_by_its_exit_code():
    good = make(command=python(ASK + "\nsys.exit(int(sys.argv[1]))", "0"), reward="exit_code")
    assert play(good, ["x"]).reward == 1.0
    bad = make(command=python(ASK + "\nsys.exit(int(sys.argv[1]))", "3"), reward="exit_code")
    done = play(bad, ["x"])
    assert (done.reward, done.metrics["agent/failed"]) == (0.0, 1.0)


@pytest.mark.slow
def test_client_script_runs_as_a_command():
    environment = make(
        command=(sys.executable, "-m", "miles_plugins.environment.harness.openai_agent")
    )
    task = environment.tasks("train")[0]
    assert play(environment, [CALL, task.answer], task).reward == 1.0


def test_command_line_environment_and_task_file_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    out = tmp_path / "told.json"
    source = ASK + (
        "\nfile = json.load(open(sys.argv[2]))"
        "\njson.dump([sys.argv[1:], dict(os.environ), file == task, os.getcwd(), os.listdir()],"
        " open(os.environ['OUT'], 'w'))"
    )
    command = python(source, "--url={base_url}/v1", "{task_file}", "{model}", "{other}")
    play(
        make(command=command, env={"OUT": str(out), "WHERE": "{base_url}", "KEY": "{api_key}"}),
        ["x"],
    )
    argv, env, same, cwd, names = json.loads(out.read_text())
    assert argv[0] == f"--url={env['OPENAI_BASE_URL']}"
    assert argv[2:] == ["fake", "{other}"]
    assert same and names == []
    assert not Path(cwd).exists() and not Path(argv[1]).exists()  # gone with the attempt
    assert env["ANTHROPIC_BASE_URL"] == env["MILES_BASE_URL"] == env["WHERE"]
    assert env["ANTHROPIC_API_KEY"] == env["OPENAI_API_KEY"] == env["MILES_API_KEY"] == env["KEY"]
    assert env["KEY"] not in str(argv)
    assert "SECRET_OF_MINE" not in env and env["PATH"] == os.environ["PATH"]


def test_command_that_fails_before_it_asks_says_why():
    environment = make(command=python("import sys; sys.exit('no such module')"))
    with pytest.raises(EpisodeError) as caught:
        play(environment, ["x"])
    assert "the agent exited with 1: no such module" in caught.value.detail


def test_command_that_is_not_there_says_so():
    with pytest.raises(EpisodeError) as caught:
        play(make(command=("no-such-agent",)), ["x"])
    assert "exited with 127: no-such-agent: No such file" in caught.value.detail


def test_check_refuses_a_program_that_is_nowhere(tmp_path, monkeypatch):
    def faults(*command, **config):
        return Harness.check(Harness.Config(command=command, **config), None)

    assert "there is no program 'no-such-program'" in faults("no-such-program")[0]
    assert "there is no program './agent.sh'" in faults("./agent.sh", cwd=str(tmp_path))[0]
    (tmp_path / "agent.sh").write_text("#!/bin/sh\n")
    (tmp_path / "agent.sh").chmod(0o755)
    assert not faults("./agent.sh", cwd=str(tmp_path))
    assert not faults("agent.sh", env={"PATH": str(tmp_path)})
    assert not faults(sys.executable) and not faults("{task_file}") and not faults()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not faults("agent.sh") and faults("agent.sh", pass_env=())


def test_check_warns_of_a_script_that_an_empty_folder_does_not_have(tmp_path, monkeypatch):
    def warnings(*command, **config):
        planned = SimpleNamespace(settings=Settings(max_new_tokens=96))
        return Harness.warnings(Harness.Config(command=command, **config), planned)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()
    said = warnings("python3", "agent.py", "--url", "{base_url}")
    assert "'agent.py' is a file here" in said[0] and "environment.cwd=." in said[0]
    assert not warnings("python3", "agent.py", cwd=".")
    assert not warnings("python3", str(tmp_path / "agent.py")) and not warnings("python3")


def test_endless_output_is_kept_to_its_end():
    source = ASK + "\nfor _ in range(200): print('y' * 9999)\nprint(42)"
    environment = make(command=python(source), reward="regex", pattern="^(42)$")
    assert play(environment, ["x"]).reward == 0.0  # the last line is 42, the answer another


# ---------------------------------------------------------------- stopped with its children

FAMILY = """
import os, subprocess, sys, time
note = "import os,sys,time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(99)"
subprocess.Popen([sys.executable, "-c", note, sys.argv[1]], start_new_session=True)
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "a").write(f"{os.getpid()} ")
    time.sleep(99)
open(sys.argv[1], "a").write(f"{os.getpid()} ")
"""


def running(file, count):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pids = file.read_text().split() if file.exists() else []
        if len(pids) >= count:
            return [int(p) for p in pids]
        time.sleep(0.02)
    raise AssertionError(f"only {pids} came up")


def alive(pids, within):
    deadline = time.monotonic() + within
    while True:
        left = []
        for pid in pids:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z":
                left.append(pid)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


@pytest.mark.slow
def test_timeout_stops_the_agent_and_its_daemons(tmp_path):
    file = tmp_path / "pids"
    environment = make(command=python(FAMILY + "time.sleep(99)", str(file)), timeout_s=3.0)
    with pytest.raises(EpisodeTimeout):
        play(environment, ["x"])
    assert alive(running(file, 3), within=5) == []


def test_agent_that_ends_leaves_nothing_behind(tmp_path):
    file = tmp_path / "pids"
    play(make(command=python(FAMILY + "\ntime.sleep(1.5)\n" + ASK, str(file))), ["x"])
    assert alive(running(file, 3), within=5) == []


def test_agent_dies_with_a_killed_parent(tmp_path):
    file = tmp_path / "pids"
    source = (
        "import asyncio, os, sys\n"
        "from miles_plugins.environment.harness.commands import run_command\n"
        "asyncio.run(run_command(sys.argv[1:], env=dict(os.environ), cwd='/', stdin=b''))\n"
    )
    agent = python(FAMILY + "time.sleep(99)", str(file))
    parent = subprocess.Popen([sys.executable, "-c", source, *agent])
    pids = running(file, 3)
    assert sorted(alive(pids, within=0)) == sorted(pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert alive(pids, within=10) == []


# ---------------------------------------------------------------- demonstrations


def test_demonstrations_are_replayed_without_the_agent_and_that_is_said_once(caplog):
    async def agent(task, **given):
        raise AssertionError("started")

    environment = make(agent)
    engine = Demonstration(Demonstration.Config(), Context(directory=HERE))
    asyncio.run(engine.load(0, ()))
    with caplog.at_level(logging.WARNING):
        for task in environment.tasks("train")[:3]:
            done = play(environment, ["x"], task, engine)
            (sample,) = done.samples
            assert done.reward == 1.0
            text = TITO.decode(sample.tokens)
            assert text.startswith("<|im_start|>system\nTools:\npython(code: string)")
            assert text.count("<|im_start|>assistant") == len(task.solution) // 2 + 1
            assert text.endswith(f"assistant\n{task.answer}<|im_end|>")
    assert len([r for r in caplog.records if "the agent is not started" in r.message]) == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "neither `agent` nor `command` is given"),
        ({"agent": "your"}, "there is no agent 'your'"),
        ({"command": ("x",), "timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"command": ("x",), "cwd": "/no/such"}, "cwd: there is no folder '/no/such'"),
        ({"command": ("x",), "reward": "exakt"}, "no reward 'exakt'"),
        ({"command": ("x", "--key={api_key}")}, r"command: \{api_key\} in an argument.*`ps`"),
    ],
)
def test_configuration_that_makes_no_sense_is_refused(config, words):
    with pytest.raises(ConfigError, match=f"environment harness: {words}"):
        make(**config)


def test_exit_code_of_a_function_is_refused():
    with pytest.raises(ConfigError, match="reward is 'exit_code', but no command is given"):
        make(solve, reward="exit_code")
