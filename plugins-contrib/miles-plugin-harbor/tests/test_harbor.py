"""Trials of the real package in a sandbox of folders (Python 3.12 and later), and what needs no
Harbor everywhere."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from miles_plugin_harbor import trials
from miles_plugin_harbor.environment import _OURS, Harbor, folders
from miles_plugin_harbor.places import Places, recipe

from miles import ConfigError, EpisodeError, Sampling, Spec, Tools
from miles.testing import FakeEngine, FakeSandbox, FakeTito, fake_serve
from miles.testing import context as make_context

installed = pytest.mark.skipif(
    find_spec("harbor") is None,
    reason="the package harbor is not installed; it needs Python 3.12 or later",
)


@installed
@pytest.mark.miles_contract("environment", "harbor")
def test_environment_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.fixture
def build(miles_registry, tmp_path):
    def make(sandbox=True, **config):
        around = make_context(tmp_path, sandbox=FakeSandbox() if sandbox else None)
        return miles_registry.build(Spec(kind="environment", name="harbor", config=config), around)

    return make


@pytest.fixture(autouse=True)
def _no_price_list(monkeypatch):
    """A library of Harbor's would fetch one when it is imported."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def play(environment, script, *, split="train", into=None):
    given = Tools(
        id="g2.1",
        group=2,
        samples=1,
        seed=1,
        sampling=Sampling(),
        engine=FakeEngine(FakeEngine.Config()),
        tito=FakeTito(),
        sandbox=None,
        conversation=lambda key: pytest.fail("agents ask their session"),
        serve=fake_serve(script, into=into),
    )
    return asyncio.run(environment.play(environment.tasks(split)[0], 1, given))


@installed
def test_real_trial_is_solved_by_the_shell_agent_and_graded_by_its_tests(build, tmp_path):
    sessions = []
    script = ["<run>ls /app; wc -l < /app/words.txt</run>", "<run>echo 5 > /app/count.txt</run>"]
    trajectory = play(build(), [*script, "Done."], into=sessions)
    assert (trajectory.id, trajectory.reward, trajectory.text) == ("g2.1", 1.0, "Done.")
    assert len(trajectory.samples) == 3 and trajectory.metrics["agent_late"] == 0.0
    asked = sessions[0].requests
    assert "Count the lines" in asked[0]["messages"][-1]["content"]
    assert asked[1]["messages"][-1]["content"] == "exit code 0\nwords.txt\n5"
    assert not list((tmp_path / "harbor").glob("*"))


@installed
def test_real_trial_without_work_is_worth_nothing_and_may_be_kept(build, tmp_path):
    trajectory = play(build(keep=True, heldout=1), ["I would rather not."], split="heldout")
    assert trajectory.reward == 0.0
    (kept,) = (tmp_path / "harbor").glob("*")
    assert (kept / "result.json").is_file()


@installed
def test_agent_that_runs_out_of_turns_is_graded_and_a_slow_command_is_told(build):
    sessions = []
    environment = build(agent_options={"turns": 2, "command_s": 1})
    trajectory = play(environment, ["<run>sleep 30</run>"], into=sessions)
    assert trajectory.reward == 0.0 and len(trajectory.samples) == 2
    assert "took longer than 1 s" in sessions[0].requests[1]["messages"][-1]["content"]


@installed
def test_harbors_own_oracle_solves_the_tasks_that_come_along(tmp_path):
    session = SimpleNamespace(base_url="http://127.0.0.1:1", api_key="key", model="m")

    async def both():
        for name in ("count-lines", "sort-numbers"):
            made = replace(order("oracle", trials.SANDBOX), folder=_OURS / name, trials=tmp_path)
            yield trials.worth(await trials.run(made, session, FakeSandbox()), "reward")

    async def run():
        return [worth async for worth in both()]

    assert asyncio.run(run()) == [(1.0, {"agent_late": 0.0})] * 2


@installed
def test_task_that_needs_an_image_and_an_unknown_agent_are_refused_by_name(build, tmp_path):
    folder = tmp_path / "needs"
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        (folder / name).write_bytes((_OURS / "count-lines" / name).read_bytes())
    (folder / "environment" / "Dockerfile").write_text("FROM x\nRUN apt-get install y\n")
    with pytest.raises(EpisodeError, match=r"its Dockerfile has RUN, which needs an image"):
        play(build(path=str(folder), heldout=0), ["x"])
    with pytest.raises(EpisodeError, match=r"no trial of count-lines with agent nobody in sandbox"):
        play(build(agent="nobody"), ["x"])


@installed
def test_model_that_cannot_be_asked_is_the_trials_failure(build):
    def breaks(messages, tools):
        raise RuntimeError("gone")

    with pytest.raises(EpisodeError, match=r"RuntimeError: the model answered 500"):
        play(build(), breaks)


