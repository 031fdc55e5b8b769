"""What `show` and `plugins list, show, check` print, word for word; exit codes are test_cli's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from miles.errors import PluginLoadError, PluginNotFound
from miles.plugins import Registry
from miles.registry import catalog

Install = Callable[..., Path]

HOOKS = """
import miles

@miles.hookimpl
def miles_config_paths():
    return "{folder}"
"""


@pytest.fixture
def words(install: Install, component: str) -> None:
    """An environment `words` in a distribution of that name."""
    install(
        "words", {"miles.environment": {"words": "words_mod:Words"}}, {"words_mod.py": component}
    )


# ---------------------------------------------------------------- the configuration


def test_resolved_lines_are_yaml_with_every_origin() -> None:
    resolved = {
        "steps": 3,
        "run": {"dir": "a b", "name": ""},
        "engine": {"name": "torch", "deep": {"x": None}},
        "empty": {},
        "names": ["ü", 1],
    }
    origins = {"steps": "command line", "run.dir": "default", "engine.deep.x": "conf/e.yaml"}
    lines = list(
        catalog.resolved_lines(SimpleNamespace(name="sft", resolved=resolved, origins=origins))
    )
    assert lines[0] == "# ---- stage sft"
    assert yaml.safe_load("\n".join(lines)) == resolved
    assert 'names: ["ü", 1]' in lines
    (row,) = [line for line in lines if line.startswith("steps")]
    assert row.split("#")[1] == " command line"
    columns = {line.index("  # ") for line in lines if "  # " in line}
    assert len(columns) == 1  # origins stand in one column


# ---------------------------------------------------------------- listing


def test_list_as_json_gives_the_state_and_why(
    install: Install, component: str, words: None, capsys: pytest.CaptureFixture[str]
) -> None:
    install("twin", {"miles.environment": {"words": "twin_mod:Words"}}, {"twin_mod.py": component})
    install("hidden", {"miles.environment": {"hidden": "hidden_mod:Words"}})
    install("bad", {"miles": {"bad": "bad_mod"}}, {"bad_mod.py": "1 / 0"})
    registry = Registry.load(block=["hidden"])
    catalog.print_list(registry, kind=None, as_json=True)
    rows = {(r["name"], r["distribution"]): r for r in json.loads(capsys.readouterr().out)}
    assert rows["words", "words"]["state"] == rows["words", "twin"]["state"] == "conflict"
    assert "is claimed by" in rows["words", "twin"]["detail"]
    assert rows["hidden", "hidden"]["state"] == "blocked"
    assert rows["hidden", "hidden"]["detail"] == "left out by MILES_PLUGINS or MILES_BLOCK"
    assert rows["bad", "bad"]["state"] == "broken"
    assert "ZeroDivisionError" in rows["bad", "bad"]["detail"]
    assert (
        rows["arithmetic", "miles"]["state"] == "ok" and not rows["arithmetic", "miles"]["detail"]
    )


def test_list_says_each_conflict_once_and_keeps_columns(
    install: Install, component: str, words: None, capsys: pytest.CaptureFixture[str]
) -> None:
    install("twin", {"miles.environment": {"words": "twin_mod:Words"}}, {"twin_mod.py": component})
    catalog.print_list(Registry.load(), kind="environment", as_json=False)
    table, *details = capsys.readouterr().out.split("\n\n")
    head, *rows = table.splitlines()
    assert head.split() == ["kind", "name", "distribution", "state"]
    at = head.index("state")
    assert all(row[at - 1] == " " and row[at:].strip() in ("ok", "conflict") for row in rows)
    assert len(details) == 1 and details[0].count("is claimed by") == 1


# ---------------------------------------------------------------- one of them


def test_component_shows_its_file_with_what_it_sets(
    install: Install, component: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/loud.yaml").write_text("name: words\nword: LOUD\ntimes: 3\n")
    (tmp_path / "environment/broken.yaml").write_text("- a list\n")  # hides nothing
    hooks = HOOKS.format(folder=tmp_path)
    install(
        "words",
        {"miles.environment": {"words": "words_mod:Words"}, "miles": {"words": "words_hooks"}},
        {"words_mod.py": component, "words_hooks.py": hooks},
    )
    catalog.print_component(Registry.load(), "environment", "words")
    said = capsys.readouterr().out
    assert f"environment=loud ({tmp_path}/environment/loud.yaml)\n" in said
    assert '  word: "LOUD"\n  times: 3\n' in said
    assert "hooks of words (words 1.0): miles_config_paths" in said
    row = next(line for line in said.splitlines() if line.startswith("environment.times"))
    assert row.split() == ["environment.times", "int", "1", "How", "often."]


def test_component_without_keys_or_files_is_shown_all_the_same(
    install: Install, component: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = component.replace('"""Says a word."""', "").split("        word: str")[0]
    rest = component[component.index("    def __init__") :]
    install("bare", {"miles.environment": {"bare": "bare_mod:Words"}},
            {"bare_mod.py": f"{text}        pass\n\n{rest}"})  # fmt: skip
    catalog.print_component(Registry.load(), "environment", "bare")
    said = capsys.readouterr().out
    assert "bare_mod:Words of bare 1.0" in said and "(no docstring)" in said
    assert "meaning" not in said


def test_component_shows_keys_below_a_nested_one(
    component: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It showed `algorithm.off_policy` and no word of what its keys mean."""
    nested = """
@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    pitch: int = 1
    \"\"\"How high.\"\"\"
    loud: bool = False
    \"\"\"Whether to shout.\"\"\"


class Words:"""
    text = component.replace("\nclass Words:", nested).replace(
        "        word: str",
        '        voice: Voice = Voice(loud=True)\n        """Of whom."""\n        word: str',
    )
    (mine := tmp_path / "mine.py").write_text(
        f'{text}\nmiles_components = {{"environment": {{"words": Words}}}}\n'
    )
    catalog.print_component(Registry.load(), "environment", str(mine))
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert ["environment.voice", "Voice", "Of", "whom."] in rows
    assert ["environment.voice.pitch", "int", "1", "How", "high."] in rows
    assert ["environment.voice.loud", "bool", "true", "Whether", "to", "shout."] in rows


