"""The command: what it prints, its exit codes, and that it imports only what it must."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import pytest

from miles import KINDS, PluginError, PluginLoadError, checkpoint
from miles.cli import main, selection
from miles.composing.sweep import sweep
from miles.plugins import Registry

KEYS = ("experiment=grpo", "tito=bytes")
RUN_COMMANDS = ("run", "check", "show", "report", "plugins")


@pytest.fixture
def miles(capsys, tmp_path, monkeypatch):
    """`miles("check", "steps=3")` gives (exit code, output, errors), called in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def words(install, component):
    install(
        "words", {"miles.environment": {"words": "words_mod:Words"}}, {"words_mod.py": component}
    )


@pytest.fixture
def broken(install):
    install(
        "broken",
        {"miles.engine": {"gpu": "broken_mod:Gpu"}, "miles": {"fragile": "broken_hooks"}},
        {"broken_mod.py": "raise OSError('no GPU')", "broken_hooks.py": "1 / 0"},
    )


# ---------------------------------------------------------------- help and usage


def test_alone_it_explains_itself(miles):
    code, out, _ = miles()
    assert code == 0
    assert all(f"    {command} " in out for command in RUN_COMMANDS)
    assert "miles run experiment=grpo environment=mine" in out


@pytest.mark.parametrize("command", [(), *[(c,) for c in RUN_COMMANDS], ("plugins", "list")])
def test_help_is_good(miles, command):
    code, out, _ = miles(*command, "--help")
    assert code == 0
    assert out.startswith("usage: miles")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rnu",), "invalid choice: 'rnu'"),
        (("plugins", "list", "--kind", "engin"), "invalid choice: 'engin'"),
        (("plugins", "show", "engine"), "required: NAME"),
        (("report",), "required: RUN_DIR"),
    ],
)
def test_wrong_usage_is_2(miles, words, message):
    code, _, err = miles(*words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("plugins", ("list", "show", "check", "new")),
        ("sessions", ("serve",)),
        ("tito", ("verify",)),
        ("sandboxes", ("list", "clean")),
        ("convert", ("smollm2", "gguf")),
    ],
)
def test_command_alone_prints_its_choices(miles, command, choices):
    code, out, _ = miles(command)
    assert code == 2
    for choice in choices:
        assert f"    {choice} " in out


def test_version(miles):
    assert miles("--version")[:2] == (0, "miles 0.1.0\n")


# ---------------------------------------------------------------- run, check, show


def test_run_with_a_wrong_configuration_is_2_and_starts_nothing(miles, tmp_path):
    code, _, err = miles("run", "stpes=3", "engine.rows=many")
    assert code == 2
    assert err.startswith("miles: ")
    assert "did you mean 'steps'" in err
    assert "rows: expected int" in err
    assert list(tmp_path.iterdir()) == []


def test_run_refuses_what_check_refuses(miles):
    code, _, err = miles("run", "publish_every=3")
    assert code == 2
    assert "publish_every (3) is more than max_lag + 1 (1)" in err


def test_check_good_is_0_and_names_the_stages(miles):
    assert miles("check")[:2] == (0, "good: sft (1000 steps), grpo (150 steps)\n")


def test_check_with_faults_is_1_and_prints_each(miles):
    code, out, _ = miles("check", "stpes=3", "top_p=2")
    assert code == 1
    assert "'stpes'" in out
    assert "top_p: 2.0 is above 1" in out
    assert out.endswith("2 faults\n")


def test_show_prints_yaml_with_origins(miles):
    from omegaconf import OmegaConf

    code, out, _ = miles("show", *KEYS, "engine.rows=8", "run.name=a b")
    assert code == 0
    assert "  rows: 8 " in out
    line = next(x for x in out.splitlines() if x.startswith("  rows:"))
    assert line.endswith("# command line")
    shown = OmegaConf.to_container(OmegaConf.create(out))
    assert shown["run"]["name"] == "a b"
    assert shown["environment"]["name"] == "arithmetic"
    assert shown["sandbox"] is None


def test_show_one_stage(miles):
    code, out, _ = miles("show", "--stage", "grpo")
    assert code == 0
    assert "stage grpo" in out
    assert "stage sft" not in out
    code, _, err = miles("show", "--stage", "grp")
    assert code == 2
    assert "no stage 'grp'; did you mean 'grpo'" in err


def test_show_with_faults_prints_what_there_is_and_is_2(miles):
    code, out, err = miles("show", *KEYS, "stpes=3")
    assert code == 2
    assert "engine:" in out
    assert "'stpes'" in err


