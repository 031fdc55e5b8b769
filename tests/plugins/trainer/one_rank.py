"""One rank of a small training job, for tests.

    python one_rank.py RANK WORLD MASTER DIRECTORY PRECISION DEVICE [FIELDS]

FIELDS is JSON, more of the trainer's Config.
Takes three steps, of which the last has fewer samples than there are ranks, saves, loads, takes one
more, and writes what it saw to `rank_<r>_of_<world>.npz` below the directory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from miles import Batch, Settings, Term, flatten
from miles.testing import context, make_sample
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.precision.fp16 import Fp16
from miles_plugins.precision.fp32 import Fp32
from miles_plugins.trainer.fsdp import Fsdp

SIZES = ((3, 6), (1, 4), (5, 2), (2, 19), (4, 1), (3, 3), (2, 2))


def batch(samples):
    """A mean negative log-likelihood and an entropy bonus."""
    tokens = flatten(samples)
    mean = (tokens.trainable / tokens.trainable.sum()).astype(np.float32)
    nll = Term(name="nll", function="miles.learn.losses:nll", weights=mean)
    spread = Term(name="entropy", function="miles.learn.losses:entropy_bonus", weights=0.1 * mean)
    return Batch(tokens=tokens, terms=(nll, spread))


def measured(update):
    """Its metrics, without those of the clock."""
    return {n: v for n, v in update.metrics.items() if not n.startswith("trainer/")}


def main(
    rank: str,
    world: str,
    master: str,
    directory: str,
    precision: str,
    device: str,
    fields: str = "{}",
) -> None:
    """Run one rank."""
    settings = Settings()
    around = context(directory)
    shape = Qwen3.Config(hidden_size=32, intermediate_size=48)
    recipe = {"fp32": Fp32, "bf16": Bf16, "fp16": Fp16}[precision]

    more = {"workers": int(world), "sleep_to": "host", **json.loads(fields)}

    def build(seed=0, **changes):
        return Fsdp(
            Fsdp.Config(
                lr=1e-2,
                device=device,
                weight_decay=0.1,
                grad_clip=0.5,
                micro_batch_tokens=24,
                activation_checkpointing=precision == "bf16",
                **{**more, **changes},
            ),
            context(
                directory,
                settings=settings,
                seed=seed,
                rank=int(rank),
                world=int(world),
                master=master,
                model=Qwen3(shape, around),
                precision=recipe(recipe.Config(), around),
            ),
        )

    samples = [make_sample(p, c, seed=i) for i, (p, c) in enumerate(SIZES)]
    trainer = build()
    first = trainer.logprobs(flatten(samples), "reference")
    updates = [trainer.step(batch(samples)) for _ in range(2)]
    updates.append(trainer.step(batch(samples[:1])))
    trainer.save(Path(directory) / f"saved_{world}")
    updates.append(trainer.step(batch(samples)))
    resumed = build(seed=1)
    resumed.load(Path(directory) / f"saved_{world}")
    resumed.sleep()
    resumed.wake()
    assert resumed._worker.meter.returned.bytes > 0
    again = resumed.step(batch(samples))
    assert measured(again) == measured(updates[-1]), (again, updates[-1])
    assert (resumed.logprobs(flatten(samples), "reference") == first).all()
    weights = {name: tensor.float().cpu().clone() for name, tensor in resumed.export()}
    for name, tensor in trainer.export():
        assert torch.equal(tensor.float().cpu(), weights[name]), name
    found = {f"weight/{name}": tensor.numpy() for name, tensor in weights.items()}
    for number, update in enumerate(updates):
        found |= {f"{number}/{name}": np.array(v) for name, v in measured(update).items()}
    found["logprobs"] = resumed.logprobs(flatten(samples), "current")
    found["reference"] = first
    found["short"] = resumed.logprobs(flatten([make_sample(1, 1, seed=9)]), "current")
    np.savez(Path(directory) / f"rank_{rank}_of_{world}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # as workers do: threads of a group may abort an interpreter that takes itself down
