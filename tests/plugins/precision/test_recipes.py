"""Precision recipes are data: stages, budget, and one fingerprint for equal stages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miles import ConfigError, LossScaling, Precision
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.precision.fp16 import Fp16
from miles_plugins.precision.fp32 import Fp32


@pytest.mark.parametrize("kind", [Fp32, Bf16, Fp16])
def test_recipe_keeps_its_protocol(kind):
    recipe = kind(kind.Config(budget_max=0.5, budget_mean=0.25), None)
    assert isinstance(recipe, Precision)
    assert (recipe.budget.max, recipe.budget.mean) == (0.5, 0.25)
    assert recipe.master == "float32"


def test_fp32_promises_a_tenth_of_a_milli_nat():
    budget = Fp32(Fp32.Config(), None).budget
    assert (budget.max, budget.mean) == (1e-4, 1e-5)


def test_fingerprint_follows_the_stages_and_not_the_budget():
    one, two = Fp32(Fp32.Config(), None), Fp32(Fp32.Config(budget_max=9.0), None)
    assert one.fingerprint() == two.fingerprint()
    seen = {kind(kind.Config(), None).fingerprint() for kind in (Fp32, Bf16, Fp16)}
    for stage in ("master", "compute", "engine", "export", "residual", "logits"):
        changed = Fp32(Fp32.Config(), None)
        setattr(changed, stage, "float16")
        seen.add(changed.fingerprint())
    assert len(seen) == 9


def test_bf16_may_round_finer_in_three_places():
    plain = Bf16(Bf16.Config(), None)
    assert {plain.engine, plain.residual, plain.logits} == {"bfloat16"}
    finer = Bf16(Bf16.Config(engine="float16", residual="float32", logits="float32"), None)
    assert (finer.engine, finer.residual, finer.logits) == ("float16", "float32", "float32")
    assert (finer.compute, finer.export) == ("bfloat16", "bfloat16")


def test_fp16_computes_and_publishes_float16_and_alone_scales_its_loss():
    recipe = Fp16(Fp16.Config(scale_interval=7), None)
    assert {recipe.compute, recipe.engine, recipe.export, recipe.residual} == {"float16"}
    assert recipe.logits == "float32"
    rule = LossScaling(initial=2.0**16, growth=2.0, backoff=0.5, interval=7)
    assert recipe.scaling == rule
    assert Fp32(Fp32.Config(), None).scaling is Bf16(Bf16.Config(), None).scaling is None
    assert recipe.fingerprint() == Fp16(Fp16.Config(), None).fingerprint()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("loss_scale", 1000.0, "a power of two from 1"),
        ("loss_scale", 0.5, "a power of two from 1"),
        ("loss_scale", float("inf"), "a power of two from 1"),
        ("scale_growth", 1.5, "a power of two from 1"),
        ("loss_scale", 2.0**40, "a power of two from 1 to 2**32"),
        ("scale_backoff", 1.0, "a power of two from 0 to 0.5"),
        ("scale_backoff", 0.0, "a power of two from 0 to 0.5"),
        ("scale_interval", 0, "at least 1"),
    ],
)
def test_fp16_refuses_factors_that_round_or_never_adapt(field, value, why):
    config = Fp16.Config(**{field: value})
    (fault,) = Fp16.check(config)
    assert f"{field} is {value}; {why}" in fault
    with pytest.raises(ConfigError, match=f"precision fp16: {field} is"):
        Fp16(config, None)


def test_fp16_refuses_models_that_leave_its_range():
    for kind, faults in (("gemma3_text", 1), ("qwen3", 0)):
        model = SimpleNamespace(hf_config=lambda kind=kind: {"model_type": kind})
        found = Fp16.check(Fp16.Config(), SimpleNamespace(built={"model": model}))
        assert len(found) == faults
        assert all("models of type gemma3_text" in f and "precision=bf16" in f for f in found)
