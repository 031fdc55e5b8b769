"""Torch side of the suites: a seeded module of a model, its log-probs computed plainly, and tensors
compared by bits.

Only checks import this module, inside themselves, because it imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch

from miles.batch import Tokens
from miles.testing.contract.case import expect, fault
from miles.types import Array

__all__ = ["as_tensors", "expect_same", "logprobs", "module", "names", "noisy", "packed_logprobs"]


def resolve(address: str) -> Any:
    """What `module:function` names."""
    where, _, name = address.partition(":")
    expect(where and name, f"{address!r} is not `module:function`")
    function = getattr(import_module(where), name, None)
    expect(callable(function), f"{address!r} names no function")
    return function


def module(model: Any, seed: int = 0) -> Any:
    """The model's module as its own function builds it, float32, in evaluation mode."""
    torch.manual_seed(seed)
    made = resolve(model.build())(model.hf_config(), model.directory())
    expect(isinstance(made, torch.nn.Module), f"build() gives a {type(made).__name__}, no module")
    return made.float().eval()


def noisy(made: Any, seed: int = 0) -> Any:
    """The same module with noise in every parameter, so that no norm is 1 and no bias 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise.to(parameter.dtype))
    return made


def names(made: Any) -> dict[str, Any]:
    """Tensors by Hugging Face name, each once where several names share it."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = {}
    for name, tensor in made.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen:
            seen.add(key)
            found[name] = tensor
    return found


def logprobs(made: Any, tokens: Array, temperature: float = 1.0) -> Array:
    """(tokens,) float64 by definition: a plain float64 forward of one sample, log-softmax, gather;
    0 for the first."""
    made = made.double().eval()
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        output = made(input_ids=ids[None], use_cache=False)
    logits_TV = output.logits[0].double() / temperature
    chosen = torch.log_softmax(logits_TV[:-1], -1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()])


def packed_logprobs(made: Any, tokens: Tokens, temperature: float = 1.0) -> Array:
    """(T,) float64: `logprobs` of every sample alone, end to end."""
    stops = np.cumsum(tokens.lengths)
    return np.concatenate(
        [
            logprobs(made, tokens.tokens[stop - size : stop], temperature)
            for stop, size in zip(stops, tokens.lengths, strict=True)
        ]
    )


def as_tensors(weights: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Copies of exported tensors by name; a fault when a name comes twice."""
    found: dict[str, Any] = {}
    for name, tensor in weights:
        if name in found:
            fault(f"{name} was exported twice")
        found[name] = tensor.detach().clone()
    return found


def expect_same(one: Mapping[str, Any], two: Mapping[str, Any], what: str) -> None:
    """A fault unless both hold the same names, types, shapes and bits."""
    expect(list(one) == list(two), f"{what}: names or their order differ")
    for name, tensor in one.items():
        other = two[name]
        shapes = f"{tensor.dtype} {tuple(tensor.shape)} and {other.dtype} {tuple(other.shape)}"
        same_kind = tensor.dtype == other.dtype and tensor.shape == other.shape
        expect(same_kind, f"{what}: {name} is {shapes}")
        same_bits = torch.equal(_bits(tensor), _bits(other))
        expect(same_bits, f"{what}: {name} differs")


def _bits(tensor: Any) -> Any:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
