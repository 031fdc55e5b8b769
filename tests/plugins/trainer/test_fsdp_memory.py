"""Freed memory stays in the process: steps fault few pages in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles_plugins.trainer.fsdp.memory import keep_freed_memory

FAULTS = """
import resource, sys
import numpy as np
from miles_plugins.trainer.fsdp.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def step():
    arrays = [np.ones(2 * 2**20, np.uint8) for _ in range(8)]
    return len(arrays)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def test_kept_memory_is_not_faulted_in_again():
    if not keep_freed_memory():
        pytest.skip("another C library")
    usual, kept = (
        float(subprocess.check_output([sys.executable, "-c", FAULTS, how], text=True))
        for how in ("usual", "keep")
    )
    assert kept < 50
    assert kept <= usual  # with huge pages by default there is little to save
