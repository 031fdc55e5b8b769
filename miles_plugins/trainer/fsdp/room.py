"""Whether this machine has what a trainer needs: GPUs for its ranks, and memory for the weights and
what AdamW keeps beside them.

An estimate from `config.json` before anything is loaded, and a low one: no activations, and nothing
of the engines that may share the memory. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles import gpus_here, memory_here, parameter_count, weight_bytes

__all__ = ["faults"]

_RESIDENT = 16.0  # bytes a parameter: float32 weight, gradient, and two moments


def faults(config: Any, planned: Any) -> list[str]:
    """Of a trainer on this machine; where a runtime chooses machines, it counts them."""
    if getattr(planned.specs.get("runtime"), "name", "local") != "local":
        return []
    gpus = [] if config.device == "cpu" else gpus_here()
    if config.device == "cuda" and not gpus:
        return [
            "device is cuda, and there is no GPU here (no nvidia-smi or driver shows one); use "
            "device=cpu or auto"
        ]
    if gpus and config.workers > len(gpus):
        return [
            f"workers ({config.workers}) is more than the {len(gpus)} GPUs here, and NCCL refuses "
            f"two ranks on one; use trainer.workers={len(gpus)} or device=cpu"
        ]
    smallest = min((gpu.total for gpu in gpus), default=0)
    return [] if gpus and not smallest else [*_memory(config, planned, smallest)]


def _memory(config: Any, planned: Any, gpu: int) -> Iterator[str]:
    """`gpu` is bytes of the smallest, 0 on a CPU."""
    model, precision = planned.built.get("model"), planned.built.get("precision")
    if model is None or precision is None or (gpu and config.offload_parameters):
        return
    whole = model.hf_config()
    need, what = weight_bytes(whole, precision.compute), f"weights in {precision.compute}"
    if config.optimizer_state == "resident" or not gpu:
        need, what = parameter_count(whole) * _RESIDENT, "weights, gradients and moments in float32"
    if config.optimizer_state == "disk" and not gpu:
        need, what = parameter_count(whole) * 4.0, "weights in float32"
    if gpu:
        need, room = need * config.replicas / config.workers, gpu
        where, hint = "a rank's GPU has", "more trainer.workers"
        if config.optimizer_state == "resident":
            hint += ", or trainer.optimizer_state=host"
    else:
        need, room, where = need * config.replicas, memory_here(), "this machine's memory is"
        hint = "a machine with more, or a smaller model"
    if need > room:
        yield (
            f"{what} take about {need / 2**30:.1f} GiB, and {where} {room / 2**30:.1f} GiB; take "
            f"{hint}"
        )
