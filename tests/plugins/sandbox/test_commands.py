"""`miles sandboxes list` and `clean`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles import Context, Task
from miles.cli import main
from miles_plugins.sandbox.none import Unsandboxed

TASK = Task(id="t", prompt="")
HOLD = """
import asyncio, sys
from pathlib import Path
from miles import Context, Task
from miles_plugins.sandbox.none import Unsandboxed
async def run():
    sandbox = Unsandboxed(Unsandboxed.Config(), Context(directory=Path(sys.argv[1])))
    box = await sandbox.open(Task(id="t", prompt=""))
    print(box.id, flush=True)
    await asyncio.sleep(60)
asyncio.run(run())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Where boxes of `none` keep their files in this test."""
    place = tmp_path / "boxes"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    return place


def leftover(folder: Path, number: str, owner: str) -> Path:
    """The folder of a box whose supervisor was killed."""
    left = folder / f"miles-none-{number}-{owner}-abcd"
    left.mkdir()
    return left


def gone() -> str:
    """The identity of a process of this machine that has ended."""
    code = "from miles import process_identity; print(process_identity())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_sandboxes_list_shows_every_box_with_its_owner(folder, tmp_path, capsys) -> None:
    leftover(folder, "1111111111", "elsewhere.1.2")
    leftover(folder, "2222222222", gone())

    async def opened() -> str:
        sandbox = Unsandboxed(Unsandboxed.Config(), Context(directory=tmp_path / "my-run"))
        box = await sandbox.open(TASK)
        try:
            assert await asyncio.to_thread(main, ["sandboxes", "list", "sandbox=none"]) == 0
            assert await asyncio.to_thread(main, ["sandboxes", "list", "--json"]) == 0
        finally:
            await box.close()
        return box.id

    id = asyncio.run(opened())
    out = capsys.readouterr().out
    table, _, data = out.partition("\n[\n")
    lines = {line.split()[1]: line for line in table.splitlines()[1:-1]}
    assert "running" in lines[id] and "my-run" in lines[id] and "(" not in lines[id]
    assert "(elsewhere)" in lines["miles-1111111111"]
    assert "(gone)" in lines["miles-2222222222"]
    assert "left behind: miles sandboxes clean" in table
    found = {box["id"]: box for box in json.loads(f"[{data}")}
    assert found[id]["alive"] is True and found[id]["sandbox"] == "none"
    assert found["miles-2222222222"]["alive"] is False


@pytest.mark.slow
def test_sandboxes_clean_removes_what_was_left_behind_alone(folder, tmp_path, capsys) -> None:
    other = leftover(folder, "1111111111", "elsewhere.1.2")
    left = leftover(folder, "2222222222", gone())
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        id = run.stdout.readline().strip()
        assert main(["sandboxes", "clean", "sandbox=none", "--dry-run"]) == 0
        assert "would remove none miles-2222222222\n1 box would be" in capsys.readouterr().out
        assert left.exists()
        assert main(["sandboxes", "clean", "sandbox=none"]) == 0
        out = capsys.readouterr().out
        assert "removed none miles-2222222222\n" in out and "1 box removed" in out
        assert "kept: in use (--all removes them too)" in out
        assert "1 kept: opened by another machine (--older-than HOURS" in out
        assert not left.exists() and other.exists() and run.poll() is None
        assert main(["sandboxes", "clean", "sandbox=none", "--older-than", "0"]) == 0
        assert not other.exists()
        assert main(["sandboxes", "clean", "sandbox=none", "--id", id]) == 0
        assert f"removed none {id}\n" in capsys.readouterr().out
        assert not list(folder.iterdir())
    finally:
        run.kill()
        run.communicate()


def test_sandboxes_of_an_unknown_id_names_those_there_are(folder, capsys) -> None:
    leftover(folder, "1111111111", "elsewhere.1.2")
    assert main(["sandboxes", "clean", "sandbox=none", "--id", "nope"]) == 2
    assert "no box is called nope; there are: miles-" in capsys.readouterr().err


def test_sandboxes_refuses_an_override_that_means_nothing(capsys) -> None:
    assert main(["sandboxes", "list", "sandbox=none", "sandbox.colour=red"]) == 2
    assert "sandbox 'none' has no key 'colour'" in capsys.readouterr().err
    assert main(["sandboxes", "list", "seed=1"]) == 2
    assert "no sandbox is chosen; choose one with sandbox=NAME" in capsys.readouterr().err
