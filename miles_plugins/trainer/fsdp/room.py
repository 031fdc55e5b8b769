"""Whether a machine has what a trainer needs: GPUs for its ranks, and memory for the weights and
what AdamW keeps beside them.

An estimate from `config.json` before anything is loaded, and a low one: no activations. What it has
beside engines on the same GPUs is for `miles check` to add up. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles import (
    Claim,
    Gpu,
    Spec,
    gpu_room,
    gpus_here,
    memory_here,
    parameter_count,
    places_here,
    weight_bytes,
)

__all__ = ["claims", "faults"]

_RESIDENT = 16.0  # bytes a parameter: float32 weight, gradient, and two moments


def faults(config: Any, planned: Any) -> list[str]:
    """Of a trainer on this machine; where a runtime chooses machines, it counts their GPUs, which
    are taken to be as large as those here."""
    gpus, local = _gpus(config, planned), places_here(planned)
    if not local:
        return [*_memory(config, planned, gpus)] if gpus else []
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
    return [*_memory(config, planned, gpus)]


def claims(cls: type, config: Any, planned: Any) -> list[Claim]:
    """Of its ranks: one GPU each, from the first."""
    del cls
    if not _gpus(config, planned):
        return []
    need, what = _on_gpu(config, planned)
    return [
        Claim(
            who="trainer ranks",
            gpus=range(config.workers),
            bytes=need,
            what=what,
            releases=config.sleep_to != "none",
            apart="",
        )
    ]


def _gpus(config: Any, planned: Any) -> list[Gpu]:
    """Those of this machine, unless ranks compute on a CPU."""
    runtime = planned.specs.get("runtime")
    share = runtime.config.get("trainer") if isinstance(runtime, Spec) else None
    if config.device == "cpu" or dict(share or {}).get("gpus") == 0:
        return []
    return gpus_here()


def _on_gpu(config: Any, planned: Any) -> tuple[float, str]:
    """Bytes on the GPU of each rank, 0 when nobody can tell, and what they are."""
    model, precision = planned.built.get("model"), planned.built.get("precision")
    if model is None or precision is None or config.offload_parameters:
        return 0.0, "little"
    whole = model.hf_config()
    need, what = weight_bytes(whole, precision.compute), f"weights in {precision.compute}"
    if config.optimizer_state == "resident":
        need, what = parameter_count(whole) * _RESIDENT, "weights, gradients and moments in float32"
    return need * config.replicas / config.workers, what


def _memory(config: Any, planned: Any, gpus: list[Gpu]) -> Iterator[str]:
    model = planned.built.get("model")
    if gpus:
        need, what = _on_gpu(config, planned)
        placed = range(config.workers) if places_here(planned) else None
        room, where = gpu_room(gpus, placed), "a rank's GPU has"
        hint = "more trainer.workers"
        if config.optimizer_state == "resident":
            hint += ", or trainer.optimizer_state=host"
    elif model is not None:
        each, what = _RESIDENT, "weights, gradients and moments in float32"
        if config.optimizer_state == "disk":
            each, what = 4.0, "weights in float32"
        need = parameter_count(model.hf_config()) * each * config.replicas
        room, where = memory_here(), "this machine's memory is"
        hint = "a machine with more, or a smaller model"
    else:
        return
    if need > room > 0:
        yield (
            f"{what} take about {need / 2**30:.1f} GiB, and {where} {room / 2**30:.1f} GiB; take "
            f"{hint}"
        )
