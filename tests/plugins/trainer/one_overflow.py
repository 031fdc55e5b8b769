"""One of two ranks that train in float16, of which the second has an overflow at the second step.

    python one_overflow.py RANK MASTER DIRECTORY FIELDS

FIELDS is JSON, more of the trainer's Config. Prints, of three steps, what was skipped, at which
scale, and whether the weights stayed the same, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from one_rank import SIZES, batch

from miles import Settings
from miles.testing import context, make_sample
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.fp16 import Fp16
from miles_plugins.trainer.fsdp import Fsdp


def main(rank: str, master: str, directory: str, fields: str) -> None:
    """Run one rank."""
    around = context(directory)
    trainer = Fsdp(
        Fsdp.Config(lr=1e-2, device="cpu", workers=2, **json.loads(fields)),
        context(
            directory,
            settings=Settings(worker_timeout_s=60),
            rank=int(rank),
            world=2,
            master=master,
            model=Qwen3(Qwen3.Config(hidden_size=32, intermediate_size=48), around),
            precision=Fp16(Fp16.Config(), around),
        ),
    )
    samples = [make_sample(p, c, seed=i) for i, (p, c) in enumerate(SIZES)]
    overflowing = False

    def overflow(module, grads):
        return (
            tuple(None if g is None else g * float("inf") for g in grads) if overflowing else None
        )

    trainer._worker.policy.model.model.layers[-1].mlp.register_full_backward_pre_hook(overflow)
    found = {"skipped": [], "scale": [], "same": []}
    before = {name: tensor.clone() for name, tensor in trainer.export()}
    for step in range(3):
        overflowing = step == int(rank) == 1
        metrics = trainer.step(batch(samples)).metrics
        after = {name: tensor.clone() for name, tensor in trainer.export()}
        found["skipped"].append(metrics["trainer/skipped_steps"])
        found["scale"].append(metrics["trainer/loss_scale"])
        found["same"].append(all(torch.equal(before[name], t) for name, t in after.items()))
        before = after
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
