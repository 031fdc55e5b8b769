"""What a trainer held is let go; freed memory stays in the process: steps fault few pages in."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kept", ["resident", "host", "disk"])
def test_trainer_that_is_done_with_leaves_no_weight_or_moment_behind(
    make_trainer, make_batch, tmp_path, precision, kept
):
    """The next stage's trainer is built in the same process, beside what stays: 14 GB at 1B."""
    where = {"optimizer_dir": str(tmp_path / "state")} if kept == "disk" else {}
    trainer = make_trainer(precision=precision, optimizer_state=kept, **where)
    trainer.step(make_batch())
    trainer.logprobs(make_batch().tokens, "current")
    worker = trainer._worker
    held = [*worker.policy.parameters(), *worker.masters.tensors(), *worker.masters.named.values()]
    left = [weakref.ref(tensor) for tensor in held]
    del trainer, worker, held
    gc.collect()
    assert not any(tensor() is not None for tensor in left)
