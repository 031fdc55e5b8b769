"""float16 in the fsdp trainer: the scale of the loss, and steps whose gradients overflow."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles import LossScaling, Term, TrainerError
from miles_plugins.precision.fp16 import Fp16
from miles_plugins.trainer.fsdp.scaling import Scale


def weights(trainer):
    return {name: m.detach().clone() for name, m in trainer._worker.masters.named.items()}


def assert_same(one, two):
    assert list(one) == list(two)
    for name in one:
        assert torch.equal(one[name], two[name]), name


@given(
    st.lists(st.booleans(), max_size=80),
    st.integers(1, 6),
    st.sampled_from([2.0, 4.0]),
    st.sampled_from([0.5, 0.25]),
)
def test_scale_follows_the_rule_of_torchs_scaler(steps, interval, growth, backoff):
    """The oracle is torch's own update of a scale and its counter."""
    rule = LossScaling(initial=2.0**16, growth=growth, backoff=backoff, interval=interval)
    scale = Scale(rule)
    value, counter = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    in_a_row = 0
    for good in steps:
        found = torch.tensor(0.0 if good else 1.0)
        torch._amp_update_scale_(value, counter, found, growth, backoff, interval)
        in_a_row = 0 if good else in_a_row + 1
        if value < 2.0**-10 or in_a_row == 20:
            with pytest.raises(TrainerError, match=f"overflowed in {in_a_row} steps in a row"):
                scale.follow(finite=good)
            return
        scale.follow(finite=good)
        assert (scale.value, scale.good) == (value.item(), counter.item())
        again = Scale(rule)
        again.set_state(json.loads(json.dumps(scale.state())))
        assert again.state() == scale.state()


def test_scale_stays_a_finite_float32():
    scale = Scale(LossScaling(initial=2.0**126, growth=2.0, backoff=0.5, interval=1))
    for _ in range(3):
        scale.follow(finite=True)
    assert scale.value == 2.0**127


def test_without_a_rule_the_scale_is_one():
    scale = Scale(None, ranks=3)
    scale.follow(finite=False)
    scale.set_state({"value": 8.0, "good": 1, "skipped": 0})
    assert (scale.value, scale.state()) == (1.0, {})
    assert (scale.on_loss, scale.on_gradients) == (3.0, 1.0)


@pytest.mark.parametrize("fields", [{}, {"micro_batch_tokens": 12}, {"optimizer_state": "host"}])
def test_fp16_trains_as_float32_does(make_trainer, make_batch, tokens, fields):
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    exact = make_trainer(eps=1e-4)
    half = make_trainer(precision="fp16", eps=1e-4, **fields)
    for _ in range(5):
        a, b = exact.step(batch).metrics, half.step(batch).metrics
        assert a["loss/nll"] == pytest.approx(b["loss/nll"], rel=1e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)
        assert (b["trainer/loss_scale"], b["trainer/skipped_steps"]) == (65536.0, 0.0)
    one, two = weights(exact), weights(half)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-2, atol=2e-4, msg=name)


def test_a_scale_changes_no_bit_of_a_step(make_trainer, make_batch, tokens):
    """Powers of two round nothing, as long as nothing is too small or too large for the type."""
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    one, two = (make_trainer(precision=Fp16.Config(loss_scale=2.0**p)) for p in (14, 17))
    a, b = one.step(batch).metrics, two.step(batch).metrics
    assert a["grad_norm"] == b["grad_norm"]
    assert_same(weights(one), weights(two))


def test_gradients_that_float16_would_lose_survive_by_the_scale(make_trainer, make_batch, tokens):
    tiny = make_batch().terms[0]
    tiny = replace(tiny, weights=tiny.weights * np.float32(1e-5))
    batch = make_batch(tiny, tokens=replace(tokens, logprobs=None))
    exact = make_trainer().step(batch).metrics["grad_norm"]
    scaled, bare = (
        make_trainer(precision=Fp16.Config(loss_scale=s)).step(batch).metrics["grad_norm"]
        for s in (65536.0, 1.0)
    )
    assert scaled == pytest.approx(exact, rel=0.01)
    assert bare < 0.9 * exact