@installed
@pytest.mark.parametrize("agent", ["terminus-2", "mini-swe-agent", "claude-code"])
def test_configuration_for_harbors_agents_is_one_that_harbor_takes(agent, tmp_path):
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import TrialConfig

    assert agent in AgentFactory.registered_names()
    url, key = "http://127.0.0.1:1/sessions/k", "sesame-1234-sesame"
    session = SimpleNamespace(base_url=url, api_key=key, model="m")
    config = TrialConfig.model_validate(trials.configuration(order(agent, "docker"), session))
    assert (config.agent.model_name, config.agent.env["OPENAI_API_KEY"]) == ("openai/m", key)
    assert config.agent.env["ANTHROPIC_BASE_URL"] == session.base_url
    assert config.environment.type == "docker" and key not in config.model_dump_json()


def order(agent, where):
    return trials.Order(
        key="g0.0",
        task=None,
        folder=_OURS / "count-lines",
        trials=Path("trials"),
        agent=agent,
        agent_options={},
        provider="openai",
        where=where,
        where_options={},
        rooted=False,
        keep=False,
    )


def test_places_translate_a_tasks_own_folders_and_nothing_else():
    places = Places(root="/box/7")
    assert places.at("/logs/verifier/reward.txt") == "/box/7/logs/verifier/reward.txt"
    assert places.at("/usr/bin") == "/usr/bin" and places.at("relative") == "relative"
    said = 'cd /app && cat "/tests/x" > /logs/a; ls /apps /usr/app ./app /application $X/app'
    assert places.text(said) == (
        'cd /box/7/app && cat "/box/7/tests/x" > /box/7/logs/a; '
        "ls /apps /usr/app ./app /application $X/app"
    )
    assert places.text("It is in /app. Or (/tests)") == "It is in /box/7/app. Or (/box/7/tests)"
    assert places.file(b"\xff/app") == b"\xff/app"
    assert Places(root="").text(said) == said


def test_recipe_reads_what_a_box_can_do_and_names_the_rest(tmp_path):
    path = tmp_path / "Dockerfile"
    lines = ["# x", "FROM a", "WORKDIR /srv", "COPY a.txt data/", "COPY . /app", "RUN a \\", " b"]
    path.write_text("\n".join([*lines, "ENV A=1"]))
    found = recipe(path)
    assert found.workdir == "/srv" and found.refused == ("RUN", "ENV")
    assert found.copies == (("a.txt", "/srv/data"), (".", "/app"))
    assert recipe(tmp_path / "none").workdir == "/app"


def test_rewards_are_read_by_name_and_invalid_ones_refused():
    def result(rewards, error=None, valid=True):
        info = error and SimpleNamespace(exception_type="Oops", exception_message=error)
        seen = SimpleNamespace(rewards=rewards)
        return SimpleNamespace(
            verifier_result=seen, exception_info=info, reward_valid=valid, task_name="t"
        )

    assert trials.worth(result({"reward": 1, "style": 0.5}), "reward") == (
        1.0, {"style": 0.5, "agent_late": 0.0}
    )  # fmt: skip
    late = result({"score": 0.25}, "late")
    late.exception_info.exception_type = "AgentTimeoutError"
    assert trials.worth(late, "reward") == (0.25, {"agent_late": 1.0})
    with pytest.raises(EpisodeError, match=r"give no reward 'x' .*they give a, b"):
        trials.worth(result({"a": 1, "b": 2}), "x")
    for rewards, valid in (({}, False), ({"reward": 0.0}, True)):
        with pytest.raises(EpisodeError, match="trial of t has no valid reward: Oops: broken"):
            trials.worth(result(rewards, "broken", valid=valid), "reward")


def test_tasks_are_folders_and_the_last_are_held_out(tmp_path):
    found = folders(Harbor.Config())
    assert [p.name for p in found["train"]] == ["count-lines"]
    assert [p.name for p in found["heldout"]] == ["sort-numbers"]
    one = folders(Harbor.Config(path=str(_OURS / "count-lines"), heldout=0))
    assert [p.name for p in one["train"]] == ["count-lines"] and not one["heldout"]
    with pytest.raises(ConfigError, match=r"2 tasks, of which environment.heldout \(2\) leaves"):
        folders(Harbor.Config(heldout=2))
    with pytest.raises(ConfigError, match=r"is no Harbor task .task.toml., and holds none"):
        folders(Harbor.Config(path=str(tmp_path)))


@installed
def test_missing_sandbox_is_said_with_what_helps(build):
    with pytest.raises(ConfigError, match="no sandbox was chosen; add sandbox=process"):
        build(sandbox=False)


@pytest.mark.skipif(find_spec("harbor") is not None, reason="the package harbor is installed")
def test_missing_package_is_said(build):
    with pytest.raises(ConfigError, match="package harbor is not installed, which needs Python 3"):
        build()


def test_importing_the_component_imports_neither_torch_nor_the_library():
    code = (
        "import sys, miles_plugin_harbor.environment\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'harbor', 'litellm')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
