"""A run's directory is made once, locked, and compared on resume."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miles import CheckpointError, ConfigError, RunKeys, Settings, checkpoint
from miles.records.directory import Directory, differences, recorded
from miles.run import expand_resume


def settings(path: Path, name: str = "") -> Settings:
    return Settings(run=RunKeys(dir=str(path), name=name))


def test_directory_fresh_names_do_not_collide(tmp_path: Path) -> None:
    first = Directory.create(settings(tmp_path), stem="sums/one")
    second = Directory.create(settings(tmp_path), stem="sums/one")
    assert first.path != second.path
    assert first.path.name.startswith("sums-one-")


def test_directory_in_use_names_the_owner(tmp_path: Path) -> None:
    held = Directory.create(settings(tmp_path, "a"), stem="x")
    code = (
        "from miles import RunKeys, Settings\n"
        "from miles.records.directory import Directory\n"
        f"Directory.create(Settings(run=RunKeys(dir={str(tmp_path)!r}, name='a')), stem='x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "in use by another run (process " in done.stderr
    held.close()


def test_directory_that_cannot_be_locked_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems; it was told as another run's."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("miles.records.directory.fcntl.flock", flock)
    with pytest.raises(ConfigError, match=r"cannot be locked \(No locks available\)"):
        Directory.reopen(tmp_path)


def test_directory_that_holds_a_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    first = Directory.create(settings(tmp_path, "a"), stem="x")
    first.record({"overrides": [], "stages": {}}, {})
    first.close()
    with pytest.raises(ConfigError, match=r"already holds a run; continue it with resume=.*/a"):
        Directory.create(settings(tmp_path, "a"), stem="x")
    again = Directory.reopen(first.path)
    assert json.loads((again.path / "config.json").read_text()) == {"overrides": [], "stages": {}}


def test_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir: cannot create"):
        Directory.create(settings(tmp_path / "file"), stem="x")


def test_differences_names_each_value_that_may_not_change() -> None:
    old = {"stages": {"a": {"seed": 1, "steps": 5, "trainer": {"lr": 1.0, "betas": [1, 2]}}}}
    new = {"stages": {"a": {"seed": 1, "steps": 9, "trainer": {"lr": 2.0, "betas": (1, 2)}}}}
    assert differences(old, new) == ["a.trainer.lr: 1.0 -> 2.0"]
    assert differences(old, old) == []


def _checkpoint(run: Path, step: int, **more: Any) -> Path:
    async def fill(directory: Path) -> Mapping[str, Any]:
        (directory / "config.json").write_text(json.dumps({"overrides": ["seed=3"], **more}))
        return {}

    return asyncio.run(checkpoint.write(run / "checkpoints", step, fill))


def test_resume_puts_the_recorded_overrides_first(tmp_path: Path) -> None:
    run = tmp_path / "odd = name, (1)"
    path = _checkpoint(run, 4)
    for quoted in (f"resume='{run}'", f"resume={run}", f'resume="{path}"'):
        assert expand_resume([quoted, "steps=9"]) == (["seed=3", quoted, "steps=9"], [])
    assert expand_resume(["steps=9"], ["./here"]) == (["steps=9"], ["./here"])
    root, chosen, _ = recorded(str(run))
    assert (root, chosen) == (run, path)


def test_resume_looks_into_the_folders_of_the_run_first_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _checkpoint(tmp_path, 4, folders=["/a", str(tmp_path / "b")])
    _, folders = expand_resume([f"resume={tmp_path}"], ["b", "c"])
    assert folders == ["/a", str(tmp_path / "b"), str(tmp_path / "c")]


def test_resume_of_a_damaged_checkpoint_names_the_file_and_a_good_one(tmp_path: Path) -> None:
    good, bad = _checkpoint(tmp_path, 1), _checkpoint(tmp_path, 2)
    (bad / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged") as caught:
        recorded(str(tmp_path))
    assert str(good) in caught.value.detail