@pytest.mark.parametrize("kept", ["resident", "host", "disk"])
def test_an_overflow_skips_the_step_and_halves_the_scale(make_trainer, make_batch, tokens, kept):
    """The version counts on, the weights and moments keep their bits, and the next step is good."""
    tokens = replace(tokens, logprobs=None)
    fields = {"optimizer_state": kept, "micro_batch_tokens": 24}
    trainer = make_trainer(precision="fp16", **fields)
    nll = make_batch().terms[0]
    large = make_batch(replace(nll, weights=nll.weights * np.float32(1e6)), tokens=tokens)
    trainer.step(make_batch(tokens=tokens))
    before, moments = weights(trainer), trainer._worker.masters.moments()
    moments = {name: tensor.clone() for name, tensor in moments.items()}
    copies = {name: t.clone() for name, t in trainer.export()}
    update = trainer.step(large)
    assert (update.version, trainer.version) == (2, 2)
    assert update.metrics["trainer/skipped_steps"] == 1.0
    assert update.metrics["trainer/loss_scale"] == 65536.0
    assert "grad_norm" not in update.metrics
    assert all(np.isfinite(value) for value in update.metrics.values())
    (warning,) = update.warnings
    assert "step 2 changed no weight" in warning and "the scale is 32768 now" in warning
    assert "model." in warning
    assert_same(before, weights(trainer))
    assert_same(moments, trainer._worker.masters.moments())
    assert_same(copies, dict(trainer.export()))
    update = trainer.step(make_batch(tokens=tokens))
    assert (update.version, update.warnings) == (3, ())
    assert update.metrics["trainer/loss_scale"] == 32768.0
    assert update.metrics["trainer/skipped_steps"] == 0.0
    assert trainer._worker.masters.moments()["model.norm.weight:step"] == 2.0
    after = weights(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_scale_grows_after_the_interval(make_trainer, make_batch, tokens):
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    trainer = make_trainer(precision=Fp16.Config(loss_scale=256.0, scale_interval=2))
    scales = [trainer.step(batch).metrics["trainer/loss_scale"] for _ in range(5)]
    assert scales == [256.0, 256.0, 512.0, 512.0, 1024.0]


def test_steps_that_learn_nothing_do_not_raise_the_scale(make_trainer, make_batch, tokens):
    """After a while of equal rewards it had grown so far that the next gradients ended the run."""
    tokens = replace(tokens, logprobs=None)
    nll = make_batch().terms[0]
    nothing = make_batch(replace(nll, weights=np.zeros_like(nll.weights)), tokens=tokens)
    trainer = make_trainer(precision=Fp16.Config(scale_interval=1))
    for _ in range(3):
        metrics = trainer.step(nothing).metrics
        assert (metrics["trainer/loss_scale"], metrics["grad_norm"]) == (65536.0, 0.0)
    assert trainer.step(make_batch(tokens=tokens)).metrics["trainer/loss_scale"] == 65536.0
    assert trainer.step(nothing).metrics["trainer/loss_scale"] == 131072.0


def test_resume_continues_scale_and_counters_to_the_bit(make_trainer, make_batch, tokens, tmp_path):
    """Between a skipped step and one at which the scale grows, over a checkpoint and a sleep."""
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    rule = Fp16.Config(loss_scale=2.0**30, scale_interval=3)
    whole, part = make_trainer(precision=rule), make_trainer(precision=rule)
    expected = [whole.step(batch).metrics for _ in range(24)]
    skipped = [m["trainer/skipped_steps"] for m in expected]
    settled = skipped.index(0.0)
    assert settled > 5 and 1.0 in skipped[settled:]
    cut = settled + 2
    for _ in range(cut):
        part.step(batch)
    part.save(tmp_path)
    resumed = make_trainer(precision=rule, seed=9, sleep_to="host")
    resumed.load(tmp_path)
    resumed.sleep()
    resumed.wake()
    assert [resumed.step(batch).metrics for _ in range(cut, 24)] == expected[cut:]
    assert_same(weights(whole), weights(resumed))


def test_a_new_stage_and_a_checkpoint_of_another_precision_begin_with_the_first_scale(
    make_trainer, make_batch, tokens, tmp_path
):
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    rule = Fp16.Config(loss_scale=2.0**31)
    trainer = make_trainer(precision=rule)
    assert trainer.step(batch).metrics["trainer/skipped_steps"] == 1.0
    trainer.save(tmp_path / "half")
    stage, float32 = make_trainer(precision=rule), make_trainer()
    stage.load(tmp_path / "half", weights_only=True)
    assert stage.step(batch).metrics["trainer/loss_scale"] == 2.0**31
    float32.load(tmp_path / "half")
    assert "trainer/loss_scale" not in float32.step(batch).metrics
    float32.save(tmp_path / "whole")
    trainer.load(tmp_path / "whole")
    assert trainer.step(batch).metrics["trainer/loss_scale"] == 2.0**31


def test_a_model_that_overflows_at_every_scale_ends_the_run(make_trainer, make_batch, tokens):
    nll = make_batch().terms[0]
    endless = Term(name="endless", function=f"{__name__}:endless", weights=nll.weights, inputs={})
    batch = make_batch(endless, tokens=replace(tokens, logprobs=None))
    trainer = make_trainer(precision="fp16")
    before = weights(trainer)
    for _ in range(19):
        assert trainer.step(batch).metrics["trainer/skipped_steps"] == 1.0
    with pytest.raises(TrainerError, match=r"in 20 steps in a row.*at a loss scale of 0\.125"):
        trainer.step(batch)
    assert trainer.version == 19
    assert_same(before, weights(trainer))


class Endless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def endless(logprobs, entropies, inputs, options):
    """Finite, with a gradient that is not."""
    return Endless.apply(logprobs)


def test_an_overflow_in_the_forward_is_refused_with_what_to_do(make_trainer, make_batch, tokens):
    """No scale helps there, so that nothing is skipped."""
    trainer = make_trainer(precision="fp16")
    worker = trainer._worker
    with torch.no_grad():
        worker.masters.named["model.layers.0.mlp.down_proj.weight"].fill_(6e4)
        worker.masters.named["model.layers.0.mlp.up_proj.weight"].fill_(6e4)
        worker.masters.spread()
    batch = make_batch(tokens=replace(tokens, logprobs=None))
    with pytest.raises(TrainerError, match="loss term 'nll' is nan") as found:
        trainer.step(batch)
    assert any("float16 ends at 65,504" in note for note in found.value.__notes__)
    assert worker.scale.value == 65536.0
