"""Reading a run directory back."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.errors import ConfigError
from miles.records.record import read


def put(directory: Path, *lines: object, name: str = "metrics.jsonl") -> Path:
    directory.mkdir(exist_ok=True)
    text = "".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines)
    (directory / name).write_text(text, encoding="utf-8")
    return directory


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """As a process does whose run is going on."""
    with (directory / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


STARTED = {"moment": "run_started", "at": 100.0, "steps": {"sft": 2, "grpo": 3}}
STEP = {"moment": "step_finished", "at": 101.0, "step": 1, "stage": "sft", "lr": 1e-3}
SCORE = {"moment": "evaluated", "at": 102.0, "step": 1, "set": "heldout", "eval/heldout/score": 0.5}
END = {"moment": "run_finished", "at": 103.0, "outcome": "finished"}


def test_read_keeps_a_finished_run(tmp_path: Path) -> None:
    put(tmp_path, {"step": 25, "text": "4"}, name="samples.jsonl")
    (tmp_path / "plugins.json").write_text('{"distributions": {"miles": "0.1.0"}}')
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    record = read(put(tmp_path, STARTED, STEP, SCORE, {"moment": "warned", "text": "w"}, END))
    assert [s["step"] for s in record.steps] == [1]
    assert [e["eval/heldout/score"] for e in record.evaluations] == [0.5]
    assert record.warnings == ("w",)
    assert record.stages == ("sft", "grpo")
    assert record.planned == {"sft": 2, "grpo": 3}
    assert (record.outcome, record.seconds, record.unreadable) == ("finished", 3.0, 0)
    assert record.samples[0]["text"] == "4"
    assert record.plugins == {"distributions": {"miles": "0.1.0"}}
    assert record.config == "seed: 0\n"


def test_read_says_why_a_run_failed_unless_it_was_resumed_since(tmp_path: Path) -> None:
    failed = {**END, "outcome": "failed", "why": "trainer: gone"}
    record = read(put(tmp_path, STARTED, failed))
    assert (record.outcome, record.why) == ("failed", "trainer: gone")
    assert read(put(tmp_path, STARTED, failed, STARTED, END)).why == ""


def test_read_of_a_run_in_progress_forgives_the_line_being_written(tmp_path: Path) -> None:
    with hold(tmp_path):
        record = read(put(tmp_path, STARTED, STEP, '{"moment": "step_fin'))
    assert (record.outcome, len(record.steps), record.unreadable) == ("running", 1, 0)


def test_read_counts_lines_that_are_broken_in_the_middle(tmp_path: Path) -> None:
    record = read(put(tmp_path, STARTED, '{"moment": "st\n', "[1]\n", "\n", STEP))
    assert (len(record.steps), record.unreadable) == (1, 2)


def test_read_takes_the_last_of_a_step_and_leaves_pauses_out(tmp_path: Path) -> None:
    again = {**STARTED, "at": 1000.0}
    record = read(put(tmp_path, STARTED, STEP, END, again, {**STEP, "at": 1001.0, "lr": 2e-3}))
    assert [s["lr"] for s in record.steps] == [2e-3]
    assert record.seconds == 4.0
    assert record.outcome == "unfinished"  # begun again, and no end since


def test_read_of_an_empty_directory_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run here: neither metrics.jsonl nor config.yaml"):
        read(tmp_path)


def test_read_without_metrics_is_an_empty_record(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    record = read(tmp_path)
    assert (record.steps, record.stages, record.outcome) == ((), (), "unrecorded")


def test_read_of_a_run_without_an_end_asks_whether_somebody_holds_it(tmp_path: Path) -> None:
    put(tmp_path, STARTED, STEP)
    assert read(tmp_path).outcome == "unfinished"  # moved here without its lock
    with hold(tmp_path):
        assert read(tmp_path).outcome == "running"
    assert read(tmp_path).outcome == "unfinished"  # killed: the lock is free
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # reading it left nothing behind


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 400), noise=st.binary(max_size=30))
def test_read_survives_any_damage(
    tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes
) -> None:
    directory = put(tmp_path_factory.mktemp("run"), STARTED, STEP, SCORE, END)
    path = directory / "metrics.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:cut] + noise + data[cut:])
    record = read(directory)
    assert len(record.steps) <= 1
