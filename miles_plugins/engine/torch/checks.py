"""What `miles check` can say of the embedded engine before it is built: values that cannot be, a
GPU that is not there, weights that do not fit.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from miles import Claim, engine_bytes, engines_apart, gpu_room, gpus_here, memory_here, places_here

__all__ = ["LONGEST", "check", "claims", "faults"]

LONGEST = 2048
"""Tokens of prompt and completion, unless `max_len` says more."""


def check(cls: type, config: Any, planned: Any) -> Sequence[str]:
    """Faults of a stage's engine; GPUs and memory where it runs on this machine."""
    del cls
    model = planned.built.get("model")
    decoder = getattr(model, "decoder", None)
    wrong = faults(config, None if decoder is None else decoder())
    return wrong or [*_lacking(config, planned)]


def claims(cls: type, config: Any, planned: Any) -> list[Claim]:
    """All of them are on the first GPU, unless a runtime gives each its own; beside them those that
    only evaluate, which never sleep."""
    del cls
    if config.device != "cuda" or not gpus_here():
        return []
    local, each = places_here(planned), engine_bytes(planned)
    about = {
        "what": _what(planned),
        "apart": "runtime=ray, which gives every worker GPUs of its own",
    }
    gpus, copies = range(1 if local else config.workers), config.workers if local else 1
    found = [Claim(who="engines", gpus=gpus, bytes=copies * each, releases=True, **about)]
    if local and (fleet := engines_apart(planned)):
        found.append(
            Claim(who="evaluation engines", gpus=gpus, bytes=fleet * each, releases=False, **about)
        )
    return found


def _what(planned: Any) -> str:
    return f"weights in {getattr(planned.built.get('precision'), 'engine', 'an unknown type')}"


def faults(config: Any, decoder: Any) -> list[str]:
    """Values that cannot be meant, or not with this model."""
    found = []
    for name in ("workers", "rows", "key_block", "threads", "max_waiting"):
        if getattr(config, name) < 1:
            found.append(f"{name} is {getattr(config, name)}; it must be at least 1")
    if (slots := config.chunk or config.rows) < 4:
        what = "chunk" if config.chunk else "rows (chunk is 0)"
        found.append(
            f"{what} is {slots}; a forward needs at least 4 token slots, because smaller products "
            "round differently"
        )
    if decoder is None:
        return found
    max_len = config.max_len or min(decoder.max_len, LONGEST)
    if max_len > decoder.max_len:
        found.append(f"max_len is {max_len}, but the model's longest context is {decoder.max_len}")
    if decoder.heads % decoder.kv_heads or decoder.head_dim % 2:
        found.append(
            f"{decoder.heads} query heads over {decoder.kv_heads} key heads of width "
            f"{decoder.head_dim}; heads must be a multiple of them, the width even"
        )
    if max_len < 2:
        found.append(f"max_len is {max_len}; it must be at least 2")
    return found


def _lacking(config: Any, planned: Any) -> Iterator[str]:
    """On this machine; under another runtime only of GPUs as large as those here."""
    room, where, local = memory_here(), "this machine's memory is", places_here(planned)
    copies = config.workers + engines_apart(planned)
    gpus = gpus_here() if config.device == "cuda" else []
    if not gpus and not local:
        return
    if config.device == "cuda":
        if not gpus:
            yield (
                "device is cuda, and there is no GPU here (no nvidia-smi or driver shows one); use "
                "device=cpu"
            )
            return
        room, where = gpu_room(gpus, [0]), "the first GPU, where each of them computes, has"
        if not local:
            copies, room, where = 1, gpu_room(gpus), "a GPU as those here has"
    need = copies * engine_bytes(planned)
    if need > room > 0:
        yield (
            f"weights of {copies} engine(s) take about {need / 2**30:.1f} GiB in "
            f"{planned.built['precision'].engine}, and {where} {room / 2**30:.1f} GiB; take a "
            "smaller model, or engine=sglang, which shares one among GPUs (engine.tp)"
        )
