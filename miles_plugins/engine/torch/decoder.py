"""The forward of a rotary decoder over a key-value cache, always at one fixed number of token
slots.

Knows canonical tensor names and the shape in `Decoder`; knows no requests, no sampling and no model
family. One shape for prefill, decode and scoring is what makes a token's numbers independent of
which other tokens share the forward, bit for bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from miles import Decoder, WeightSyncError
from miles.learn.logprobs import product
from miles_plugins.engine.torch.cache import Cache

__all__ = ["Forward", "Layer", "Parameters", "collect", "fuse", "moved", "wanted"]


def wanted(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Canonical name to shape of every tensor that the engine needs."""
    hidden, inner, width = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    queries, keys = decoder.heads * width, decoder.kv_heads * width
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (decoder.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not decoder.tied:
        shapes["lm_head.weight"] = (decoder.vocab_size, hidden)
    for layer in range(decoder.layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[at + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
        for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[at + f"self_attn.{letter}_proj.weight"] = (rows, hidden)
            if decoder.attention_bias:
                shapes[at + f"self_attn.{letter}_proj.bias"] = (rows,)
        if decoder.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = (width,)
            shapes[at + "self_attn.k_norm.weight"] = (width,)
    return shapes


def _optional(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Families with attention biases differ in whether the output projection has one as well."""
    if not decoder.attention_bias:
        return {}
    shape = (decoder.hidden_size,)
    return {f"model.layers.{i}.self_attn.o_proj.bias": shape for i in range(decoder.layers)}


def collect(
    decoder: Decoder,
    engine_name: Callable[[str], str | None],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Canonical name to tensor from a stream of Hugging Face names.

    Raises `WeightSyncError` naming every tensor that is missing, unknown, sent twice, of another
    shape, or not finite.
    """
    needed, optional = wanted(decoder), _optional(decoder)
    found: dict[str, torch.Tensor] = {}
    faults: list[str] = []
    for name, tensor in weights:
        canonical = engine_name(name)
        if canonical is None:
            continue
        shape = needed.get(canonical, optional.get(canonical))
        if shape is None:
            faults.append(f"{name} is unknown")
        elif canonical in found:
            faults.append(f"{name} arrived twice")
        elif tuple(tensor.shape) != shape:
            faults.append(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        elif not (torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all()):
            faults.append(f"{name} is not finite")
        else:
            found[canonical] = tensor
    refused = {fault.split(" ", 1)[0] for fault in faults}
    missing = [n for n in needed if n not in found and n not in refused]
    faults += [f"{name} is missing" for name in missing]
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise WeightSyncError(f"engine torch: weights refused: {'; '.join(faults[:8])}{more}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Fused weights of one block. Q, K, D: query, key and head widths; H hidden; I inner."""

    input_norm: torch.Tensor
    """(H,)"""
    qkv: torch.Tensor
    """(Q + 2K, H): query, key and value projections, one under the other."""
    qkv_bias: torch.Tensor | None
    """(Q + 2K,)"""
    qk_norm: torch.Tensor | None
    """(heads + kv_heads, D): each head's RMSNorm weight."""
    output: torch.Tensor
    """(H, Q)"""
    output_bias: torch.Tensor | None
    """(H,)"""
    mlp_norm: torch.Tensor
    """(H,)"""
    gate_up: torch.Tensor
    """(2I, H)"""
    down: torch.Tensor
    """(H, I)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """One version of the weights, fused and in the engine's type."""

    embedding: torch.Tensor
    """(vocab, H)"""
    norm: torch.Tensor
    """(H,)"""
    head: torch.Tensor
    """(vocab, H)"""
    layers: tuple[Layer, ...]
    """Blocks in order."""


@torch.inference_mode()
def fuse(
    decoder: Decoder,
    found: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Parameters:
    """Copy canonical tensors into fused ones; nothing keeps a reference to the originals."""

    def take(*names: str) -> torch.Tensor:
        parts = [found[n].to(device=device, dtype=dtype) for n in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    layers = []
    for i in range(decoder.layers):
        at = f"model.layers.{i}."
        qkv = [f"{at}self_attn.{letter}_proj." for letter in "qkv"]
        qk_norm = None
        if decoder.qk_norm:
            parts = (("q", decoder.heads), ("k", decoder.kv_heads))
            qk_norm = torch.cat(
                [take(f"{at}self_attn.{x}_norm.weight").expand(n, -1) for x, n in parts]
            )
        output_bias = at + "self_attn.o_proj.bias"
        layers.append(
            Layer(
                input_norm=take(at + "input_layernorm.weight"),
                qkv=take(*(name + "weight" for name in qkv)),
                qkv_bias=take(*(n + "bias" for n in qkv)) if decoder.attention_bias else None,
                qk_norm=qk_norm,
                output=take(at + "self_attn.o_proj.weight"),
                output_bias=take(output_bias) if output_bias in found else None,
                mlp_norm=take(at + "post_attention_layernorm.weight"),
                gate_up=take(at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"),
                down=take(at + "mlp.down_proj.weight"),
            )
        )
    embedding = take("model.embed_tokens.weight")
    return Parameters(
        embedding=embedding,
        norm=take("model.norm.weight"),
        head=embedding if decoder.tied else take("lm_head.weight"),
        layers=tuple(layers),
    )


def moved(parameters: Parameters, device: torch.device | str) -> Parameters:
    """The same parameters on another device; a tied head stays tied."""

    def move(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.to(device)

    embedding = move(parameters.embedding)
    tied = parameters.head is parameters.embedding
    return Parameters(
        embedding=embedding,
        norm=move(parameters.norm),
        head=embedding if tied else move(parameters.head),
        layers=tuple(
            Layer(**{f.name: move(getattr(layer, f.name)) for f in fields(Layer)})
            for layer in parameters.layers
        ),
    )


class Forward:
    """Logits of a fixed number of token slots, each one (row, position, token)."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        max_len: int,
        key_block: int,
        dtype: torch.dtype,
        device: torch.device,
        wide: bool = False,
    ) -> None:
        self.decoder = decoder
        self.slots = slots
        self.wide = wide  # logits are not rounded to `dtype`
        self.key_block = key_block
        self.dtype = dtype
        self.scale = decoder.head_dim**-0.5
        with torch.inference_mode():
            half = torch.arange(0, decoder.head_dim, 2, dtype=torch.int64).float()
            frequency = 1.0 / (decoder.rope_theta ** (half / decoder.head_dim))
            angle = torch.arange(max_len).float()[:, None] * frequency  # (max_len, head_dim / 2)
            self.cosine = torch.cat((angle.cos(), angle.cos()), -1).to(device=device, dtype=dtype)
            self.sine = angle.sin().to(device=device, dtype=dtype)
            visible = torch.arange(key_block) < torch.arange(key_block + 1)[:, None]
            self.masks = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf).to(device)
            self.eps = torch.tensor(decoder.norm_eps, device=device)

    @torch.inference_mode()
    def __call__(
        self,
        parameters: Parameters,
        cache: Cache,
        tokens_T: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        longest: int,
        head: bool = True,
        aligned: bool = False,
    ) -> torch.Tensor | None:
        """Write keys and values of T slots and return (T, vocab) float32 logits.

        T is exactly `slots`; all three are (T,) int64. Positions below a slot's own must be in the
        cache or in this call. `longest` is the largest position plus one; more key blocks than it
        needs would change nothing. `head=False` skips the logits and returns None. `aligned` says
        that slot i is of row i, or padding: the cache is then read where it lies.
        """
        decoder = self.decoder
        slots, queries, width = self.slots, decoder.heads, decoder.head_dim
        keys = decoder.kv_heads
        group = queries // keys
        cosine = self.cosine.index_select(0, positions_T)[:, None]  # (T, 1, head_dim)
        sine = self.sine.index_select(0, positions_T)[:, None]  # (T, 1, head_dim / 2)
        masks = [self._mask(positions_T, block) for block in range(-(-longest // self.key_block))]
        places = cache.places(rows_T, positions_T)
        x = parameters.embedding.index_select(0, tokens_T)  # (T, hidden)
        for index, layer in enumerate(parameters.layers):
            h = F.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            h = h.view(slots, queries + 2 * keys, width)
            self._rotate(h[:, : queries + keys], layer.qk_norm, cosine, sine)
            cache.write(index, places, h[:, queries:].reshape(-1, width))
            q = h[:, :queries].reshape(slots * keys, group, width)
            mixed = self._attend(q, cache, index, None if aligned else rows_T, masks)
            mixed = mixed.view(slots, queries * width)
            x = torch.addmm(x, mixed, layer.output.t())
            if layer.output_bias is not None:
                x = x + layer.output_bias
            h = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up)
            gate, up = h.chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down.t())
        if not head:
            return None
        x = self._norm(x, parameters.norm)
        return product(x, parameters.head, wide=self.wide).float()

    def _mask(self, positions_T: torch.Tensor, block: int) -> torch.Tensor:
        """(T * kv_heads, 1, key_block) float32: 0 where a key is not after its query, else -inf."""
        seen = (positions_T - (block * self.key_block - 1)).clamp_(0, self.key_block)
        mask = self.masks.index_select(0, seen)[:, None, None]
        shape = (self.slots, self.decoder.kv_heads, 1, self.key_block)
        return mask.expand(shape).reshape(-1, 1, self.key_block)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return self._unit(x).mul_(weight)
        return self._unit(x.float()).to(x.dtype) * weight

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) over the last axis of float32, in a new tensor."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.eps, size, size, value=1 / x.shape[-1]).rsqrt_()

    def _rotate(
        self,
        h: torch.Tensor,
        weight: torch.Tensor | None,
        cosine: torch.Tensor,
        sine: torch.Tensor,
    ) -> None:
        """Norm (if any) and rotary embedding of (T, heads + kv_heads, head_dim), in place."""
        straight = h.clone() if weight is None else self._unit(h.float()).to(h.dtype).mul_(weight)
        torch.mul(straight, cosine, out=h)
        (left, right), (first, second) = straight.chunk(2, -1), h.chunk(2, -1)
        first.addcmul_(right, sine, value=-1)
        second.addcmul_(left, sine)

    def _attend(
        self,
        q: torch.Tensor,
        cache: Cache,
        layer: int,
        rows_T: torch.Tensor | None,
        masks: list[torch.Tensor],
    ) -> torch.Tensor:
        """(T * kv_heads, group, head_dim): softmax attention accumulated over fixed key blocks.

        The running rescale of online softmax (Milakov and Gimelshein, 2018): a block that is wholly
        masked for a query multiplies by exp(0) and adds exact zeros, so how many blocks the longest
        neighbour needs does not show. Slots are of `rows_T`, without any each of its own number.
        """
        q = q.float()
        for index, mask in enumerate(masks):
            keys, values = cache.read(layer, index, rows_T, slots=self.slots)
            scores = torch.baddbmm(mask, q, keys.float(), alpha=self.scale)
            peak = scores.amax(-1, keepdim=True)
            if index == 0:
                weights = scores.sub_(peak).exp_()
                total, mixed, top = weights.sum(-1, keepdim=True), None, peak
                mixed = torch.bmm(weights, values.float())
                continue
            peak = torch.maximum(top, peak)
            weights = scores.sub_(peak).exp_()
            fade = (top - peak).exp_()
            total = total.mul_(fade).add_(weights.sum(-1, keepdim=True))
            mixed = mixed.mul_(fade).add_(torch.bmm(weights, values.float()))
            top = peak
        return mixed.div_(total).to(self.dtype)
