"""Two ranks on gloo train as one process does."""

from __future__ import annotations

import runpy
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from miles import TrainerError
from miles.testing import context
from miles_plugins.trainer.fsdp import ranks

SCRIPT = Path(__file__).with_name("one_rank.py")


def run_alone(directory, precision):
    """Run one process's job here; what it saw."""
    runpy.run_path(str(SCRIPT))["main"]("0", "1", "0", str(directory), precision)
    return dict(np.load(directory / "rank_0_of_1.npz"))


def run(directory, world, precision):
    """Run `world` ranks to the end; what each of them saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, (rank, world, port, directory, precision))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [p.returncode for p in processes] == [0] * world, "\n".join(said)
    return [dict(np.load(directory / f"rank_{r}_of_{world}.npz")) for r in range(world)]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_two_ranks_equal_one(tmp_path, precision):
    """Losses, gradient norms, weights, log-probs, and an exact continuation from disk; one step has
    fewer samples than ranks, micro-batches are unequal in number, and in bf16 blocks are
    recomputed."""
    alone = run_alone(tmp_path, precision)
    both = run(tmp_path, 2, precision)
    close = {"rtol": 2e-4, "atol": 2e-5} if precision == "fp32" else {"rtol": 0.05, "atol": 0.02}
    for found in both:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, err_msg=name, **close)
    for name, value in both[0].items():
        np.testing.assert_array_equal(both[1][name], value, err_msg=name)


def test_ranks_that_cannot_meet_say_where(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "TIMEOUT", timedelta(seconds=1))
    around = context(tmp_path, rank=1, world=2, master="127.0.0.1:9")
    with pytest.raises(
        TrainerError, match=r"rank 1 of 2 could not meet the others at '127.0.0.1:9'"
    ):
        ranks.join(around, "cpu")
