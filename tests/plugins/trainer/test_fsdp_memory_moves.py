"""What leaves the device and comes back, to the bit: a paused trainer's memory, and streamed
optimizer state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import ConfigError, TrainerError
from miles_plugins.trainer.fsdp.host import mapped_array
from miles_plugins.trainer.fsdp.streaming import Streamed

FIELDS = {"weight_decay": 0.1, "grad_clip": 0.5, "micro_batch_tokens": 24}


def state(trainer):
    """Everything that a step depends on."""
    masters = trainer._worker.masters
    return {
        **{f"weight {name}": t.detach().clone() for name, t in masters.named.items()},
        **{f"moment {name}": t.clone() for name, t in masters.moments().items()},
        **{f"copy {n}": p.detach().clone() for n, p in trainer._worker.policy.named_parameters()},
    }


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kept", ["resident", "host", "disk"])
def test_sleep_empties_the_device_and_wake_brings_every_bit_back(
    make_trainer, make_batch, tokens, precision, kept
):
    """With streamed state, both are at work: what streams does not have to leave."""
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    fields = {"precision": precision, "optimizer_state": kept, **FIELDS}
    sleeper = make_trainer(sleep_to="host", **fields)
    other = make_trainer(**fields)
    for trainer in (sleeper, other):
        trainer.logprobs(tokens, "reference")
        trainer.step(batch)
    worker = sleeper._worker
    before = state(sleeper)
    sleeper.sleep()
    numbers = sum(p.numel() for p in worker.policy.parameters())
    reference = 4 * numbers
    own = (4 if precision == "fp32" else 2) * numbers
    moments = 0 if kept != "resident" else 8 * numbers
    masters = 4 * numbers if precision != "fp32" and kept == "resident" else 0
    assert worker.meter.left.bytes >= own + reference + moments + masters
    assert worker.meter.left.bytes < 1.02 * (own + reference + moments + masters) + 4096
    assert all(p.untyped_storage().nbytes() == 0 for p in worker.policy.parameters())
    for ask in (
        lambda: sleeper.step(batch),
        lambda: sleeper.logprobs(tokens, "current"),
        lambda: list(sleeper.export()),
    ):
        with pytest.raises(TrainerError, match="asked of a trainer asleep; wake it first"):
            ask()
    sleeper.sleep()  # again: nothing to do
    sleeper.wake()
    assert worker.meter.returned.bytes == worker.meter.left.bytes
    assert_same(before, state(sleeper))
    assert sleeper.step(batch).metrics == other.step(batch).metrics
    assert_same(state(sleeper), state(other))
    a, b = (t.logprobs(tokens, "reference") for t in (sleeper, other))
    assert (a == b).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kept", ["host", "disk"])
def test_streamed_state_steps_as_resident_state_does_to_the_bit(
    make_trainer, make_batch, tokens, monkeypatch, tmp_path, precision, kept
):
    """Also over a checkpoint, which either of them reads; buckets are smaller than weights."""
    fields = {"precision": precision, "warmup_steps": 2, **FIELDS}
    resident = make_trainer(**fields)
    monkeypatch.setattr("miles_plugins.trainer.fsdp.worker.MIB", 640)  # elements of a bucket
    streamed = make_trainer(optimizer_state=kept, optimizer_bucket_mb=1, **fields)
    assert len(streamed._worker.masters.streamed._buckets) > 20
    for trainer in (resident, streamed):
        trainer.logprobs(tokens, "reference")
    for _ in range(3):
        assert streamed.step(make_batch()).metrics == resident.step(make_batch()).metrics
    assert_same(state(streamed), state(resident))
    exported = [dict(t.export()) for t in (streamed, resident)]
    assert_same(*exported)
    streamed.save(tmp_path / "s")
    resident.save(tmp_path / "r")
    for file in (path for path in (tmp_path / "s").rglob("*") if path.is_file()):
        twin = tmp_path / "r" / file.relative_to(tmp_path / "s")
        assert file.read_bytes() == twin.read_bytes(), file
    resumed = make_trainer(seed=3, optimizer_state=kept, **fields)
    resumed.load(tmp_path / "r")
    assert resumed.step(make_batch()).metrics == resident.step(make_batch()).metrics
    assert_same(state(resumed), state(resident))
    a, b = (t.logprobs(tokens, "reference") for t in (resumed, resident))
    assert (a == b).all()


@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=6),
    bucket=st.integers(1, 900),
    missing=st.sets(st.integers(0, 5)),
    take=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_cut_into_buckets_gives_the_same_bits(sizes, bucket, missing, take):
    """Weights larger and smaller than a bucket, empty ones, ones without a gradient."""
    torch.manual_seed(sum(sizes))
    weights = {str(i): torch.randn(size) for i, size in enumerate(sizes)}
    plain = {name: w.clone().requires_grad_() for name, w in weights.items()}
    decays = {name: 0.1 * (int(name) % 2) for name in weights}
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": decays[name]} for name, p in plain.items()],
        lr=1e-2, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    streamed = Streamed(
        weights, device=torch.device("cpu"), betas=(0.9, 0.95), eps=1e-8, decays=decays,
        bucket=bucket, directory=None, take=take,
    )  # fmt: skip
    copies = {name: torch.zeros(len(w), dtype=torch.bfloat16) for name, w in weights.items()}
    for turn in range(3):
        gradients = {
            name: torch.randn(len(w))
            for name, w in weights.items()
            if turn != 1 or int(name) not in missing
        }
        for name, parameter in plain.items():
            parameter.grad = gradients.get(name)
        adamw.step()
        streamed.step(gradients, lr=1e-2, copies=copies)
    for name, parameter in plain.items():
        assert torch.equal(streamed.weights[name], parameter.detach())
        assert torch.equal(copies[name], parameter.detach().bfloat16())
        if parameter.numel():
            held = adamw.state[parameter]
            for key, value in streamed.state(name).items():
                assert torch.equal(value, held[key]), key


def test_a_disk_too_small_for_the_state_is_said_before_a_step(tmp_path):
    with pytest.raises(TrainerError, match=r"cannot keep \d+ bytes of optimizer state in .*disk"):
        mapped_array(2**57, torch.float32, tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_mapped_state_leaves_no_file(tmp_path):
    array = mapped_array(1000, torch.float32, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not array.any()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer_dir": "x"}, "optimizer_dir is 'x', but optimizer_state is resident"),
        ({"optimizer_bucket_mb": 0}, "optimizer_bucket_mb is 0; at least 1"),
        ({"replicas": 2, "workers": 3}, r"replicas \(2\) must divide workers \(3\)"),
        ({"context_parallel": 2}, r"context_parallel \(2\) must divide workers \(1\)"),
        ({"context_parallel": 3, "workers": 3}, "4 attention heads, no multiple of it"),
        ({"attention": "varlen"}, "attention varlen needs a GPU, but device is cpu"),
        ({"peak_tflops": 0.0}, "peak_tflops is 0.0; above 0"),
    ],
)
def test_combinations_that_cannot_be_are_refused(make_trainer, fields, said):
    with pytest.raises(ConfigError, match=said):
        make_trainer(**fields)
