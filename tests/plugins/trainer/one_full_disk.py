"""One of two ranks that save where the disk of one is full, for tests.

    python one_full_disk.py RANK MASTER DIRECTORY

Two trainers take the same steps; one of them tries to save in between and prints why it could not.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import torch
from one_rank import SIZES, batch, measured

from miles import CheckpointError, Settings
from miles.testing import context, make_sample
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.fp32 import Fp32
from miles_plugins.trainer.fsdp import Fsdp, state

CASES = (
    (0, "config.json", True),
    (0, "model-00002-of", True),
    (0, "model-00001-of", False),
    (0, "rank_0.safetensors", False),
    (1, "rank_1.safetensors", False),
)
"""Whose disk is full, at which file, and whether only weights are saved."""


def main(rank: str, master: str, directory: str) -> None:
    """Run one rank."""
    around = context(directory)

    def build():
        return Fsdp(
            Fsdp.Config(lr=1e-2, device="cpu", workers=2),
            context(
                directory,
                settings=Settings(worker_timeout_s=20),
                rank=int(rank),
                world=2,
                master=master,
                model=Qwen3(Qwen3.Config(hidden_size=32, intermediate_size=48), around),
                precision=Fp32(Fp32.Config(), around),
            ),
        )

    trainer, twin = build(), build()
    samples = [make_sample(p, c, seed=i) for i, (p, c) in enumerate(SIZES)]
    state.SHARD_BYTES = 20_000
    write, text = state.save_file, Path.write_text
    for number, (who, file, weights_only) in enumerate(CASES):

        def full(path, who=who, file=file):
            if int(rank) == who and Path(path).name.startswith(file):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        def write_tensors(tensors, path, metadata=None, full=full):
            full(path)
            write(tensors, path, metadata=metadata)

        def write_text(path, *args, full=full, **more):
            full(path)
            return text(path, *args, **more)

        state.save_file, Path.write_text = write_tensors, write_text
        try:
            trainer.save(Path(directory) / f"saved_{number}", weights_only=weights_only)
            print(f"{number}: saved")
        except CheckpointError as error:
            print(f"{number}: {error}")
        updates = [measured(one.step(batch(samples))) for one in (trainer, twin)]
        assert updates[0] == updates[1], (number, updates)
    state.save_file, Path.write_text = write, text
    trainer.save(Path(directory) / "saved")
    twin.load(Path(directory) / "saved")
    for (name, one), (_, other) in zip(trainer.export(), twin.export(), strict=True):
        assert torch.equal(one, other), name


if __name__ == "__main__":
    main(*sys.argv[1:])
