"""The fsdp trainer on GPUs: the CPU's numbers, memory that sleep gives back, and two ranks on
NCCL."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miles import flatten
from miles.testing import make_sample
from miles_plugins.precision.bf16 import Bf16

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


def test_experts_on_a_gpu_step_as_on_the_cpu(make_trainer, make_batch, tokens, experts):
    cpu, gpu = (make_trainer(device=device, model=experts) for device in ("cpu", "cuda"))
    for _ in range(3):
        a, b = cpu.step(make_batch()).metrics, gpu.step(make_batch()).metrics
        assert a["loss/nll"] == pytest.approx(b["loss/nll"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    np.testing.assert_allclose(
        gpu.logprobs(tokens, "current"), cpu.logprobs(tokens, "current"), atol=2e-4
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
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
    found, expected = (
        {n: v for n, v in t.step(batch).metrics.items() if not n.startswith("trainer/")}
        for t in (sleeper, other)
    )
    assert found == expected
    a, b = (t.logprobs(tokens, "reference") for t in (sleeper, other))
    assert (a == b).all()


@pytest.mark.parametrize("kept", ["host", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_streamed_state_steps_as_resident_state_does(
    make_trainer, make_batch, tokens, precision, kept
):
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    fields = {"device": "cuda", "precision": precision, "optimizer_bucket_mb": 1}
    resident, streamed = (make_trainer(optimizer_state=k, **fields) for k in ("resident", kept))
    for _ in range(3):
        resident.step(batch)
        streamed.step(batch)
    one, two = weights(resident), weights(streamed)
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("way", ["varlen", "flex", "cudnn"])
def test_every_kernel_attends_as_padding_does(make_trainer, tokens, way):
    shape = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 64, "init_std": 0.1}
    padded, other = (
        make_trainer(device="cuda", precision="bf16", model=shape, attention=name)
        for name in ("padded", way)
    )
    a, b = (t.logprobs(tokens, "current") for t in (padded, other))
    assert np.abs(a - b).mean() < 0.01


@pytest.mark.parametrize("compile_", ["none", "layers"])
def test_finer_roundings_bring_bf16_nearer_to_float32(make_trainer, make_batch, compile_):
    shape = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 8}
    shape["init_std"] = 0.35
    tokens = flatten([make_sample(2, 200, seed=i) for i in range(6)])
    plain = make_trainer(device="cuda", precision="bf16", model=shape)
    exact = make_trainer(device="cuda", model=shape)
    for name, tensor in plain.export():
        dict(exact._worker.policy.model.named_parameters())[name].data.copy_(tensor)
    wanted = exact.logprobs(tokens, "current")
    gaps = []
    for rounding in ({}, {"logits": "float32"}, {"logits": "float32", "residual": "float32"}):
        trainer = make_trainer(
            device="cuda", precision=Bf16.Config(**rounding), model=shape, compile=compile_
        )
        gaps.append(np.abs(trainer.logprobs(tokens, "current") - wanted).mean())
        trainer.step(make_batch(tokens=replace(tokens, logprobs=None)))
    print(gaps)
    assert gaps[1] < gaps[0]
    assert gaps[2] < 0.9 * gaps[1]


@pytest.mark.parametrize(
    ("precision", "fields"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("fp16", {}),
        ("bf16", {"optimizer_state": "host"}),
        ("fp32", {"context_parallel": 2}),
        ("bf16", {"context_parallel": 2}),
    ],
    ids=str,
)
def test_two_ranks_on_nccl_equal_one(tmp_path, precision, fields):
    """Each on a GPU of its own, or both on the only one."""
    runpy.run_path(str(RANKS))["check"](tmp_path, precision, "cuda", json.dumps(fields))
