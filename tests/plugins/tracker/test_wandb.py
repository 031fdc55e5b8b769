"""The wandb tracker in offline mode, read back from W&B's own file format."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles import ConfigError, Context
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


def test_wandb_refuses_an_empty_project(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tracker wandb: project: is empty"):
        Wandb(Wandb.Config(project=""), Context(directory=tmp_path))