def test_component_of_a_local_file_is_shown_like_an_installed_one(
    component: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine := tmp_path / "mine.py").write_text(
        f'{component}\nmiles_components = {{"environment": {{"words": Words, "more": Words}}}}\n'
    )
    catalog.print_component(Registry.load(), "environment", str(mine))
    said = capsys.readouterr().out
    assert f"environment words\nmiles_local_mine:Words of {mine} " in said
    assert "Says a word." in said and "\n\nenvironment " in said
    assert len([row for row in said.splitlines() if row.startswith("environment.word ")]) == 2
    with pytest.raises(PluginNotFound) as caught:
        catalog.print_component(Registry.load(), "engine", str(mine))
    assert caught.value.detail == (
        f"local plugin {mine} offers no engine; it offers environment more, environment words"
    )


def test_component_of_a_local_file_that_is_broken_says_what_is_wrong(tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text("import nothing_like_it\n")
    with pytest.raises(PluginLoadError, match="No module named 'nothing_like_it'"):
        catalog.print_component(Registry.load(), "environment", str(mine))
    with pytest.raises(PluginNotFound, match=r"absent\.py: there is no such file"):
        catalog.print_component(Registry.load(), "environment", str(tmp_path / "absent.py"))


def test_hook_shows_who_implements_it(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import miles\n@miles.hookimpl\ndef miles_step_finished(step):\n    pass\n"
    install("watcher", {"miles": {"watcher": "watcher_mod"}}, {"watcher_mod.py": text})
    registry = Registry.load()
    catalog.print_hook(registry, "hook", "miles_step_finished")
    said = capsys.readouterr().out
    assert said.startswith("miles_step_finished(step: ") and "watcher (watcher 1.0)" in said
    with pytest.raises(PluginNotFound, match="did you mean 'miles_step_finished'"):
        catalog.print_hook(registry, "hook", "miles_step_finishd")


# ---------------------------------------------------------------- checking


def check(name: str | None, **how: Any) -> int:
    return catalog.check_plugins(Registry.load(), name, contract=False, **how)


@pytest.mark.parametrize("name", ["words", "environment/words"])
def test_check_finds_by_distribution_name_or_kind(
    words: None, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(name) == 0
    assert capsys.readouterr().out == "good  environment words (words 1.0)\n1 good, 0 faulty\n"


def test_check_lists_every_fault_of_a_component(
    install: Install, component: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = component.replace('    """Says a word."""\n', "", 1).replace("What to say.", "")
    text = text.replace('        """"""\n', "").replace("def tasks(self, split)", "def tasks(self)")
    install("sloppy", {"miles.environment": {"sloppy": "sloppy_mod:Words"}},
            {"sloppy_mod.py": text})  # fmt: skip
    assert check("sloppy") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "fault environment sloppy (sloppy 1.0)",
        "      tasks(self) cannot be called as tasks(split)",
        "      class Words has no docstring",
        "      Config.word has no sentence under it",
        "0 good, 1 faulty",
    ]


def test_check_finds_wrong_values_in_its_file_but_not_missing_ones(
    install: Install, component: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/words.yaml").write_text("name: words\nword: ???\ntimes: often\n")
    hooks = HOOKS.format(folder=tmp_path)
    text = component.replace('word: str = "yes"', "word: str")
    install(
        "words",
        {"miles.environment": {"words": "words_mod:Words"}, "miles": {"words": "words_hooks"}},
        {"words_mod.py": text, "words_hooks.py": hooks},
    )
    assert check("environment/words") == 1
    said = capsys.readouterr().out
    assert "environment 'words': times: expected int, got str 'often'" in said
    assert "words.yaml)" in said and "required" not in said


def test_check_leaves_out_what_is_blocked(words: None, capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry.load(block=["words"])
    with pytest.raises(PluginNotFound, match="no plugin is called 'words'"):
        catalog.check_plugins(registry, "words", contract=False)


def test_check_of_a_name_that_is_not_there_gives_the_close_match(words: None) -> None:
    with pytest.raises(PluginNotFound, match="no plugin is called 'wods'; did you mean 'words'"):
        check("wods")
