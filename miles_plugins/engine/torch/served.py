"""What the embedded engine serves, taken apart again into the tensors that it was given.

For transports, which compare it with what the trainer sent; nothing here changes a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from miles import Decoder
from miles.learn.digest import hexadecimal, sums
from miles_plugins.engine.torch.decoder import Parameters
from miles_plugins.engine.torch.taking import Origins

__all__ = ["digests", "parts"]


def parts(decoder: Decoder, served: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
    """(canonical name, view) of every tensor."""
    width = decoder.head_dim
    rows = {"q": decoder.heads * width, "k": decoder.kv_heads * width}
    rows["v"] = rows["k"]
    yield "model.embed_tokens.weight", served.embedding
    yield "model.norm.weight", served.norm
    if not decoder.tied:
        yield "lm_head.weight", served.head
    for index, layer in enumerate(served.layers):
        at = f"model.layers.{index}."
        yield at + "input_layernorm.weight", layer.input_norm
        yield at + "post_attention_layernorm.weight", layer.mlp_norm
        yield at + "self_attn.o_proj.weight", layer.output
        if layer.output_bias is not None:
            yield at + "self_attn.o_proj.bias", layer.output_bias
        for letter, part in zip(rows, layer.qkv.split(list(rows.values())), strict=True):
            yield at + f"self_attn.{letter}_proj.weight", part
        if layer.qkv_bias is not None:
            for letter, part in zip(rows, layer.qkv_bias.split(list(rows.values())), strict=True):
                yield at + f"self_attn.{letter}_proj.bias", part
        if layer.qk_norm is not None:
            yield at + "self_attn.q_norm.weight", layer.qk_norm[0]
            yield at + "self_attn.k_norm.weight", layer.qk_norm[decoder.heads]
        gate, up = layer.gate_up.chunk(2)
        yield at + "mlp.gate_proj.weight", gate
        yield at + "mlp.up_proj.weight", up
        yield at + "mlp.down_proj.weight", layer.down


def digests(
    decoder: Decoder,
    served: Parameters,
    names: Mapping[str, str],
    origins: Origins,
    *,
    export: torch.dtype,
) -> dict[str, str]:
    """Content digest of every tensor in the type `export`, by the name it came under; `names` maps
    canonical ones to those. What is exactly the rounding of a tensor in `origins` has the digest of
    that tensor."""
    held = list(parts(decoder, served))
    found = {}
    content = hexadecimal(sums(tensor.to(export) for _, tensor in held))
    for name, digest in zip((names[canonical] for canonical, _ in held), content, strict=True):
        made, came = origins.get(name, ("", ""))
        found[name] = came if digest == made else digest
    return found
