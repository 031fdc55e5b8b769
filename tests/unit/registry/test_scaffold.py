"""The distribution that `miles plugins new` writes; tests/e2e installs one and trains with it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from miles.errors import ConfigError
from miles.registry.scaffold import write


@pytest.mark.parametrize(
    "name",
    ["", "Word", "2words", "word_game", "word--game", "-word", "word-", "class", "wörd", "a/b"],
)
def test_write_refuses_a_name_that_cannot_be_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a plugin"):
        write(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_write_makes_clean_code(tmp_path: Path) -> None:
    root = write("word-game", tmp_path)
    ruff = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--line-length=100", "."],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert ruff.returncode == 0, ruff.stdout
    format = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "--line-length=100", "."],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert format.returncode == 0, format.stdout


def test_write_makes_a_distribution_whose_names_agree(tmp_path: Path) -> None:
    root = write("word-game", tmp_path)
    assert root == tmp_path / "miles-plugin-word-game"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["name"] == root.name
    points = project["project"]["entry-points"]
    module, _, name = points["miles.environment"]["word_game"].partition(":")
    source = root / "src" / f"{module.replace('.', '/')}.py"
    assert name in {n.name for n in ast.parse(source.read_text()).body if hasattr(n, "name")}
    hooks = root / "src" / f"{points['miles']['word_game'].replace('.', '/')}.py"
    assert "@hookimpl" in hooks.read_text()
    conf = hooks.parent / "conf"
    assert yaml.safe_load((conf / "environment/word_game.yaml").read_text()) == {
        "name": "word_game"
    }
    experiment = yaml.safe_load((conf / "experiment/word_game.yaml").read_text())
    assert experiment["environment"] == "word_game" and list(experiment["stages"]) == [
        "sft",
        "grpo",
    ]
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["src/miles_plugin_word_game"] and (root / packages[0]).is_dir()


def test_write_leaves_no_blank_to_fill(tmp_path: Path) -> None:
    root = write("a1-b2", tmp_path)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) == 9
    for path in files:
        text = path.read_text()
        assert "$" not in text.replace("${", ""), path
        assert "$" not in str(path.relative_to(root))
    assert (root / "src/miles_plugin_a1_b2/environment.py").read_text().count("class A1B2:") == 1


def test_write_refuses_a_taken_name_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is an environment 'word_game' already"):
        write("word-game", tmp_path, taken={"word_game"})
    assert list(tmp_path.iterdir()) == []


def test_write_leaves_what_is_there(tmp_path: Path) -> None:
    root = write("word", tmp_path)
    (root / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="miles-plugin-word exists; nothing was written"):
        write("word", tmp_path)
    assert (root / "README.md").read_text() == "mine"


def test_write_says_where_it_could_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write .*pyproject\.toml: Not a directory"):
        write("word", tmp_path / "file")


def test_written_score_is_what_its_sentence_says(tmp_path: Path) -> None:
    """The module that a new plugin starts from, run as it is."""
    root = write("word", tmp_path)
    code = "from miles_plugin_word.environment import score; print(score('cba', 'cbx'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root / "src", capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(2 / 3)
