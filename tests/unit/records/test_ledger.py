"""The ledger's lineage: what was rolled back does not count."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from miles import RunError
from miles.records.ledger import Ledger, fates


def test_ledger_reads_back_fates(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.write(step=1, started=3, ended=[(0, "trained"), (1, "zero_variance")])
    ledger.write(step=2, started=4, ended=[(2, "trained")])
    ledger.close()
    assert fates(tmp_path / "ledger.jsonl") == {
        0: ["trained"],
        1: ["zero_variance"],
        2: ["trained"],
    }


def test_ledger_rolled_back_entries_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write(step=1, started=1, ended=[(0, "trained")])
    kept = ledger.offset
    ledger.write(step=2, started=2, ended=[(1, "trained")])
    ledger.close()
    again = Ledger(path)
    assert again.offset > kept
    again.roll_back(kept)
    again.write(step=2, started=2, ended=[(1, "trained")])
    again.roll_back(again.offset)  # nothing after: writes nothing
    again.close()
    assert fates(path) == {0: ["trained"], 1: ["trained"]}


def test_ledger_ignores_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write(step=1, started=1, ended=[(0, "trained")])
    ledger.close()
    with path.open("ab") as file:
        file.write(b'{"step":2,"trai')
    assert fates(path) == {0: ["trained"]}


def test_ledger_after_a_crash_in_a_line_is_read_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write(step=1, started=1, ended=[(0, "trained")])
    kept = ledger.offset
    ledger.write(step=2, started=2, ended=[(1, "trained")])
    ledger.close()
    with path.open("ab") as file:
        file.write(b'{"step":3,"trai')
    again = Ledger(path)
    again.roll_back(kept)
    again.write(step=2, started=2, ended=[(1, "length")])
    again.close()
    assert fates(path) == {0: ["trained"], 1: ["length"]}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
def test_ledger_on_a_full_disk_closes_without_another_error(tmp_path: Path) -> None:
    """What the file still held was written again at its end, and that error hid the first."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger._file = open("/dev/full", "ab")  # noqa: SIM115 - the ledger closes it
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        ledger.write(step=1, started=1, ended=[(0, "trained")])
    ledger.close()


def test_ledger_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(RunError, match=r"ledger\.jsonl: cannot be written: No space left"):
        ledger.write(step=1, started=1, ended=[(0, "trained")])
