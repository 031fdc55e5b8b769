"""The commands that start no run: what they print and how they end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from miles.protocols import KINDS


def test_plugins_list_shows_every_built_in_and_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from miles.cli import main\n"
        "code = main(['plugins', 'list'])\n"
        "assert not {'torch', 'transformers', 'datasets', 'wandb'} & sys.modules.keys()\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("arithmetic", "shuffle", "bytes", "qwen3", "fsdp", "grpo", "memory", "local"):
        assert name in done.stdout


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_plugins_list_of_one_kind_shows_that_kind_alone(miles, kind):
    ended = miles("plugins", "list", "--kind", kind, "--json")
    assert ended.code == 0
    assert {row["kind"] for row in json.loads(ended.out)} <= {kind}


def test_plugins_list_of_an_unknown_kind_names_the_kinds(miles):
    ended = miles("plugins", "list", "--kind", "enviroment")
    assert ended.code == 2
    assert "'environment'" in ended.err


def test_plugins_show_explains_every_key(miles):
    ended = miles("plugins", "show", "trainer", "fsdp")
    assert ended.code == 0
    for word in ("lr", "float", "Peak learning rate", "of miles 0"):
        assert word in ended.out


def test_plugins_show_of_an_unknown_name_has_the_close_match(miles):
    ended = miles("plugins", "show", "trainer", "fsdpp")
    assert ended.code == 2
    assert "'fsdp'" in ended.err


def test_plugins_check_finds_no_fault_in_the_built_ins(miles):
    ended = miles("plugins", "check")
    assert ended.code == 0, ended.text


def test_show_prints_where_each_value_came_from(miles):
    ended = miles("show", "trainer.lr=0.125")
    assert ended.code == 0
    line = next(line for line in ended.out.splitlines() if "0.125" in line)
    assert "command line" in line
    assert "default" in ended.out or "Config" in ended.out


def test_paths_with_awkward_characters_are_quoted_for_the_user(miles, tmp_path):
    """`=`, spaces, commas and parentheses in the path-valued keys."""
    folder = tmp_path / "a b, (c)=d"
    ended = miles("show", f"run.dir={folder}")
    assert ended.code == 0, ended.err
    assert "a b, (c)=d" in ended.out
