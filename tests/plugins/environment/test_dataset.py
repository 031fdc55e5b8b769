"""Dataset: rows become tasks, and every fault of a file is named with its place."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles import ConfigError, Context, EpisodeError, EpisodeTimeout
from miles.testing import play_episode
from miles_plugins.environment.dataset import Dataset

pytest.importorskip("datasets")

ROWS = [{"prompt": f"q{i}", "answer": str(i)} for i in range(100)]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """The library keeps what it read in a cache; a test's goes with the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def make(rewards=None, **config):
    context = Context(directory=Path("."), rewards=rewards or {})
    return Dataset(Dataset.Config(**config), context)


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def score(environment, task, text):
    played = asyncio.run(play_episode(environment, task, [text]))
    return played.reward, played.metrics


def test_rows_become_tasks_and_the_hash_splits_them(tmp_path):
    environment = make(path=write(tmp_path / "a.jsonl", ROWS), heldout_fraction=0.2)
    train, heldout = environment.tasks("train"), environment.tasks("heldout")
    assert len(train) + len(heldout) == 100
    assert 5 < len(heldout) < 40
    assert {t.id for t in train}.isdisjoint(t.id for t in heldout)
    by_id = {t.id: t for t in [*train[:], *heldout[:]]}
    task = by_id["row-7"]
    assert task.prompt == ({"role": "user", "content": "q6"},)
    assert (task.answer, task.solution) == ("6", None)
    assert train[-1] == train[len(train) - 1]


def test_a_prompt_twice_is_on_one_side_of_the_split(tmp_path):
    rows = [{"prompt": f"q{i % 50}", "answer": str(i)} for i in range(100)]
    environment = make(path=write(tmp_path / "a.jsonl", rows), heldout_fraction=0.3)
    prompts = [{str(t.prompt) for t in environment.tasks(s)} for s in ("train", "heldout")]
    assert prompts[0]
    assert prompts[1]
    assert prompts[0].isdisjoint(prompts[1])


def test_parquet_folder_glob_and_held_out_file_with_own_columns(tmp_path):
    import datasets

    rows = [
        {"q": [{"role": "user", "content": f"q{i}"}], "gold": i, "how": f"is {i}", "key": f"k{i}"}
        for i in range(10)
    ]
    (tmp_path / "train").mkdir()
    datasets.Dataset.from_list(rows[:4]).to_parquet(tmp_path / "train" / "1.parquet")
    datasets.Dataset.from_list(rows[4:8]).to_parquet(tmp_path / "train" / "2.parquet")
    datasets.Dataset.from_list(rows[8:]).to_parquet(tmp_path / "test.parquet")
    columns = {
        "prompt": "q",
        "answer": "gold",
        "solution": "how",
        "id": "key",
        "system": "Be brief.",
    }
    for path in (tmp_path / "train", tmp_path / "train" / "*.parquet"):
        environment = make(
            path=str(path), heldout_path=str(tmp_path / "test.parquet"), limit=6, **columns
        )
        assert [t.id for t in environment.tasks("train")] == [f"k{i}" for i in range(6)]
        assert [t.id for t in environment.tasks("heldout")] == ["k8", "k9"]
    task = environment.tasks("train")[5]
    assert task.prompt == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q5"},
    )
    assert (task.answer, task.solution) == (5, "is 5")


def test_messages_lose_the_nulls_that_a_common_schema_gives_them(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "answer": "1"},
        {
            "prompt": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "b", "name": "x"},
            ],
            "answer": "2",
        },
    ]
    environment = make(path=write(tmp_path / "a.jsonl", rows), heldout_fraction=0.0, system="S")
    first, second = environment.tasks("train")
    assert first.prompt[1] == {"role": "user", "content": "a"}
    assert second.prompt[0] == {"role": "system", "content": "s"}


