"""The fsdp trainer on GPUs: the CPU's numbers, memory that sleep gives back, and two ranks on
NCCL."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

RANKS = Path(__file__).with_name("test_fsdp_ranks.py")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def weights(trainer):
    return {name: tensor.float().cpu().clone() for name, tensor in trainer.export()}


def test_a_gpu_steps_as_the_cpu_does(make_trainer, make_batch, tokens):
    cpu, gpu = make_trainer(device="cpu"), make_trainer(device="cuda")
    np.testing.assert_allclose(
        gpu.logprobs(tokens, "current"), cpu.logprobs(tokens, "current"), atol=2e-5
    )
    for _ in range(3):
        a, b = cpu.step(make_batch()).metrics, gpu.step(make_batch()).metrics
        assert a["loss/nll"] == pytest.approx(b["loss/nll"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    one, two = weights(cpu), weights(gpu)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sleep_frees_the_gpu_and_wake_continues(make_trainer, make_batch, tokens, precision):
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    sleeper, other = (make_trainer(device="cuda", precision=precision) for _ in range(2))
    for trainer in (sleeper, other):
        trainer.logprobs(tokens, "reference")
        trainer.step(batch)
    before = torch.cuda.memory_allocated()
    sleeper.sleep()
    held = sum(m.numel() for m in sleeper._worker.masters.named.values()) * 4
    assert before - torch.cuda.memory_allocated() > 3.5 * held  # weights, two moments, reference
    sleeper.wake()
    assert sleeper.step(batch).metrics == other.step(batch).metrics
    a, b = (t.logprobs(tokens, "reference") for t in (sleeper, other))
    assert (a == b).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus_equal_one(tmp_path, precision):
    runpy.run_path(str(RANKS))["check"](tmp_path, precision, "cuda")