def test_config_dir_adds_experiments(miles, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "x.yaml").write_text("tito: bytes\nsteps: 4\n")
    code, out, _ = miles("check", "--config-dir", "mine", "experiment=x")
    assert (code, out.splitlines()[-1]) == (0, "good: grpo (4 steps)")


def test_path_may_hold_anything(miles, tmp_path, component):
    folder = tmp_path / "a b,(c)=d"
    folder.mkdir()
    (folder / "p.py").write_text(
        component + "\nmiles_components = {'environment': {'mine': Words}}\n"
    )
    code, out, err = miles("check", *KEYS, f"plugins={folder}/p.py", "environment=mine")
    assert code == 0, out + err


@pytest.mark.parametrize("safe", [(), ("-P",)])
def test_python_m_miles_finds_no_neighbours_of_a_plugin_that_workers_would_lack(tmp_path, safe):
    """`check` was good, and the run ended with "there is no environment 'mine'"."""
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "mine.py").write_text("import neighbour\n")
    command = [sys.executable, *safe, "-m", "miles", "check", "plugins=[./mine.py]"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "/mine.py" in done.stdout
    assert "ModuleNotFoundError: No module named 'neighbour'" in done.stdout


def test_resume_of_nothing_is_2(miles, tmp_path):
    code, _, err = miles("run", "resume=absent")
    assert code == 2
    assert "resume=absent: there is no such directory" in err
    for folder in ("runs", "else where"):
        (tmp_path / folder / "absent-1" / "checkpoints").mkdir(parents=True)
    assert "directory; did you mean runs/absent-1?" in miles("run", "resume=absent")[2]
    elsewhere = miles("run", "resume=absent", "run.dir=else where")[2]
    assert "directory; did you mean else where/absent-1?" in elsewhere
    (tmp_path / "empty").mkdir()
    code, _, err = miles("run", "resume=empty")
    assert code == 2
    assert "resume=empty: no checkpoint in empty/checkpoints" in err


def test_resume_finds_the_experiment_of_a_folder_that_the_run_named(miles, tmp_path):
    """It was looked for in miles' own folders only."""
    (tmp_path / "more/experiment").mkdir(parents=True)
    (tmp_path / "more/experiment/mine.yaml").write_text("steps: 7\n")
    config = {"overrides": ["experiment=mine"], "folders": [str(tmp_path / "more")], "stages": {}}

    async def fill(directory):
        (directory / "config.json").write_text(json.dumps(config))
        return {}

    asyncio.run(checkpoint.write(tmp_path / "run/checkpoints", 4, fill))
    code, out, err = miles("show", "resume=run", "tito=bytes")
    assert code == 0, err
    assert re.search(r"^steps: 7 +# .*more/experiment/mine.yaml$", out, re.MULTILINE)


def test_interrupt_is_130(miles, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("miles.check.check", interrupted)
    assert miles("check")[0] == 130


@pytest.mark.parametrize(("error", "code"), [(PluginError, 1), (PluginLoadError, 2)])
def test_bug_of_a_plugin_is_1_and_one_that_cannot_be_used_is_2(miles, monkeypatch, error, code):
    """A hook that raised in the middle of a run ended it with 2, as if the command had been
    wrong."""

    def raised(plan):
        raise error("plugin 'w' raised in miles_step_finished: KeyError: 'gone'")

    monkeypatch.setattr("miles.check.check", raised)
    found, _, err = miles("check")
    assert found == code and "miles: plugin 'w' raised" in err and "Traceback" not in err


def test_bug_is_1_with_its_traceback(miles, monkeypatch):
    monkeypatch.setattr("miles.check.check", lambda plan: 1 / 0)
    code, _, err = miles("check")
    assert code == 1
    assert "ZeroDivisionError" in err


def test_closed_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m miles show | head -1", shell=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("# ---- stage")
    assert done.stderr == ""


# ---------------------------------------------------------------- environment variables


def test_selection_reads_two_comma_separated_lists():
    assert selection({}) == {"allow": None, "block": []}
    assert selection({"MILES_PLUGINS": "a, b", "MILES_BLOCK": "c,"}) == {
        "allow": ["a", "b"],
        "block": ["c"],
    }


def test_environment_variables_block_and_allow(miles, words, monkeypatch):
    monkeypatch.setenv("MILES_BLOCK", "words")
    assert "blocked" in next(x for x in miles("plugins", "list")[1].splitlines() if "words" in x)
    monkeypatch.setenv("MILES_PLUGINS", "nothing-like-it")
    code, _, err = miles("plugins", "list")
    assert code == 2
    assert "MILES_PLUGINS allows 'nothing-like-it'" in err


# ---------------------------------------------------------------- plugins


def test_list_shows_every_name_and_what_is_wrong(miles, words, broken, install, component):
    install("words-two", {"miles.environment": {"words": "w2:Words"}}, {"w2.py": component})
    code, out, _ = miles("plugins", "list")
    assert code == 0
    states = {tuple(line.split()[:3]): line.split()[-1] for line in out.splitlines() if line}
    assert states["engine", "gpu", "broken"] == "ok"  # not imported
    assert states["hook", "fragile", "broken"] == "broken"
    assert states["environment", "words", "words"] == "conflict"
    assert states["environment", "words", "words-two"] == "conflict"
    assert "ZeroDivisionError" in out
    assert "environment 'words' is claimed by" in out


def test_list_one_kind_as_json(miles, words):
    code, out, _ = miles("plugins", "list", "--kind", "environment", "--json")
    assert code == 0
    rows = json.loads(out)
    assert {row["kind"] for row in rows} == {"environment"}
    assert {
        "kind": "environment",
        "name": "words",
        "target": "words_mod:Words",
        "distribution": "words",
        "version": "1.0",
        "state": "ok",
        "detail": "",
    } in rows


def test_list_imports_nothing_heavy():
    code = (
        "import sys; from miles.cli import main; main(['plugins', 'list']); "
        "print([m for m in ('torch', 'transformers', 'hydra', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_show_plugin_prints_docstring_keys_and_files(miles, words, install, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = miles("plugins", "show", "environment", "words")
    assert code == 0
    assert "words_mod:Words of words 1.0" in out
    assert "Says a word." in out
    row = next(x for x in out.splitlines() if "environment.word " in x)
    assert row.split(maxsplit=3) == ["environment.word", "str", '"yes"', "What to say."]
    out = miles("plugins", "show", "tito", "bytes")[1]
    assert "tito bytes" in out


def test_show_plugin_unknown_is_2(miles):
    code, _, err = miles("plugins", "show", "engine", "trch")
    assert code == 2
    assert "did you mean 'torch'" in err


def test_show_hook(miles):
    code, out, _ = miles("plugins", "show", "hook", "miles_step_finished")
    assert code == 0
    assert out.startswith("miles_step_finished(")
    assert miles("plugins", "show", "hook", "miles_step")[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_show_every_builtin(miles, kind):
    rows = json.loads(miles("plugins", "list", "--kind", kind, "--json")[1])
    for row in rows:
        if row["distribution"] == "miles":
            code, out, err = miles("plugins", "show", kind, row["name"])
            assert code == 0, err
            assert f"{kind} {row['name']}" in out


def test_check_plugins_good_is_0(miles, words):
    code, out, _ = miles("plugins", "check", "words")
    assert code == 0
    assert out == "good  environment words (words 1.0)\n1 good, 0 faulty\n"


def test_check_plugins_imports_them_and_any_fault_is_1(miles, broken):
    code, out, _ = miles("plugins", "check", "broken")
    assert code == 1
    assert "fault engine gpu (broken 1.0)" in out
    assert "OSError: no GPU" in out
    assert "fault hook fragile (broken 1.0)" in out
    assert "0 good, 2 faulty" in out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def tasks(", "async def tasks(", "tasks must not be a coroutine"),
        ('    """Says a word."""\n', "", "class Words has no docstring"),
        ('        """How often."""\n', "", "Config.times has no sentence under it"),
    ],
)
def test_check_plugins_finds_what_is_missing(miles, install, component, old, new, message):
    install(
        "w", {"miles.environment": {"w": "w_mod:Words"}}, {"w_mod.py": component.replace(old, new)}
    )
    code, out, _ = miles("plugins", "check", "environment/w")
    assert code == 1
    assert message in out


def test_check_plugins_reads_their_yaml(miles, install, component):
    install(
        "w",
        {"miles.environment": {"w": "w_mod:Words"}, "miles": {"w": "w_hooks"}},
        {
            "w_mod.py": component,
            "w_hooks.py": "from pathlib import Path\nfrom miles import hookimpl\n@hookimpl\n"
            "def miles_config_paths(): return str(Path(__file__).parent / 'y')\n",
            "y/environment/w.yaml": "name: w\nwrod: x\n",
        },
    )
    code, out, _ = miles("plugins", "check", "w")
    assert code == 1
    assert "environment 'w': wrod: there is no such key; did you mean 'word'" in out
    assert "y/environment/w.yaml" in out


@pytest.mark.slow
def test_check_plugins_runs_the_contract(miles, install, component):
    install("w", {"miles.environment": {"w": "w_mod:Words"}}, {"w_mod.py": component})
    code, out, _ = miles("plugins", "check", "w", "--contract")
    assert code == 1
    assert "share the id" in out or "in both splits" in out
    good = component.replace('id="1"', "id=split")
    install("v", {"miles.environment": {"v": "v_mod:Words"}}, {"v_mod.py": good})
    code, out, _ = miles("plugins", "check", "v", "--contract")
    assert code == 0, out


def test_check_plugins_takes_a_local_file(miles, tmp_path, component):
    (tmp_path / "mine.py").write_text(
        component + "\nmiles_components = {'environment': {'mine': Words}}\n"
    )
    code, out, _ = miles("plugins", "check", "./mine.py")
    assert code == 0, out
    assert "good  environment mine" in out
    assert miles("plugins", "check", "./absent.py")[0] == 1


def test_check_plugins_of_no_name_is_2(miles):
    code, _, err = miles("plugins", "check", "grpp")
    assert code == 2
    assert "no plugin is called 'grpp'; did you mean 'grpo'" in err


def test_commands_of_a_plugin_are_called(miles, install):
    install(
        "greeter",
        {"miles": {"greeter": "greeter_hooks"}},
        {
            "greeter_hooks.py": "import miles\n@miles.hookimpl\ndef miles_commands(subparsers):\n"
            "    parser = subparsers.add_parser('greet', help='say hello')\n"
            "    parser.add_argument('name')\n"
            "    parser.set_defaults(func=lambda args: print('hello', args.name) or 7)\n"
        },
    )
    assert miles("greet", "you")[:2] == (7, "hello you\n")
    assert "say hello" in miles("--help")[1]


def test_plugin_whose_commands_raise_does_not_stop_the_others(miles, install):
    install(
        "greeter",
        {"miles": {"greeter": "greeter_hooks"}},
        {
            "greeter_hooks.py": "import miles\n@miles.hookimpl\ndef miles_commands(subparsers):\n"
            "    subparsers.add_parser('run')\n"
        },
    )
    code, out, err = miles("plugins", "list")
    assert code == 0
    assert "greeter (greeter 1.0)' raised in miles_commands" in err or "run" in out


# ---------------------------------------------------------------- a new plugin


def test_new_refuses_to_overwrite_and_to_take_a_name(miles, tmp_path):
    assert miles("plugins", "new", "word-game")[:2] == (0, "miles-plugin-word-game\n")
    (tmp_path / "miles-plugin-word-game" / "README.md").write_text("mine")
    code, _, err = miles("plugins", "new", "word-game")
    assert code == 2
    assert "exists; nothing was written" in err
    assert (tmp_path / "miles-plugin-word-game" / "README.md").read_text() == "mine"
    code, _, err = miles("plugins", "new", "arithmetic")
    assert code == 2
    assert "there is an environment 'arithmetic' already" in err


# ---------------------------------------------------------------- sweeps


@pytest.mark.slow
def test_sweep_runs_every_combination_and_fails_with_one(tmp_path, capfd):
    for number in range(2):
        (tmp_path / f"mine-{number}").mkdir()
        (tmp_path / f"mine-{number}" / "config.json").write_text("{}")  # as of a run before
    code = sweep(["seed=1,2", "run.name=mine", f"run.dir={tmp_path}"], registry=Registry.load())
    said = capfd.readouterr()
    assert code == 1
    assert "job 1 of 2: seed=1" in said.out
    assert said.err.count("already holds a run") == 2
    rows = [line.split() for line in said.out.splitlines() if line.startswith("mine-")]
    assert [row[:3] for row in rows] == [["mine-0", "seed=1", "2"], ["mine-1", "seed=2", "2"]]


def test_sweep_reads_every_override_before_it_starts(miles):
    code, _, err = miles("run", "-m", "seed=1,2", "steps")
    assert code == 2
    assert "override 'steps' cannot be read" in err


def test_overrides_may_stand_behind_options(miles):
    code, *said = miles("check", "seed=3", "--config-dir", ".", "trainer.lr=no")
    assert code == 1 and "lr: expected float" in "".join(said)
    code, *said = miles("check", "seed=3", "--config-dir", ".", "more")
    assert code == 2 and "unrecognized arguments: more" in "".join(said)
    code, *said = miles("check", "--max_lag=2")
    assert code == 2 and "unrecognized arguments: --max_lag=2" in "".join(said)
