"""Precision recipes are data: stages, budget, and one fingerprint for equal stages."""

from __future__ import annotations

import pytest

from miles import Precision
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.precision.fp32 import Fp32


@pytest.mark.parametrize("kind", [Fp32, Bf16])
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
    seen = {one.fingerprint(), Bf16(Bf16.Config(), None).fingerprint()}
    for stage in ("master", "compute", "engine", "export", "residual", "logits"):
        changed = Fp32(Fp32.Config(), None)
        setattr(changed, stage, "float16")
        seen.add(changed.fingerprint())
    assert len(seen) == 8


def test_bf16_may_round_finer_in_three_places():
    plain = Bf16(Bf16.Config(), None)
    assert {plain.engine, plain.residual, plain.logits} == {"bfloat16"}
    finer = Bf16(Bf16.Config(engine="float16", residual="float32", logits="float32"), None)
    assert (finer.engine, finer.residual, finer.logits) == ("float16", "float32", "float32")
    assert (finer.compute, finer.export) == ("bfloat16", "bfloat16")
