"""A sweep waits for the job that a Ctrl-C interrupts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from miles.composing.sweep import _ended


def test_sweep_interrupted_lets_its_job_write_a_checkpoint(tmp_path: Path) -> None:
    """The terminal sends the signal to both; the job is not killed over it."""
    done = tmp_path / "checkpoint"
    job = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"time.sleep(1.5); pathlib.Path({str(done)!r}).touch(); sys.exit(0)"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        for seconds in (0.3, 0.6):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert _ended([sys.executable, "-c", job]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exists()
