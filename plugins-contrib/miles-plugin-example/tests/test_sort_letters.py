"""The environment keeps its kind's contract, its rewards are right, and the observer sees its
words."""

import asyncio
import json

import pytest
from miles_plugin_example.environment import score

from miles import ConfigError, Spec
from miles.cli import main
from miles.testing import make_group, play_episode


@pytest.mark.miles_contract("environment", "sort_letters")
@pytest.mark.miles_contract("environment", "sort_letters", {"tries": 3})
def test_environment_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.fixture
def build(miles_registry, miles_context):
    def make(**config):
        spec = Spec(kind="environment", name="sort_letters", config=config)
        return miles_registry.build(spec, miles_context)

    return make


@pytest.mark.parametrize(
    ("text", "reward"), [("abc", 1.0), ("abx", 2 / 3), ("cab", 0.0), ("", 0.0), ("abcd", 0.75)]
)
def test_score_counts_letters_in_their_place(text, reward):
    assert score("abc", text) == pytest.approx(reward)


def _play(environment, *texts):
    task = environment.tasks("train")[0]
    said = [task.answer if text == "right" else text for text in texts]
    return asyncio.run(play_episode(environment, task, said))


def test_one_try_ends_after_one_answer(build):
    played = _play(build(), "right")
    assert (played.turns, played.done, played.reward) == (1, True, 1.0)
    assert played.metrics == {"tries": 1.0, "exact": 1.0}


def test_second_try_is_worth_less(build):
    played = _play(build(tries=3), "wrong", "right")
    assert (played.turns, played.done, played.reward) == (2, True, 0.5)
    assert played.metrics == {"tries": 2.0, "exact": 1.0}


def test_last_try_ends_the_episode(build):
    played = _play(build(tries=2), "", "")
    assert (played.turns, played.done, played.reward) == (2, True, 0.0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"length": 1}, "too few to draw"),
        ({"letters": ""}, "0 letters make"),
        ({"tries": 0}, "begin at 1"),
        ({"discount": 2.0}, "0 to 1"),
    ],
)
def test_environment_refuses(build, config, said):
    with pytest.raises(ConfigError, match=said):
        build(**config)


@pytest.mark.parametrize("experiment", ["sort_letters", "sort_letters_again"])
def test_experiment_passes_the_check(experiment, capsys):
    assert main(["check", f"experiment={experiment}"]) == 0, capsys.readouterr().out


def test_observer_writes_the_hardest_words(build, miles_registry, tmp_path):
    words = build().tasks("train")[:2]
    hook = miles_registry.hook
    hook.run_started(directory=str(tmp_path), config={})
    for task, rewards in zip(words, [(1.0, 1.0), (0.0, 0.5)], strict=True):
        hook.group_finished(group=make_group(0, rewards=rewards, task=task), drop=None)
    hook.group_finished(group=make_group(1), drop=None)  # another environment's
    hook.run_finished(directory=str(tmp_path), outcome="finished")
    hardest = json.loads((tmp_path / "hardest_words.json").read_text())
    assert list(hardest.items()) == [
        (words[1].id[5:], 0.25),
        (words[0].id[5:], 1.0),
    ]


def test_observer_writes_nothing_for_other_environments(miles_registry, tmp_path):
    miles_registry.hook.run_started(directory=str(tmp_path), config={})
    miles_registry.hook.group_finished(group=make_group(1), drop=None)
    miles_registry.hook.run_finished(directory=str(tmp_path), outcome="finished")
    assert not list(tmp_path.iterdir())


def test_run_trains_on_sorted_letters(tmp_path, capfd):
    short = [f"stages.{stage}.steps=2" for stage in ("sft", "grpo")]
    where = [f"run.dir={tmp_path}", "run.name=run", "tracker=[jsonl]", "evaluator.tasks=4"]
    assert main(["run", "experiment=sort_letters_again", *short, *where]) == 0, capfd.readouterr()
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert any("env/tries" in json.loads(row) for row in rows)
    assert (tmp_path / "run" / "hardest_words.json").is_file()
