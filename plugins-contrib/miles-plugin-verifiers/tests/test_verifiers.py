"""The environment over the real library: contract, each kind of environment, faults by name."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from miles import ConfigError, EpisodeError, Sampling, Spec, Tools
from miles.testing import FakeEngine, FakeTito, fake_serve, tool_call


@pytest.mark.miles_contract("environment", "verifiers")
def test_environment_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.fixture(autouse=True)
def _some_envs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def build(miles_registry, miles_context):
    def make(kind=None, **config):
        if kind:
            config = {"id": "some-envs", "heldout": 2, "arguments": {"kind": kind}} | config
        spec = Spec(kind="environment", name="verifiers", config=config)
        return miles_registry.build(spec, miles_context)

    return make


def tools(script, *, samples=1, into=None):
    tito = FakeTito()
    return Tools(
        id="g3" if samples > 1 else "g3.0",
        group=3,
        samples=samples,
        seed=1,
        sampling=Sampling(max_new_tokens=9, temperature=0.7, top_k=5),
        engine=FakeEngine(FakeEngine.Config()),
        tito=tito,
        sandbox=None,
        conversation=lambda key: pytest.fail("it asks its session, not a conversation"),
        serve=fake_serve(script, tito=tito, into=into),
    )


def play(environment, script, *, task=3, into=None):
    task = environment.tasks("train")[task]
    return asyncio.run(environment.play(task, 1, tools(script, into=into)))


def test_single_turn_is_asked_as_the_run_samples_and_scored_by_its_rubric(build):
    sessions = []
    environment = build()
    trajectory = play(environment, ["nothing of the kind"], into=sessions)
    assert (trajectory.id, trajectory.reward, trajectory.text) == (
        "g3.0", 0.0, "nothing of the kind"
    )  # fmt: skip
    body = sessions[0].requests[0]
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    sampled = {k: body[k] for k in ("max_completion_tokens", "temperature", "top_p", "top_k")}
    assert sampled == {"max_completion_tokens": 9, "temperature": 0.7, "top_p": 1.0, "top_k": 5}

    def reverse(messages, offered):
        return " ".join(reversed(messages[-1]["content"].split()))

    trajectory = play(environment, reverse)
    assert trajectory.reward == 1.0 and trajectory.metrics["in_place"] == 1.0
    assert trajectory.metrics["num_turns"] == 1.0 and len(trajectory.samples) == 1


def test_tools_are_offered_called_and_answered_by_the_library(build):
    sessions = []
    script = [tool_call("add", a=3, b=3), "It is 6."]
    trajectory = play(build("tool"), script, into=sessions)
    first, second = sessions[0].requests
    assert first["tools"][0]["function"]["name"] == "add"
    assert second["messages"][-1] == {
        "role": "tool", "content": "6", "tool_call_id": "call_add"
    }  # fmt: skip
    assert trajectory.reward == 1.0
    assert trajectory.metrics["total_tool_calls"] == trajectory.metrics["add_calls"] == 1.0


def test_several_turns_go_through_one_session(build):
    sessions = []
    trajectory = play(build("twice"), ["5", "no, 6"], into=sessions)
    assert len(sessions) == 1 and len(trajectory.samples) == 2 and trajectory.reward == 1.0
    assert [m["content"] for m in sessions[0].requests[1]["messages"]] == [
        "3 + 3?", "5", "Are you sure?"
    ]  # fmt: skip


def test_real_task_of_the_library_is_solved(build):
    pytest.importorskip("reasoning_gym")
    environment = build("gym")
    task = environment.tasks("train")[0]
    assert len(environment.tasks("train")) == 6 and len(environment.tasks("heldout")) == 3
    problem = re.search(r"[\d(][\d+\-*/ ().]*", task.prompt[-1]["content"])[0].strip(" .=")
    answer = eval(problem, {"__builtins__": {}})
    script = [f"<think>so</think><answer>{answer}</answer>"]
    assert play(environment, script, task=0).reward >= 1.0
    assert play(environment, ["<answer>never</answer>"], task=0).reward < 0.5


def test_rubric_of_groups_is_given_the_group(build):
    environment = build("group")
    task = environment.tasks("train")[0]
    said = iter(["much longer", "short", "a little longer"])
    given = tools(lambda messages, offered: next(said), samples=3)
    group = asyncio.run(environment.rollout(task, given))
    assert (group.id, [t.id for t in group.trajectories]) == (3, ["g3.0", "g3.1", "g3.2"])
    by_text = {t.text: t.reward for t in group.trajectories}
    assert by_text == {"much longer": 0.0, "short": 1.0, "a little longer": 0.0}
    assert not hasattr(build("single"), "rollout")

    def breaks(messages, offered):
        raise RuntimeError("the engine is gone")

    with pytest.raises(EpisodeError, match="failed on row 0"):
        asyncio.run(environment.rollout(task, tools(breaks, samples=3)))


def test_silence_is_worth_what_the_rubric_says_and_counted(build):
    trajectory = play(build("single"), [""])
    assert (trajectory.reward, trajectory.metrics["no_reply"]) == (0.0, 1.0)


def test_fault_of_the_environment_or_of_the_way_to_the_model_is_the_attempts(build):
    with pytest.raises(EpisodeError, match=r"'some-envs' failed on row 3: KeyError: 'lost'"):
        play(build("broken"), ["a"])

    def breaks(messages, offered):
        raise RuntimeError("the engine is gone")

    with pytest.raises(EpisodeError, match=r"failed on row 3: ModelError.*InternalServerError"):
        play(build("single"), breaks)


def test_last_rows_are_held_out_where_there_is_no_evaluation_set(build):
    environment = build("single")
    train, heldout = (environment.tasks(s) for s in ("train", "heldout"))
    assert [t.answer for t in train] == ["0", "2", "4", "6", "8", "10"]
    assert [t.answer for t in heldout] == ["12", "14"]
    assert json.loads(json.dumps(train[1].data)) == {"split": "train", "index": 1}


def test_signals_stay_the_runs_and_a_thread_may_build(build):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    build("single")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(build, "single").result().tasks("train")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        (None, {"id": "no-such-env"}, r"'no-such-env' cannot be loaded.*Ensure the package"),
        ("single", {"arguments": {"colour": 1}}, r"arguments \{'colour': 1\}.*unexpected keyword"),
        ("single", {"heldout": 8}, r"has 8 rows, of which environment.heldout \(8\) leaves none"),
        ("evaluation", {}, "has an evaluation set but no training rows"),
        ("single", {"timeout_s": 0.0}, "heldout is 2 and timeout_s 0.0"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused(build, kind, config, words):
    with pytest.raises(ConfigError, match=f"environment verifiers: .*{words}"):
        build(kind, **config)


def test_importing_the_component_imports_neither_torch_nor_the_library():
    code = (
        "import sys, miles_plugin_verifiers.environment\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'verifiers', 'openai', 'datasets')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
