"""The environment over the real library: contract, splits, scores, and faults by name."""

import asyncio

import pytest

from miles import CheckpointError, ConfigError, Spec
from miles.testing import context as make_context
from miles.testing import play_episode


@pytest.mark.miles_contract("environment", "reasoning_gym")
def test_environment_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.fixture
def build(miles_registry, miles_context):
    def make(**config):
        spec = Spec(kind="environment", name="reasoning_gym", config=config)
        return miles_registry.build(spec, miles_context)

    return make


def score(environment, task, text):
    played = asyncio.run(play_episode(environment, task, [text]))
    return played.reward, played.metrics


def test_solution_scores_one_and_an_answer_outside_the_tag_nothing(build):
    environment = build()
    task = environment.tasks("train")[3]
    fine = {"reward_killed": 0.0, "reward_unreadable": 0.0}
    assert score(environment, task, f"let me see <answer>{task.answer}</answer>") == (1.0, fine)
    assert score(environment, task, str(task.answer))[0] < 0.1
    assert score(build(tag=""), task, f" {task.answer}\n") == (1.0, fine)


@pytest.mark.parametrize(
    "dataset", ["basic_arithmetic", "word_sorting", "countdown", "leg_counting"]
)
def test_generators_make_tasks_whose_solution_is_worth_one(build, dataset):
    environment = build(dataset=dataset, train=5, heldout=2)
    for task in environment.tasks("train")[:3]:
        assert score(environment, task, task.solution)[0] == 1.0


def test_splits_share_no_question_where_questions_are_few(build):
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = build(options=few, train=300, heldout=100)
    prompts = {
        s: {t.prompt[-1]["content"] for t in environment.tasks(s)[:]} for s in ("train", "heldout")
    }
    assert len(prompts["heldout"]) > 30
    assert prompts["train"].isdisjoint(prompts["heldout"])


def test_generator_with_fewer_questions_than_are_held_out_says_so(build):
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = build(options=few, train=1, heldout=20_000)
    with pytest.raises(ConfigError, match="chain_sum has too few questions to hold out"):
        environment.tasks("train")[0]


def test_system_message_is_the_librarys_by_name_or_the_text_itself(build):
    named, own, none = build(system="default"), build(system="Be brief."), build()
    first = [e.tasks("train")[0].prompt for e in (named, own, none)]
    assert "<answer>" in first[0][0]["content"]
    assert first[1][0] == {"role": "system", "content": "Be brief."}
    assert [m["role"] for m in first[2]] == ["user"]
    assert isinstance(build(chat=False).tasks("train")[0].prompt, str)


def test_answer_that_a_scorer_cannot_read_is_worth_nothing_and_counted(build):
    environment = build(dataset="prime_factorization", tag="", train=2, heldout=0)
    task = environment.tasks("train")[0]
    worth, metrics = score(environment, task, "seven, I think")
    assert (worth, metrics) == (0.0, {"reward_killed": 0.0, "reward_unreadable": 1.0})
    assert score(environment, task, task.answer)[0] == 1.0


def test_scorer_that_takes_too_long_is_killed_and_the_next_answer_is_scored(build):
    environment = build(dataset="puzzle24", tag="", train=2, heldout=0, timeout_s=2.0)
    task = environment.tasks("train")[0]
    assert score(environment, task, task.solution)[0] == 1.0
    slow = "9**9**9**9"
    worth, metrics = score(environment, task, slow)
    assert (worth, metrics["reward_killed"] + metrics["reward_unreadable"]) == (0.0, 1.0)
    assert score(environment, task, task.solution)[0] == 1.0


def test_task_ids_change_with_the_questions_so_that_a_resume_notices(miles_registry, tmp_path):
    def selector(**config):
        spec = Spec(kind="environment", name="reasoning_gym", config=config)
        environment = miles_registry.build(spec, make_context(tmp_path))
        spec = Spec(kind="selector", name="shuffle")
        return miles_registry.build(spec, make_context(tmp_path, environment=environment))

    state = selector(train=10).state_dict()
    with pytest.raises(CheckpointError, match="fingerprint"):
        selector(train=10, options={"min_terms": 3}).load_state_dict(state)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"dataset": "chain_sums"},
            r"no dataset 'chain_sums'; did you mean 'chain_sum'\? valid: ab, ",
        ),
        (
            {"options": {"min_term": 2}},
            r"chain_sum has no option 'min_term'; did you mean 'min_terms'\?",
        ),
        (
            {"options": {"min_terms": 5, "max_terms": 2}},
            r"chain_sum refuses options \{'min_terms': 5",
        ),
        ({"train": 0}, "train is 0, heldout 100 and timeout_s 10.0"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused(build, config, words):
    with pytest.raises(ConfigError, match=f"environment reasoning_gym: {words}"):
        build(**config)


def test_importing_the_component_imports_neither_torch_nor_the_library():
    import subprocess
    import sys

    code = (
        "import sys, miles_plugin_reasoning_gym.environment\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'reasoning_gym')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
