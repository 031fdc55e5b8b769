"""The wandb tracker in offline mode, read back from W&B's own file format."""

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles import ConfigError, Context
from miles.check import check
from miles.config import compose
from miles_plugins.tracker.wandb import Wandb

wandb = pytest.importorskip("wandb")

KEY = "0123456789abcdef0123456789abcdef01234567"


def drive(directory: Path, **config: Any) -> None:
    tracker = Wandb(Wandb.Config(**config), Context(directory=directory))
    tracker.moment("step_finished", {"step": 0})  # before the run: nothing to log to
    tracker.moment("run_started", {"name": "n", "config": {"seed": 3}})
    for step in (1, 2):
        tracker.moment("step_finished", {"step": step, "stage": "grpo", "reward/mean": step / 2})
    tracker.moment("evaluated", {"step": 2, "set": "heldout", "score": 0.5, "version": 2})
    tracker.moment("run_finished", {"outcome": "finished", "directory": "x", "seconds": 1.0})
    tracker.close()
    tracker.close()


def records(data: bytes) -> Iterator[bytes]:
    """The LevelDB log format after a 7-byte header: 32 KiB blocks of (crc, length, type, piece)."""
    at, parts = 7, []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or last of several
            yield b"".join(parts)
            parts = []


def history(directory: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # W&B's own process writes on after `finish` has returned
        found = []
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "exit":
                return found
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                pairs = {(i.key or "/".join(i.nested_key)): i.value_json for i in items}
                found.append({key: json.loads(value) for key, value in pairs.items()})
        time.sleep(0.05)
    raise AssertionError(f"{path} never got its exit record")


@pytest.mark.slow
def test_wandb_logs_offline_and_never_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "online")  # the configuration decides, not this
    drive(tmp_path, mode="offline", tags=("a", "b"))
    found = history(tmp_path)
    assert [x["reward/mean"] for x in found if "reward/mean" in x] == [0.5, 1.0]
    assert [x["eval/heldout/score"] for x in found if "eval/heldout/score" in x] == [0.5]
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(written) > 2
    assert not [p for p in written if KEY.encode() in p.read_bytes()]


def test_wandb_keeps_its_run_over_a_resume(tmp_path: Path) -> None:
    drive(tmp_path, mode="disabled")
    first = (tmp_path / "wandb-id").read_text()
    drive(tmp_path, mode="disabled")
    assert (tmp_path / "wandb-id").read_text() == first


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a key; returned is its folder."""
    for name in [n for n in os.environ if n.startswith(("WANDB_", "SM_", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(*overrides: str) -> str:
    plan = compose(["experiment=grpo", "tito=bytes", "tracker=[jsonl,wandb]", *overrides])
    return "\n".join(check(plan).faults)


def test_check_of_wandb_without_a_key_says_so_and_what_instead(nobody: Path) -> None:
    said = checked()
    assert "tracker 'wandb': mode=online, and there is no API key: neither in WANDB_API_KEY" in said
    assert "run `wandb login` first, or use tracker.wandb.mode=offline" in said
    assert checked("tracker.wandb.mode=offline") == checked("tracker.wandb.mode=disabled") == ""


@pytest.mark.parametrize(
    ("file", "text", "variables"),
    [
        ("", "", {"WANDB_API_KEY": KEY}),
        ("", "", {"MINE": KEY}),
        ("", "", {"WANDB_IDENTITY_TOKEN_FILE": "token"}),
        (".netrc", f"machine api.wandb.ai login user password {KEY}\n", {}),
        (".netrc", f"machine api.forge.coreweave.com login user password {KEY}\n", {}),
        ("_netrc", f"machine api.wandb.ai login user password {KEY}\n", {}),
        ("other", f"machine api.wandb.ai login user password {KEY}\n", {"NETRC": "other"}),
        (".netrc", f"machine w.org login a password {KEY}", {"WANDB_BASE_URL": "https://w.org"}),
        (".netrc", f"machine w.org login a password {KEY}", {"WANDB_BASE_URL": "http://w.org:80"}),
        (".config/wandb/settings", f"[default]\napi_key = {KEY}\n", {}),
        ("wandb/settings", f"[default]\napi_key = {KEY}\n", {}),
        ("set/settings", f"[default]\napi_key = {KEY}\n", {"WANDB_CONFIG_DIR": "set"}),
    ],
)
def test_check_of_wandb_finds_the_key_where_the_library_does(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if file:
        (nobody / file).parent.mkdir(parents=True, exist_ok=True)
        (nobody / file).write_text(text)
        (nobody / file).chmod(0o600)
    assert checked("tracker.wandb.api_key_env=MINE") == ""


@pytest.mark.parametrize(
    "text", ["machine other.org login a password b\n", "machine\n", "", "not netrc at all \\"]
)
def test_check_of_wandb_takes_no_other_entry_of_netrc_for_a_key(nobody: Path, text: str) -> None:
    (nobody / ".netrc").write_text(text)
    (nobody / ".config/wandb").mkdir(parents=True)
    (nobody / ".config/wandb/settings").write_text("no section = here")
    assert "there is no API key" in checked()


def test_check_of_wandb_where_nobody_has_a_home_says_that_there_is_no_key(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container whose user is only a number, pathlib raises for `~`."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 54321)
    assert "there is no API key" in checked()
    (nobody / "other").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    monkeypatch.setenv("NETRC", "other")
    assert checked() == ""


def test_wandb_refuses_an_empty_project(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tracker wandb: project: is empty"):
        Wandb(Wandb.Config(project=""), Context(directory=tmp_path))