def test_text_prompts_can_stay_text(tmp_path):
    environment = make(path=write(tmp_path / "a.jsonl", ROWS), chat=False, heldout_fraction=0.0)
    assert environment.tasks("train")[0].prompt == "q0"


def test_reading_the_driver_needs_no_torch(tmp_path):
    import subprocess

    code = (
        "import sys; from pathlib import Path; from miles import Context\n"
        "from miles_plugins.environment.dataset import Dataset\n"
        f"d = Dataset(Dataset.Config(path={write(tmp_path / 'a.jsonl', ROWS)!r}), "
        "Context(directory=Path('.')))\n"
        "d.tasks('train')[0]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("config", "text", "worth"),
    [
        ({"reward": "exact"}, "6", 1.0),
        ({"reward": "exact"}, "it is 6", 0.0),
        ({"reward": "numeric"}, "it is 6.0", 1.0),
        ({"reward": "regex", "pattern": r"is (\d+)"}, "it is 6", 1.0),
        ({"reward": "math"}, "so $\\frac{12}{2}$", 1.0),
    ],
)
def test_reward_by_name(tmp_path, config, text, worth):
    environment = make(path=write(tmp_path / "a.jsonl", ROWS), heldout_fraction=0.0, **config)
    assert score(environment, environment.tasks("train")[6], text)[0] == worth


def test_reward_of_a_plugin_plain_or_asynchronous(tmp_path):
    async def patient(text, task):
        await asyncio.sleep(0)
        return 0.5, {"seen": len(text)}

    rewards = {"plain": lambda text, task: float(text == task.answer), "patient": patient}
    path = write(tmp_path / "a.jsonl", ROWS)
    plain = make(rewards, path=path, reward="plain")
    assert score(plain, plain.tasks("train")[0], "0") == (1.0, {})
    patient_one = make(rewards, path=path, reward="patient")
    assert score(patient_one, patient_one.tasks("train")[0], "abc") == (0.5, {"seen": 3})


@pytest.mark.parametrize("value", [None, float("nan"), [1.0, 2.0]])
def test_reward_that_is_no_number_names_the_environment(tmp_path, value):
    environment = make(
        {"odd": lambda text, task: value}, path=write(tmp_path / "a.jsonl", ROWS), reward="odd"
    )
    with pytest.raises(EpisodeError, match=r"^environment 'dataset': reward is "):
        score(environment, environment.tasks("train")[0], "x")


def test_reward_that_takes_too_long_is_a_timeout(tmp_path):
    def sleepy(text, task):
        time.sleep(0.5)
        return 1.0

    environment = make(
        {"sleepy": sleepy},
        path=write(tmp_path / "a.jsonl", ROWS),
        reward="sleepy",
        reward_timeout_s=0.05,
    )
    with pytest.raises(EpisodeTimeout, match=r"reward 'sleepy' took longer than 0\.05 s"):
        score(environment, environment.tasks("train")[0], "x")


