"""The `fsdp` trainer: PyTorch FSDP2 over Hugging Face models. This module is its name and its
configuration.

Torch is imported only when a trainer is built; what it does is in `worker`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles import Array, Batch, ConfigError, Context, Tokens, Update, places_here, unwritable
from miles_plugins.trainer.fsdp import room

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
        replicas: int = 1
        """Groups of ranks that hold the whole model each; inside a group it is sharded. `workers`
        is a multiple of it."""
        context_parallel: int = 1
        """Ranks that share each micro-batch, for samples too long for one: by tokens, and in
        attention by heads, of which there must be a multiple. A rank then holds
        `micro_batch_tokens`, or its part of a longer sample. `workers` is a multiple of it."""
        balance: Literal["flops", "tokens"] = "flops"
        """What ranks get an equal share of: model FLOPs, in which long samples cost more, or
        tokens."""
        attention: Literal["auto", "padded", "cudnn", "varlen", "flex"] = "auto"
        """How samples of a row attend: padded to like lengths through SDPA (`cudnn` prefers that
        kernel), or unpadded through FlashAttention (`varlen`) or FlexAttention (`flex`). Auto takes
        varlen on a GPU in 16 bits (flex where torch lacks it), else padded, and says so."""
        compile: Literal["none", "layers"] = "none"
        """Compile each decoder layer, and the arithmetic on logits, with torch.compile: the first
        steps take minutes."""
        optimizer_state: Literal["resident", "host", "disk"] = "resident"
        """Where moments, and float32 masters that one rank keeps beside a 16-bit model, live: on
        the device; in pinned host memory; in files. The latter two are fetched bucket by bucket
        during the step, with the same bits."""
        optimizer_bucket_mb: int = 256
        """MiB of each array that visit the device at a time; up to six such buckets are there."""
        optimizer_dir: str = ""
        """Directory for `optimizer_state=disk`; empty takes `optimizer/` below the run's. Files
        have no name and vanish with the process."""
        offload_parameters: bool = False
        """Keep parameters and gradients in host memory; a block's are fetched when it computes.
        With `optimizer_state=resident` AdamW then runs on the CPU."""
        sleep_to: Literal["auto", "host", "none"] = "auto"
        """Where a paused trainer's memory goes: pinned host memory, or nowhere. Auto takes host on
        a GPU and nowhere on a CPU."""
        peak_tflops: float | None = None
        """TFLOP/s of the device, for `trainer/mfu`; null takes the 16-bit peak of known GPUs."""
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

    claims = classmethod(room.claims)

    @classmethod
    def check(cls, config: Config, planned: Any = None) -> list[str]:
        """Values that cannot be meant, a directory that cannot be written, GPUs that are missing,
        and a model that does not fit."""
        faults = cls._value_faults(config)
        if faults or planned is None:
            return faults
        folder = config.optimizer_dir if places_here(planned) else ""
        if folder and (why := unwritable(folder)):
            return [f"optimizer_dir: {why}"]
        model = planned.built.get("model")
        shared = [] if model is None else sharing_faults(config, model.hf_config())
        return [*shared, *room.faults(config, planned)]

    @classmethod
    def _value_faults(cls, config: Config) -> list[str]:
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
                (
                    config.replicas < 1 or config.workers % max(1, config.replicas) != 0,
                    f"replicas ({config.replicas}) must divide workers ({config.workers})",
                ),
                (
                    config.context_parallel < 1
                    or config.workers % max(1, config.context_parallel) != 0,
                    f"context_parallel ({config.context_parallel}) must divide workers "
                    f"({config.workers})",
                ),
                (
                    config.device == "cpu" and config.attention in ("cudnn", "varlen", "flex"),
                    f"attention {config.attention} needs a GPU, but device is cpu",
                ),
                (
                    config.optimizer_bucket_mb < 1,
                    f"optimizer_bucket_mb is {config.optimizer_bucket_mb}; at least 1",
                ),
                (
                    bool(config.optimizer_dir) and config.optimizer_state != "disk",
                    f"optimizer_dir is {config.optimizer_dir!r}, but optimizer_state is "
                    f"{config.optimizer_state}; it is for disk",
                ),
                (
                    config.peak_tflops is not None and config.peak_tflops <= 0,
                    f"peak_tflops is {config.peak_tflops}; above 0",
                ),
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
        if faults := sharing_faults(config, context.model.hf_config()):
            raise ConfigError(f"trainer fsdp: {'; '.join(faults)}")
        from miles_plugins.trainer.fsdp.worker import Worker

        self._worker = Worker(config, context)

    @property
    def version(self) -> int:
        """Trainer steps completed since the run began."""
        return self._worker.version

    def step(self, batch: Batch) -> Update:
        """One optimizer step over the whole batch. Raises `TrainerError`, with the weights
        unchanged, when a loss term or the gradient is not finite or a mismatch budget of `fail` is
        exceeded. Where the precision scales the loss, a gradient that is not finite lowers the
        scale instead, and the step, counted and warned of, changes no weight."""
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
        """Free gradients and move weights, moments and reference off the device, as `sleep_to`
        says; until `wake`, anything else is a `TrainerError`."""
        self._worker.sleep()

    def wake(self) -> None:
        """Move everything back, bit for bit."""
        self._worker.wake()


def sharing_faults(config: Fsdp.Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Why a model's attention cannot be shared by `context_parallel` ranks."""
    ranks = config.context_parallel
    if ranks == 1:
        return []
    shape = hf_config.get("text_config") or hf_config
    heads = int(shape.get("num_attention_heads") or 0)
    keys = int(shape.get("num_key_value_heads") or heads)
    head = f"context_parallel is {ranks}, but "
    if heads % ranks:
        return [f"{head}the model has {heads} attention heads, no multiple of it"]
    if keys % ranks and ranks % keys:
        return [f"{head}the model has {keys} key heads, neither a multiple nor a divisor of it"]
    scaling = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in ("dynamic", "longrope"):
        return [
            f"{head}the model's positions ({kind}) depend on the longest sample of a row, which "
            "a rank with a part of it does not see"
        ]
    return []
