"""What a checkpoint's safetensors files say they hold, read from their headers alone.

Reads names and shapes, never a tensor, so it is cheap enough for `miles check`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from miles import ConfigError, Decoder

__all__ = ["dense_shapes", "faults", "shapes", "weight_files"]

Shape = tuple[int, ...]

_LARGEST = 100 * 2**20
"""Bytes of the largest header that safetensors writes."""


def weight_files(directory: Path) -> list[Path]:
    """Every safetensors file of a checkpoint. Raises `ConfigError` when one is not there."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    absent = [str(path) for path in files if not path.is_file()]
    if absent:
        raise ConfigError(
            f"model: {', '.join(absent)} does not exist; weights are read from safetensors only"
        )
    return files


def shapes(files: Sequence[Path]) -> dict[str, Shape]:
    """Shape of every tensor by name. Raises `ConfigError` for a damaged header or a file that
    ends too early."""
    found: dict[str, Shape] = {}
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LARGEST):
                raise ConfigError(f"model: {path} is damaged: its header cannot be {length} bytes")
            text = file.read(length)
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            end = max((row["data_offsets"][1] for row in header.values()), default=0)
            found |= {name: tuple(row["shape"]) for name, row in header.items()}
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"model: {path} is damaged: its header is not JSON") from error
        if size < 8 + length + end:
            missing = 8 + length + end - size
            raise ConfigError(f"model: {path} is damaged: {missing} bytes are missing at its end")
    return found


def dense_shapes(decoder: Decoder) -> Iterator[tuple[str, Shape]]:
    """Hugging Face names and shapes of a dense decoder; a tied output head is left out."""
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    queries, keys = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    yield "model.embed_tokens.weight", (decoder.vocab_size, hidden)
    for index in range(decoder.layers):
        layer = f"model.layers.{index}."
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"{layer}{name}.weight", (rows, columns)
            if decoder.attention_bias and name.startswith("self_attn"):
                yield f"{layer}{name}.bias", (rows,)
        for name in ("self_attn.q_norm", "self_attn.k_norm") if decoder.qk_norm else ():
            yield f"{layer}{name}.weight", (decoder.head_dim,)
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not decoder.tied:
        yield "lm_head.weight", (decoder.vocab_size, hidden)


def faults(held: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[str]:
    """Every tensor that is missing, extra or of another shape. Position buffers of old checkpoints
    and the copy of a tied head are no fault."""
    found = [f"{name} is missing" for name in wanted if name not in held]
    for name, shape in held.items():
        if name in wanted and shape != wanted[name]:
            found.append(f"{name} has shape {shape}, not {wanted[name]}")
        copied = name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
        if name not in wanted and not copied:
            found.append(f"{name} is extra")
    return found