def test_reward_that_never_ends_holds_up_neither_the_next_nor_the_end_of_the_process(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    program = (
        "import asyncio, threading\n"
        "from pathlib import Path\n"
        "from miles import Context, EpisodeTimeout\n"
        "from miles_plugins.environment.dataset import Dataset\n\n"
        "def stuck(text, task):\n"
        "    if text == 'stuck':\n"
        "        threading.Event().wait()\n"
        "    return 1.0\n\n"
        f"config = Dataset.Config(path={str(path)!r}, reward='stuck', reward_timeout_s=0.2)\n"
        "made = Dataset(config, Context(directory=Path('.'), rewards={'stuck': stuck}))\n"
        "task = made.tasks('train')[0]\n\n"
        "async def main():\n"
        "    asked = [made._grade(task, text) for text in ('stuck', 'fine')]\n"
        "    return await asyncio.gather(*asked, return_exceptions=True)\n\n"
        "late, worth = asyncio.run(main())\n"
        "assert isinstance(late, EpisodeTimeout) and worth == 1.0, (late, worth)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.jsonl",
            '{"prompt":"a","answer":"1"}\n\n{"prompt":"a" "answer":"1"}\n',
            "a.jsonl, line 3: not JSON: Expecting ','",
        ),
        ("a.jsonl", '{"prompt":"a","answer":"1"}\n{"prompt":"b"', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"prompt":"a","answer":"1"}\n7\n', "a.jsonl, line 2: a int, not an object"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl", "\n\n", "no rows in .*a.jsonl"),
        (
            "a.jsonl",
            '{"promt":"a","answer":"1"}\n',
            "no column 'prompt' in .*a.jsonl; did you mean 'promt'\\? valid: answer, promt",
        ),
        (
            "a.jsonl",
            '{"prompt":"a","answer":"1"}\n\n{"prompt":null,"answer":"1"}\n',
            "a.jsonl, line 3: the prompt is None",
        ),
        ("a.jsonl", '{"prompt":"","answer":"1"}\n', "a.jsonl, line 1: the prompt is empty"),
        (
            "a.jsonl",
            '{"prompt":"a","answer":null}\n{"prompt":"a","answer":"1"}\n',
            "a.jsonl, line 1: answer is null",
        ),
        (
            "a.jsonl",
            '{"prompt":[{"content":"x"}],"answer":"1"}\n',
            "line 1: the prompt holds .*not a message with a role",
        ),
        ("a.json", '[{"prompt":"x","answer":"1"},]', "cannot read .*a.json"),
        ("a.parquet", "not parquet", "cannot read .*a.parquet"),
        ("a.csv", "prompt,answer", "a.csv is not a data file"),
    ],
)
def test_fault_in_a_file_is_named_with_its_place(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s)^environment dataset: .*{words}"):
        make(path=str(path)).tasks("train")


def test_id_twice_names_both_lines(tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{**row, "id": "same" if i > 7 else i} for i, row in enumerate(ROWS)]
    )
    with pytest.raises(
        ConfigError, match=r"a\.jsonl, line 10: id is 'same', as in .*a\.jsonl, line 9"
    ):
        make(path=path, id="id").tasks("train")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"path": "nowhere/*.jsonl"}, r"path: no file, folder or match of 'nowhere/\*\.jsonl'"),
        ({"heldout_path": "nowhere"}, "heldout_path: no file"),
        (
            {"reward": "exakt"},
            "no reward 'exakt'; did you mean 'exact'\\? valid: exact, math, mine, numeric, regex",
        ),
        ({"pattern": "("}, r"pattern '\('"),
        ({"answer": ""}, "reward 'exact' compares with an answer"),
        ({"heldout_fraction": 1.0}, "heldout_fraction is 1.0"),
        ({"reward_timeout_s": 0.0}, "reward_timeout_s is 0.0 and reward_processes 1; both must be"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused(tmp_path, config, words):
    with pytest.raises(ConfigError, match=f"^environment dataset: {words}"):
        make(
            {"mine": lambda text, task: 0.0},
            **{"path": write(tmp_path / "a.jsonl", ROWS), **config},
        )


def test_folder_without_data_and_mixed_formats_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no data file in .*empty"):
        make(path=str(tmp_path / "empty"))
    write(tmp_path / "mixed" / "a.jsonl", ROWS)
    (tmp_path / "mixed" / "b.parquet").write_bytes(b"x")
    with pytest.raises(ConfigError, match="holds both JSON and Parquet"):
        make(path=str(tmp_path / "mixed"))


def test_plugin_may_not_take_a_built_in_rewards_name(tmp_path):
    with pytest.raises(ConfigError, match="a plugin claims the built-in reward 'exact'"):
        make({"exact": lambda text, task: 0.0}, path=write(tmp_path / "a.jsonl", ROWS))


def test_missing_library_says_how_to_install_it(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now raises ImportError
    with pytest.raises(ConfigError, match=r"needs `datasets`: pip install 'miles\[data\]'"):
        make(path=path).tasks("train")
