"""Whether a model fits: an estimate of its weights from `config.json`, and what this machine has.

An estimate before anything is loaded; it counts no cache and no activations. Imports no torch.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

__all__ = [
    "Claim",
    "Gpu",
    "engine_bytes",
    "engines_apart",
    "gpu_room",
    "gpus_here",
    "gpus_shown",
    "memory_here",
    "parameter_count",
    "places_here",
    "weight_bytes",
]

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One that the driver sees."""

    name: str
    """Its model."""
    total: int
    """Bytes of memory; 0 where nobody says."""
    uuid: str = ""
    """Which one it is, as torch says it; empty where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What workers of a trainer or an engine will have of GPUs, as far as it is known before they
    start; `claims` of the component's class tells it."""

    who: str
    """The workers, as people say it, such as `trainer ranks`."""
    gpus: range
    """Their GPUs, counted from 0; under a runtime that reserves GPUs, from the trainer's first."""
    bytes: float
    """On each of these GPUs, at least; 0 where nobody can tell."""
    what: str
    """It is made of, such as `weights in bfloat16`."""
    releases: bool
    """Whether they give it back while the other side works, under `placement=colocated`."""
    apart: str
    """Of engines: what would give them GPUs of their own, a key with its value or hardware."""


_DRIVER = Path("/proc/driver/nvidia/gpus")
"""A folder a GPU, where the driver is."""


def gpus_here() -> list[Gpu]:
    """What `nvidia-smi` lists, or the driver where there is no such program, of what this process
    is shown."""
    found = _listed() or _driven()
    given = _shown()
    if given is None:
        return found
    if all(one.isdecimal() for one in given):
        return [found[int(one)] for one in given if int(one) < len(found)]
    named = [
        gpu for one in given for gpu in found if gpu.uuid and f"GPU-{gpu.uuid}".startswith(one)
    ]
    return named if len(named) == len(given) else found[: len(given)]


def gpu_room(gpus: Sequence[Gpu], places: Iterable[int] | None = None) -> int:
    """Bytes of the smallest of these GPUs, or of those of them at `places`; 0 where nobody can
    tell. Places are counted as `nvidia-smi` lists them, which CUDA does under
    `CUDA_DEVICE_ORDER=PCI_BUS_ID` or where all are alike."""
    chosen = gpus if places is None else [gpus[i] for i in places if i < len(gpus)]
    return min((gpu.total for gpu in chosen), default=0)


def _listed() -> list[Gpu]:
    ask = ["nvidia-smi", "--query-gpu=name,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        parts = [part.strip() for part in line.rsplit(",", 2)]
        if len(parts) == 3:  # a size may be `[N/A]`, where memory is the machine's
            name, size, uuid = parts
            total = int(size) << 20 if size.isdecimal() else 0
            found.append(Gpu(name=name, total=total, uuid=uuid.removeprefix("GPU-")))
    return found


def _driven() -> list[Gpu]:
    try:
        return [Gpu(name="NVIDIA GPU", total=0) for _ in _DRIVER.iterdir()]
    except OSError:
        return []


def gpus_shown() -> int | None:
    """GPUs that `CUDA_VISIBLE_DEVICES` shows to this process and its children; None is all. As
    CUDA has it, what follows a negative one does not count: -1 shows none."""
    given = _shown()
    return None if given is None else len(given)


def _shown() -> list[str] | None:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    listed = [one.strip() for one in given.split(",") if one.strip()]
    return [*takewhile(lambda one: not one.startswith("-"), listed)]


def memory_here() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def weight_bytes(config: Mapping[str, Any], dtype: str) -> float:
    """Bytes of a decoder's weights in `dtype`, or in what the checkpoint is quantized to."""
    quantized = config.get("quantization_config") or {}
    bits = quantized.get("bits")
    each = _BYTES.get(dtype, 2.0)
    if "fp8" in str(quantized.get("quant_method", "")):
        each = 1.0
    elif isinstance(bits, int):
        each = bits / 8
    return parameter_count(config) * each


def parameter_count(config: Mapping[str, Any]) -> float:
    """How many a decoder has, about: embeddings, attention, and dense or sparse MLPs."""
    text = config.get("text_config") or config

    def get(name: str, default: float = 0) -> float:
        value = text.get(name)
        return float(value) if isinstance(value, int | float) else default

    hidden, layers = get("hidden_size"), get("num_hidden_layers")
    heads = get("num_attention_heads", 1)
    width = get("head_dim", hidden / max(heads, 1))
    keys = get("num_key_value_heads", heads)
    if get("kv_lora_rank"):  # latent attention: low-rank projections instead of whole ones
        query = get("q_lora_rank") or hidden
        turned = get("qk_nope_head_dim") + get("qk_rope_head_dim")
        attention = (
            (hidden * query if get("q_lora_rank") else 0)
            + query * heads * turned
            + hidden * (get("kv_lora_rank") + get("qk_rope_head_dim"))
            + get("kv_lora_rank") * heads * (get("qk_nope_head_dim") + get("v_head_dim"))
            + heads * get("v_head_dim") * hidden
        )
    else:
        attention = hidden * width * (2 * heads + 2 * keys)
    dense = 3 * hidden * get("intermediate_size")
    experts = get("num_experts") or get("n_routed_experts") or get("num_local_experts")
    if experts:
        one = 3 * hidden * (get("moe_intermediate_size") or get("intermediate_size"))
        sparse = one * (experts + get("n_shared_experts")) + hidden * experts
        first = get("first_k_dense_replace")
        mlp = first * dense + (layers - first) * sparse
    else:
        mlp = layers * dense
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    heads_of_words = 2 if tied is False else 1  # unsaid, it may be either: rather too few
    return layers * attention + mlp + heads_of_words * get("vocab_size") * hidden


def engine_bytes(planned: Any) -> float:
    """Weights of one engine of a planned stage, in the precision's type for engines; 0 when nobody
    can tell."""
    model, precision = planned.built.get("model"), planned.built.get("precision")
    if model is None or precision is None:
        return 0.0
    return weight_bytes(model.hf_config(), precision.engine)


def places_here(planned: Any) -> bool:
    """Whether a planned stage's workers stand on this machine, seeing all of its GPUs; another
    runtime than `local` places and reserves."""
    return getattr(planned.specs.get("runtime"), "name", "local") == "local"


def engines_apart(planned: Any) -> int:
    """Engines that a planned stage starts, like those that train, only to evaluate."""
    place = getattr(planned.built.get("evaluator"), "place", "rollout")
    config = getattr(planned.specs.get("evaluator"), "config", {})
    return int(config.get("workers", 1)) if place == "apart" else 0
