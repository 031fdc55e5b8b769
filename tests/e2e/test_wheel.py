"""A wheel built from the repository, installed elsewhere, runs from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without a network: the build back end is among this environment's
    packages."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("miles-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """A Python that has the wheel, and this environment's packages except the editable miles."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    interpreter = folder / "bin" / "python"
    subprocess.run(
        [interpreter, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True
    )
    others = folder / "others"
    others.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.lower().lstrip("_").startswith(("miles", "editable")):
            (others / entry.name).symlink_to(entry)
    (site / "others.pth").write_text(f"{others}\n")
    return interpreter


def _run(python, *arguments, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(python), "-P", "-m", *map(str, arguments)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
def test_wheel_holds_the_packages_and_the_configuration_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "miles/_conf/config.yaml" in names
    assert "miles/py.typed" in names
    assert any(name.startswith("miles_plugins/trainer/fsdp") for name in names)
    assert any(name.startswith("miles/_conf/experiment/") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "conf/", "docs/"))]
    assert [name for name in names if name.endswith("LICENSE")]


@pytest.mark.slow
def test_wheel_is_what_is_imported(python, tmp_path):
    where = _run(python, "site", cwd=tmp_path)
    assert str(ROOT) not in where.stdout
    done = subprocess.run(
        [str(python), "-P", "-c", "import miles, miles_plugins; print(miles.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(python.parent.parent))


@pytest.mark.slow
def test_wheel_lists_plugins_and_checks_the_default_run(python, tmp_path):
    listed = _run(python, "miles.cli", "plugins", "list", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "fsdp" in listed.stdout
    checked = _run(python, "miles.cli", "check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_wheel_runs_both_stages(python, tiny_overrides, tmp_path):
    ran = _run(python, "miles.cli", "run", *tiny_overrides, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) >= 6
