"""PLUGINS.md says what the code says, and nothing public goes without a sentence or a test."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from miles import KINDS, Settings, hookspecs
from miles.cli import main
from miles.plugins import SPECIFIED, Registry
from miles.registry import schema
from miles.registry.plugin_tables import filled

ROOT = Path(__file__).parent.parent
PLUGINS = (ROOT / "PLUGINS.md").read_text(encoding="utf-8")

BUILTINS = [
    (entry.kind, entry.name)
    for entry in Registry.load(allow=["miles"]).entries
    if entry.distribution == "miles" and entry.kind in KINDS
]


def test_tables_are_what_the_code_makes():
    assert filled(PLUGINS) == PLUGINS, "run `python -m miles.registry.plugin_tables`"


@pytest.mark.parametrize("hook", SPECIFIED)
def test_hook_has_a_sentence_and_its_arguments_are_documented(hook):
    function = getattr(hookspecs, hook)
    assert function.__doc__
    row = "miles_make_<kind>" if hook.startswith("miles_make_") else hook
    line = next(x for x in PLUGINS.splitlines() if x.startswith(f"| `{row}` |"))
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    assert all(f"`{name}`" in line for name in names)


def test_every_hook_has_a_test_of_its_name():
    tests = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    short = {"make" if "_make_" in h else h.removeprefix("miles_") for h in SPECIFIED}
    assert [name for name in sorted(short) if f"test_hook_{name}" not in tests] == []


@pytest.mark.parametrize("field", schema.fields(Settings), ids=lambda field: field.name)
def test_setting_has_a_sentence_and_a_row(field):
    assert field.doc
    nested = schema.frozen_dataclass(field.type)
    assert (f"| `{field.name}." if nested else f"| `{field.name}` |") in PLUGINS


@pytest.mark.parametrize(("kind", "name"), BUILTINS, ids="/".join)
def test_builtin_has_a_row_a_docstring_and_a_sentence_a_key(kind, name):
    component = Registry.load(allow=["miles"]).component(kind, name)
    assert component.__doc__
    assert [f.name for f in schema.fields(component.Config) if not f.doc] == []
    assert f"| `{kind}` | `{name}` |" in PLUGINS


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The page's plugin, in an otherwise empty working directory; `words("run")` is its command."""
    source = re.search(r"This is `words\.py`:\n\n```python\n(.*?)```", PLUGINS, re.DOTALL)[1]
    (tmp_path / "words.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    return lambda verb: shlex.split(
        re.search(rf"^miles ({verb} 'plugins=.*)$", PLUGINS, re.MULTILINE)[1]
    )


def test_ten_line_plugin_of_the_page_passes_the_check(words, capsys):
    assert main(words("check")) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_ten_line_plugin_of_the_page_learns_by_its_command_and_does_not_starve(words, tmp_path):
    command = [sys.executable, "-m", "miles", *words("run"), "run.name=it"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "it" / "metrics.jsonl").read_text().splitlines()
    scores = [x["eval/heldout/score"] for x in map(json.loads, lines) if "eval/heldout/score" in x]
    assert scores[-1] > scores[0] + 0.5


def test_pages_hold_every_kind():
    assert [kind for kind in KINDS if f"| `{kind}` |" not in PLUGINS] == []
