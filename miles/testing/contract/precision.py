"""What every precision recipe must do: be plain data that both sides read alike.

Whether its numerics stay inside its budget is the business of the trainer and engine suites.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

from miles.testing.contract.case import Case, expect

STAGES = ("master", "compute", "engine", "export", "residual", "logits")

_ELSEWHERE = """
import json, sys, tempfile
from miles.plugins import Registry
from miles.protocols import Spec
from miles.testing import context
selection, name, config = json.loads(sys.argv[1])
made = Registry.load(**selection).build(
    Spec(kind="precision", name=name, config=config), context(tempfile.gettempdir())
)
print(made.fingerprint())
"""


def check_stages(case: Case) -> None:
    """All four stages, and the places within them that may be finer, name a type that torch has."""
    import torch

    recipe = case.build()
    for stage in STAGES:
        name = getattr(recipe, stage)
        known = isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)
        expect(known, f"{stage} is {name!r}, which is no torch type")


def check_budget(case: Case) -> None:
    """Its budget is finite, above zero, and no mean is allowed to exceed the maximum."""
    budget = case.build().budget
    good = all(math.isfinite(v) and v > 0 for v in (budget.max, budget.mean))
    expect(good, f"a budget of {budget} is not finite and positive")
    expect(budget.mean <= budget.max, f"budget.mean {budget.mean} exceeds budget.max {budget.max}")


def check_scaling(case: Case) -> None:
    """Its loss is scaled by powers of two that can grow and shrink, or not at all; in float16 it
    is, or small gradients are lost."""
    recipe = case.build()
    rule = recipe.scaling
    if rule is None:
        expect(recipe.compute != "float16", "scaling is None, but compute is float16")
        return
    factors = (rule.initial, rule.growth, rule.backoff)
    good = all(math.isfinite(f) and f > 0 and math.frexp(f)[0] == 0.5 for f in factors)
    good = good and rule.backoff < 1 <= rule.growth and rule.interval >= 1
    expect(good, f"scaling {rule} has a factor that rounds, or a scale that cannot adapt")


def check_fingerprint(case: Case) -> None:
    """Two recipes built alike have one fingerprint, short plain text, in this process and in
    others."""
    first, second = case.build().fingerprint(), case.build().fingerprint()
    expect(isinstance(first, str) and first.isprintable() and first, f"{first!r} is no fingerprint")
    expect(first == second, f"two recipes built alike have fingerprints {first!r} and {second!r}")
    asked = json.dumps([case.registry.selection, case.name, dict(case.config)])
    ran = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, asked],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )
    expect(ran.returncode == 0, f"building it in another process failed: {ran.stderr[-400:]}")
    other = ran.stdout.strip()
    expect(other == first, f"the fingerprint is {first!r} here and {other!r} in another process")
