"""The `fsdp` trainer: PyTorch FSDP2 over Hugging Face models. This module is its name and its
configuration.

Torch is imported only when a trainer is built; what it does is in `worker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles import Array, Batch, ConfigError, Context, Tokens, Update

__all__ = ["Fsdp"]


class Fsdp:
    """AdamW over sharded Hugging Face models; one process without a process group, or any number of
    ranks.

    Every rank is handed the whole batch and trains on its own, token-balanced share. Samples are
    packed end to end into micro-batches of `micro_batch_tokens`; weights of loss terms are
    normalised over the step, so how it is cut changes nothing. Parameters, moments and accumulated
    gradients are float32, whatever the forward computes in.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How weights are updated."""

        lr: float = 1e-5
        """Peak learning rate."""
        schedule: Literal["constant", "cosine"] = "constant"
        """What follows the warm-up, over the stage's `steps`."""
        warmup_steps: int = 0
        """Steps over which the learning rate rises linearly to `lr`."""
        min_lr_ratio: float = 0.0
        """Where the cosine ends, as a share of `lr`."""
        betas: tuple[float, float] = (0.9, 0.95)
        """AdamW's decay of the first and second moment."""
        eps: float = 1e-8
        """AdamW's epsilon."""
        weight_decay: float = 0.0
        """Decoupled weight decay of matrices; vectors such as norms have none."""
        grad_clip: float = 1.0
        """Largest global gradient norm; 0 does not clip."""
        micro_batch_tokens: int = 16384
        """Tokens of a forward and backward pass at most; a longer sample passes alone."""
        share_prompts: bool = True
        """Compute a prompt once that several samples of a micro-batch begin with. Prompts are told
        apart by their tokens: turn it off where equal tokens may mean different inputs."""
        activation_checkpointing: bool = False
        """Recompute each block in the backward pass instead of keeping its activations."""
        workers: int = 1
        """Ranks to train with."""
        threads: int = 1
        """CPU threads of each rank; 0 leaves torch's choice."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """Where to compute; auto takes a GPU when there is one."""
        reference: bool = True
        """Keep a copy of the stage's first weights once a KL term asks for it; false refuses such
        terms."""
        on_mismatch: Literal["warn", "mask", "fail"] = "warn"
        """What a step over the mismatch budget does: say so, leave the tokens over `max` out, or
        stop the run."""
        mismatch_max: float | None = None
        """Mismatch budget for one token, in nats; null takes the precision recipe's."""
        mismatch_mean: float | None = None
        """Mismatch budget for a step's mean, in nats; null takes the precision recipe's."""

    @classmethod
    def check(cls, config: Config, planned: Any = None) -> list[str]:
        """Values that cannot be meant."""
        return [
            text
            for wrong, text in (
                (config.lr < 0, f"lr is {config.lr}; at least 0"),
                (config.warmup_steps < 0, f"warmup_steps is {config.warmup_steps}; at least 0"),
                (
                    not 0 <= config.min_lr_ratio <= 1,
                    f"min_lr_ratio is {config.min_lr_ratio}; 0 to 1",
                ),
                (
                    any(not 0 <= b < 1 for b in config.betas),
                    f"betas are {config.betas}; each 0 to below 1",
                ),
                (config.eps <= 0, f"eps is {config.eps}; above 0"),
                (config.weight_decay < 0, f"weight_decay is {config.weight_decay}; at least 0"),
                (config.grad_clip < 0, f"grad_clip is {config.grad_clip}; at least 0"),
                (
                    config.micro_batch_tokens < 1,
                    f"micro_batch_tokens is {config.micro_batch_tokens}; at least 1",
                ),
                (config.workers < 1, f"workers is {config.workers}; at least 1"),
                (config.threads < 0, f"threads is {config.threads}; at least 0"),
            )
            if wrong
        ]

    def __init__(self, config: Config, context: Context) -> None:
        faults = self.check(config)
        if faults:
            raise ConfigError(f"trainer fsdp: {'; '.join(faults)}")
        if context.model is None or context.precision is None:
            raise ConfigError("trainer fsdp: needs a model and a precision recipe")
        from miles_plugins.trainer.fsdp.worker import Worker

        self._worker = Worker(config, context)

    @property
    def version(self) -> int:
        """Trainer steps completed since the run began."""
        return self._worker.version

    def step(self, batch: Batch) -> Update:
        """One optimizer step over the whole batch. Raises `TrainerError`, with the weights
        unchanged, when a loss term or the gradient is not finite or a mismatch budget of `fail` is
        exceeded."""
        return self._worker.step(batch)

    def logprobs(self, tokens: Tokens, source: str) -> Array:
        """(T,) float32 log-prob of every token under `current` or `reference` weights, 0 for first
        tokens."""
        return self._worker.logprobs(tokens, source)

    def export(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, whole tensor) in the precision's export type, in a fixed order. Every
        rank has to iterate to the end. A tensor may be the live one: copy it before the next
        step."""
        return self._worker.export()

    def save(self, directory: Path | str, *, weights_only: bool = False) -> None:
        """Write `model/` and, unless `weights_only`, `trainer/` below `directory`. Raises
        `CheckpointError` naming the file."""
        self._worker.save(Path(directory), weights_only=weights_only)

    def load(self, directory: Path | str, *, weights_only: bool = False) -> None:
        """Continue from what `save` wrote. Raises `CheckpointError` naming files or tensors that do
        not fit."""
        self._worker.load(Path(directory), weights_only=weights_only)

    def sleep(self) -> None:
        """Free gradients, and on a GPU move everything to the CPU."""
        self._worker.sleep()

    def wake(self) -> None:
        """Move everything back."""
        self._worker.wake()
