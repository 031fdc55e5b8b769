"""Draws tokens from rows of logits: noise from counters, temperature, nucleus, top-k, log-probs.

Holds no state and knows no requests: what a row draws is a function of that row's numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from miles import Array

__all__ = ["Draw", "Rules", "draw", "logprob_of", "mix", "noise"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: Array) -> Array:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of uint64 arrays."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def noise(streams: Array, positions: Array) -> Array:
    """Uniforms in [0, 1): element `positions` of the SplitMix64 sequence that starts at `streams`.

    Both are (n,) uint64, `streams` already passed through `mix`; returns (n,) float64. A function
    of the two alone, so a request draws the same whatever else is in the batch.
    """
    state = streams + (positions + np.uint64(1)) * _GOLDEN
    return (mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How each of S rows is drawn."""

    temperature: Array
    """(S,) float32, above 0; 1 for greedy rows."""
    greedy: Array
    """(S,) bool: take the likeliest token, the lowest id among equals."""
    top_p: Array
    """(S,) float64; 1 keeps all."""
    top_k: Array
    """(S,) int64; 0 keeps all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What S rows drew."""

    tokens: Array
    """(S,) int64."""
    logprobs: Array
    """(S,) float32 under the whole distribution at the row's temperature."""
    truncated: Array
    """(S,) float32 under the distribution cut by top-k and top-p; equal to `logprobs` where none
    cut."""


def draw(logits_SV: torch.Tensor, rules: Rules, uniforms: Array) -> Draw:
    """Draw one token a row by inverting the cumulative distribution at `uniforms`, (S,) float64.

    Top-k is taken first and top-p from what it leaves, renormalised. Greedy rows are not cut. A row
    with logits that are not finite comes back with a log-prob that is not finite.
    """
    logprobs_SV = _logprobs(logits_SV, rules.temperature)
    greedy = bool(rules.greedy.any())
    if greedy and rules.greedy.all():
        tokens = logprobs_SV.argmax(-1)
        picked = _pick(logprobs_SV, tokens).cpu().numpy()
        return Draw(tokens=tokens.cpu().numpy(), logprobs=picked, truncated=picked)
    weights_SV = logprobs_SV.exp()
    kept = np.ones(len(rules.greedy))  # (S,) float64, probability left after the cuts
    cut = np.flatnonzero(((rules.top_p < 1) | (rules.top_k > 0)) & ~rules.greedy)
    if len(cut):
        index = torch.from_numpy(cut).to(logits_SV.device)
        weights_KV = _truncate(weights_SV[index], rules.top_p[cut], rules.top_k[cut])
        kept[cut] = weights_KV.sum(-1, dtype=torch.float64).cpu().numpy()
        weights_SV[index] = weights_KV
    # In float64, so that a wide vocabulary's rounding cannot shift probability between tokens.
    cumulative_SV = weights_SV.cumsum(-1, dtype=torch.float64)
    total_S = cumulative_SV[:, -1]
    target_S = torch.from_numpy(uniforms).to(logits_SV.device) * total_S
    target_S = torch.minimum(target_S, torch.nextafter(total_S, torch.zeros_like(total_S)))
    tokens = torch.searchsorted(cumulative_SV, target_S[:, None], right=True).squeeze(-1)
    tokens = tokens.clamp_(max=logits_SV.shape[-1] - 1)
    if greedy:
        mask = torch.from_numpy(rules.greedy).to(logits_SV.device)
        tokens = torch.where(mask, logprobs_SV.argmax(-1), tokens)
    picked = _pick(logprobs_SV, tokens).cpu().numpy()
    truncated = picked
    if len(cut):
        truncated = picked.copy()
        truncated[cut] = (picked[cut] - np.log(kept[cut])).astype(np.float32)
    return Draw(tokens=tokens.cpu().numpy(), logprobs=picked, truncated=truncated)


def logprob_of(logits_SV: torch.Tensor, tokens: Array, temperature: Array) -> Array:
    """(S,) float32 log-prob of given tokens, bit-equal to what `draw` would have reported for
    them."""
    index = torch.from_numpy(tokens).to(logits_SV.device)
    return _pick(_logprobs(logits_SV, temperature), index).cpu().numpy()


def _logprobs(logits_SV: torch.Tensor, temperature: Array) -> torch.Tensor:
    if (temperature != 1).any():
        logits_SV = logits_SV / torch.from_numpy(temperature).to(logits_SV.device)[:, None]
    return logits_SV.log_softmax(-1)


def _pick(logprobs_SV: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logprobs_SV.gather(-1, tokens[:, None]).squeeze(-1)


def _truncate(weights_KV: torch.Tensor, top_p: Array, top_k: Array) -> torch.Tensor:
    """Zero what top-k, then top-p, leave out of (K, V) probabilities; the likeliest always
    stays."""
    device, vocab = weights_KV.device, weights_KV.shape[-1]
    ordered_KV, ids_KV = weights_KV.sort(dim=-1, descending=True, stable=True)
    limit_K = torch.from_numpy(np.where(top_k > 0, top_k, vocab)).to(device)
    rank_V = torch.arange(vocab, device=device)
    ordered_KV = ordered_KV.masked_fill(rank_V >= limit_K[:, None], 0.0)
    cumulative_KV = ordered_KV.cumsum(-1, dtype=torch.float64)
    share_K = torch.from_numpy(top_p).to(device) * cumulative_KV[:, -1]
    # A token stays while the ones before it do not yet reach the nucleus: the smallest such set.
    enough_KV = (cumulative_KV - ordered_KV) >= share_K[:, None]
    enough_KV &= (torch.from_numpy(top_p).to(device) < 1)[:, None]
    enough_KV[:, 0] = False
    ordered_KV = ordered_KV.masked_fill(enough_KV, 0.0)
    return torch.zeros_like(weights_KV).scatter_(-1, ids_KV, ordered_KV)
