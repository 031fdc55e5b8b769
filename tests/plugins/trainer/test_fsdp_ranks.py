"""Two ranks on gloo train as one process does."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from miles import Settings, TrainerError
from miles.testing import context
from miles_plugins.trainer.fsdp import ranks

SCRIPT = Path(__file__).with_name("one_rank.py")


def run_alone(directory, precision, device):
    """Run one process's job here; what it saw."""
    runpy.run_path(str(SCRIPT))["main"]("0", "1", "", str(directory), precision, device)
    return dict(np.load(directory / "rank_0_of_1.npz"))


def on_one_gpu(rank, world, device):
    """Variables with which NCCL takes ranks that share a GPU for ranks of different machines, and
    connects them by sockets; it refuses them otherwise."""
    shared = device == "cuda" and torch.cuda.device_count() < world
    return {"NCCL_HOSTID": f"rank-{rank}"} if shared else {}


def run(directory, world, precision, device, fields="{}"):
    """Run `world` ranks to the end; what each of them saw."""
    master = f"file://{directory}/meeting"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                *map(str, (rank, world, master, directory, precision, device, fields)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **on_one_gpu(rank, world, device)},
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [p.returncode for p in processes] == [0] * world, "\n".join(said)
    return [dict(np.load(directory / f"rank_{r}_of_{world}.npz")) for r in range(world)]


def compare(name, found, value, precision):
    """Rounding in bfloat16 turns a few tiny gradients around, and Adam's first steps are all as
    long as `lr`: there weights may be two steps apart, but on average they are close."""
    if precision == "fp32":
        np.testing.assert_allclose(found, value, rtol=2e-4, atol=2e-5, err_msg=name)
    elif name.startswith("weight/"):
        assert np.abs(found - value).max() < 0.05, name
        assert np.abs(found - value).mean() < 0.001, name
    else:
        np.testing.assert_allclose(found, value, rtol=0.05, atol=0.02, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_ranks_equal_one(tmp_path, precision):
    """Losses, gradient norms, weights, log-probs, and an exact continuation from disk; one step has
    fewer samples than ranks, micro-batches are unequal in number, and in bf16 blocks are
    recomputed."""
    check(tmp_path, precision, "cpu")


def check(directory, precision, device, fields="{}"):
    """Run both and compare; `test_fsdp_cuda` does so on GPUs."""
    alone = run_alone(directory, precision, device)
    both = run(directory, 2, precision, device, fields)
    for found in both:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            compare(name, found[name], value, precision)
    for name, value in both[0].items():
        np.testing.assert_array_equal(both[1][name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 2},
        {"offload_parameters": True},
        {"offload_parameters": True, "optimizer_state": "host"},
        {"optimizer_state": "disk", "balance": "tokens"},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_two_ranks_with_memory_elsewhere_or_replicas_equal_two_that_shard(tmp_path, fields):
    """Bit for bit where nothing is added up in another order; with sleep, resume and a bf16
    forward."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain = run(tmp_path / "plain", 2, "bf16", "cpu")
    other = run(tmp_path / "other", 2, "bf16", "cpu", json.dumps(fields))
    exact = "replicas" not in fields and "balance" not in fields
    for found, expected in zip(other, plain, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if exact:
                np.testing.assert_array_equal(found[name], value, err_msg=name)
            else:
                compare(name, found[name], value, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "precision", "fields"),
    [
        (2, "fp32", {"context_parallel": 2}),
        (2, "bf16", {"context_parallel": 2, "share_prompts": False}),
        (2, "fp16", {"context_parallel": 2, "optimizer_state": "host"}),
        (4, "fp32", {"context_parallel": 4}),
        (4, "fp32", {"context_parallel": 2, "replicas": 2, "optimizer_state": "host"}),
    ],
    ids=str,
)
def test_ranks_that_share_samples_equal_one(tmp_path, world, precision, fields):
    """By tokens, and in attention by heads; four ranks have more than there are key heads."""
    alone = run_alone(tmp_path, precision, "cpu")
    for found in run(tmp_path, world, precision, "cpu", json.dumps(fields)):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            compare(name, found[name], value, precision)


def test_ranks_that_cannot_meet_say_where(tmp_path):
    hurried = Settings(worker_timeout_s=1)
    around = context(tmp_path, settings=hurried, rank=1, world=2, master="127.0.0.1:9")
    with pytest.raises(
        TrainerError, match=r"rank 1 of 2 could not meet the others at '127.0.0.1:9'"
    ):
        ranks.join(around, "cpu")


@pytest.mark.slow
def test_ranks_meet_at_a_host_and_port(tmp_path):
    """As several machines do: rank 0 listens there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    both = meet(f"127.0.0.1:{port}")
    assert both == ["0 of 2: 3.0", "1 of 2: 3.0"]


@pytest.mark.slow
def test_ranks_meet_at_a_file(tmp_path):
    assert meet(f"file://{tmp_path}/meeting") == ["0 of 2: 3.0", "1 of 2: 3.0"]


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_told_by_all_and_throws_none_out_of_step(tmp_path):
    script = str(SCRIPT.with_name("one_full_disk.py"))
    master = f"file://{tmp_path}/meeting"
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), master, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [p.returncode for p in processes] == [0, 0], "\n".join(said)
    files = ("config.json", "model-00002-of", "model-00001-of", "rank_0", "rank_1")
    for number, file in enumerate(files):
        whose = int(file == "rank_1")
        for rank, text in enumerate(said):
            line = next(x for x in text.splitlines() if x.startswith(f"{number}: "))
            assert "cannot write" in line and file in line and "No space left" in line
            assert (f"saved_{number} is not complete: rank {whose}: " in line) == (rank != whose)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"context_parallel": 2}, {"replicas": 2}], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_both(tmp_path, fields):
    """Weights keep their bits, the scale halves, and the next step is good, the same on both."""
    script = str(SCRIPT.with_name("one_overflow.py"))
    master = f"file://{tmp_path}/meeting"
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), master, str(tmp_path), json.dumps(fields)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [p.returncode for p in processes] == [0, 0], "\n".join(said)
    one, two = (json.loads(text.splitlines()[-1]) for text in said)
    assert one == two
    assert one["skipped"] == [0.0, 1.0, 0.0] and one["same"] == [False, True, False]
    assert one["scale"] == [65536.0, 65536.0, 32768.0]


MEET = """
import sys
import torch
from miles.testing import context
from miles_plugins.trainer.fsdp import ranks
rank, master = int(sys.argv[1]), sys.argv[2]
found = ranks.join(context(".", rank=rank, world=2, master=master), "cpu")
print(f"{found.rank} of {found.world}: {found.add(torch.tensor(1.0 + rank)).item()}")
"""


def meet(master):
    """What two ranks print that meet there and add up."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, str(rank), master], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    return [process.communicate(timeout=120)[0].strip() for process in processes]
