"""Checkpoints are complete or absent, and say what is wrong with them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import CheckpointError, ConfigError, checkpoint


def write(folder: Path, step: int, files: Mapping[str, bytes] | None = None) -> Path:
    async def fill(directory: Path) -> Mapping[str, Any]:
        for name, data in (files or {"model/weights.bin": b"abc"}).items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        return {"version": step}

    return asyncio.run(checkpoint.write(folder, step, fill))


@settings(max_examples=25, deadline=None)
@given(
    files=st.dictionaries(
        st.from_regex(r"[a-z]{1,6}(/[a-z]{1,6})?\.bin", fullmatch=True),
        st.binary(max_size=64),
        min_size=1,
        max_size=4,
    )
)
def test_checkpoint_round_trip(tmp_path_factory: pytest.TempPathFactory, files: Any) -> None:
    path = write(tmp_path_factory.mktemp("c"), 7, files)
    checkpoint.verify(path)
    assert checkpoint.read_state(path) == {"version": 7}
    for name, data in files.items():
        assert (path / name).read_bytes() == data


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: (p / "model/weights.bin").write_bytes(b"abd"), "model/weights.bin is damaged"),
        (lambda p: (p / "model/weights.bin").unlink(), "model/weights.bin is missing"),
        (lambda p: (p / "more.bin").write_bytes(b""), "more.bin does not belong"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing: it was never compl"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is damaged"),
    ],
)
def test_checkpoint_damaged_names_the_file_and_the_newest_good_one(
    tmp_path: Path, harm: Any, message: str
) -> None:
    good, bad = write(tmp_path, 10), write(tmp_path, 20)
    harm(bad)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.verify(bad)
    assert f"newest good one: {good}" in caught.value.detail


def test_checkpoint_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    async def fill(directory: Path) -> Mapping[str, Any]:
        (directory / "a").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device", str(directory / "b"))

    with pytest.raises(CheckpointError, match=r"cannot write .*/b: No space left on device"):
        asyncio.run(checkpoint.write(tmp_path, 1, fill))
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_half_written_is_not_found(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".step_000002.partial").mkdir()
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step_000001"]


def test_checkpoint_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        write(tmp_path, step)
    checkpoint.prune(tmp_path, 2)
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step_000002", "step_000030"]


def test_checkpoint_of_lost_weights_is_not_the_newest_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        write(folder, step)
    checkpoint.set_aside(folder, after=10)
    assert checkpoint.newest(tmp_path).name == "step_000010"
    write(folder, 15)
    assert checkpoint.newest(tmp_path).name == "step_000015"
    assert (folder / "step_000030.rolled_back" / "model" / "weights.bin").exists()


def test_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 5, {"a": b"old"})
    path = write(tmp_path, 5, {"a": b"new"})
    checkpoint.verify(path)
    assert (path / "a").read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_checkpoint_whose_replacement_was_killed_is_found_again(tmp_path: Path) -> None:
    """Between two renames neither the old nor the new one had its name."""
    made = write(tmp_path / "checkpoints", 10, {"weights": b"old"})
    made.rename(made.with_name(f".{made.name}.replaced"))
    assert checkpoint.newest(tmp_path) == made
    checkpoint.verify(made)
    assert [p.name for p in made.parent.iterdir()] == [made.name]


def test_checkpoint_is_hashed_once_while_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume looks at it when its configuration is read, and again before it starts."""
    path, read = write(tmp_path, 10), []
    digest = checkpoint._digest
    monkeypatch.setattr(
        checkpoint, "_digest", lambda file: (read.append(file.name), digest(file))[1]
    )
    checkpoint.verify(path)
    checkpoint.verify(tmp_path / "." / path.name)
    assert sorted(read) == ["state.json", "weights.bin"]
    weights = path / "model/weights.bin"
    stat = weights.stat()
    time.sleep(0.02)  # more than a tick of the file system's clock
    weights.write_bytes(b"abd")  # of the same size
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # and made to look as old
    with pytest.raises(CheckpointError, match=r"weights\.bin is damaged"):
        checkpoint.verify(path)


def test_checkpoint_newest_explains_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such directory"):
        checkpoint.newest(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no checkpoint in") as caught:
        checkpoint.newest(tmp_path)
    # its name is taken, and "continue it with resume=" led back here
    assert "started again under another run.name (checkpoint_every=N" in str(caught.value)


@pytest.mark.parametrize(
    ("meant", "said"),
    [
        ("arithmetic-20260101", ["runs/arithmetic-20260101-12", "runs/arithmetic-20260101-11"]),
        ("arithmetic-20260101-12", ["runs/arithmetic-20260101-12"]),
        ("aritmetic-20260101-12", ["runs/arithmetic-20260101-12"]),
        ("runs/arithmetic-20260101-13", ["runs/arithmetic-20260101-12"]),
        ("runs/mine/checkpoints/step_000005", ["runs/mine/checkpoints/step_000004"]),
        ("runs/min/checkpoints/step_000004", ["runs/mine"]),
        ("here", ["her"]),
        ("notes-of-mine", []),
    ],
)
def test_resume_of_a_name_that_is_nowhere_says_what_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meant: str, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("arithmetic-20260101-11", "arithmetic-20260101-12", "mine"):
        write(tmp_path / "runs" / name / "checkpoints", 4)
    write(tmp_path / "her" / "checkpoints", 4)
    (tmp_path / "runs" / "notes-of-mine-too").mkdir()
    with pytest.raises(ConfigError, match=f"resume={meant}: there is no such directory") as caught:
        checkpoint.newest(Path(meant), runs=Path("runs"))
    _, asked, close = str(caught.value).partition("; did you mean ")
    assert bool(asked) == bool(said)
    assert close.startswith(" or ".join(said))


def test_checkpoint_manifest_covers_every_file(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    assert set(json.loads((path / "manifest.json").read_text())) == {
        "model/weights.bin",
        "state.json",
    }
