"""From `miles plugins new` to a run with the plugin, by the commands that PLUGINS.md gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A virtual environment that sees this one's packages, so that installing never touches this
    one."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    here = sysconfig.get_paths()
    # addsitedir and not a bare path: editable installs are .pth files themselves
    (site / "_outer.pth").write_text(f"import site; site.addsitedir({here['purelib']!r})\n")
    return folder


def _run(folder, *arguments, cwd=None):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    program, *rest = map(str, arguments)
    return subprocess.run(
        [str(folder / "bin" / "python"), "-m", program, *rest],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(elsewhere, tmp_path_factory):
    """A fresh distribution made by `miles plugins new`, installed with pip."""
    folder = tmp_path_factory.mktemp("new")
    made = _run(elsewhere, "miles.cli", "plugins", "new", "shiny", cwd=folder)
    assert made.returncode == 0, made.stderr
    (root,) = [path.parent for path in folder.rglob("pyproject.toml")]
    pip = _run(elsewhere, "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", root)
    assert pip.returncode == 0, pip.stderr
    return root


def test_new_plugin_is_a_complete_distribution(installed):
    names = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert {"pyproject.toml", "README.md"} <= names
    assert any(name.startswith("src/") and name.endswith(".py") for name in names)
    assert any(name.startswith("tests/") and name.endswith(".py") for name in names)


def test_new_plugin_is_listed_with_its_distribution(elsewhere, installed):
    listed = _run(elsewhere, "miles.cli", "plugins", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)
    text = json.dumps(rows)
    assert "shiny" in text
    assert "miles-plugin-shiny" in text


def test_new_plugin_passes_its_contract_check(elsewhere, installed):
    checked = _run(elsewhere, "miles.cli", "plugins", "check", "shiny", "--contract")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_new_plugin_passes_its_own_tests(elsewhere, installed):
    tested = _run(elsewhere, "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=installed)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "passed" in tested.stdout


def test_new_plugin_is_chosen_on_the_command_line(elsewhere, installed):
    checked = _run(elsewhere, "miles.cli", "check", "experiment=grpo", "environment=shiny")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_new_plugin_trains(elsewhere, installed, tmp_path):
    ran = _run(
        elsewhere,
        "miles.cli",
        "run",
        "experiment=grpo",
        "environment=shiny",
        "steps=2",
        "groups_per_step=2",
        "samples_per_group=2",
        f"run.dir={tmp_path}",
        "run.name=run",
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2


def test_new_plugin_is_gone_when_blocked(elsewhere, installed):
    env = {**os.environ, "MILES_BLOCK": "miles-plugin-shiny"}
    listed = subprocess.run(
        [str(elsewhere / "bin" / "python"), "-m", "miles.cli", "check", "environment=shiny"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 1
    assert "MILES_BLOCK" in listed.stdout + listed.stderr


@pytest.mark.slow
def test_example_plugin_of_the_repository_is_used_the_same_way(elsewhere):
    root = Path(__file__).resolve().parents[2] / "plugins-contrib" / "miles-plugin-example"
    pip = _run(elsewhere, "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", root)
    assert pip.returncode == 0, pip.stderr
    checked = _run(elsewhere, "miles.cli", "plugins", "check", "miles-plugin-example", "--contract")
    assert checked.returncode == 0, checked.stdout + checked.stderr
