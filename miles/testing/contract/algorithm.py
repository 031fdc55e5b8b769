"""What every algorithm must do: give finite per-token weights to trainable tokens, whatever the
groups' order.

Whether its advantages are those of its paper is its own tests' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from miles.batch import Batch, flatten
from miles.testing.contract.case import Case, expect, fault
from miles.testing.samples import make_group
from miles.types import Array, Group, Sample, Trajectory
from miles.wire.frames import decode, encode

PASSES = ("current", "reference")


def check_needs(case: Case) -> None:
    """The log-prob passes that it asks for are ones that a trainer can make."""
    needs = case.build().needs()
    expect(isinstance(needs, tuple), f"needs() gave a {type(needs).__name__}, not a tuple")
    unknown = sorted(set(needs) - set(PASSES))
    expect(not unknown, f"needs() asks for {unknown}; there are {', '.join(PASSES)}")


def check_terms(case: Case) -> None:
    """Every term of a batch is one of `terms()`, whose function can be imported."""
    algorithm = case.build()
    terms = dict(algorithm.terms())
    expect(terms, "terms() is empty: there would be no loss")
    for name, address in terms.items():
        _resolve(name, address)
    for term in _prepare(algorithm, _groups()).terms:
        expect(term.name in terms, f"term {term.name!r} is not among {', '.join(sorted(terms))}")
        expect(
            term.function == terms[term.name], f"term {term.name!r} is {term.function} in a batch"
        )
    names = [t.name for t in _prepare(algorithm, _groups()).terms]
    expect(len(set(names)) == len(names), f"a batch has terms {names}: one name twice")


def check_batch(case: Case) -> None:
    """A batch holds the groups' samples in order, and terms whose weights and inputs are one finite
    float32 a token."""
    algorithm = case.build()
    for what, groups in _cases().items():
        batch = _prepare(algorithm, groups)
        expect(isinstance(batch, Batch), f"{what}: prepare gave a {type(batch).__name__}")
        wanted = flatten(_samples(groups))
        same = np.array_equal(batch.tokens.tokens, wanted.tokens)
        expect(same, f"{what}: the batch's tokens are not the groups' samples in order")
        same = np.array_equal(batch.tokens.lengths, wanted.lengths)
        expect(same, f"{what}: the batch's lengths are not the samples'")
        for term in batch.terms:
            for name, values in {"weights": term.weights, **term.inputs}.items():
                _expect_per_token(values, len(wanted.tokens), f"{what}: {term.name}.{name}")
        for name, value in batch.metrics.items():
            good = isinstance(value, int | float | np.floating) and np.isfinite(value)
            expect(good, f"{what}: metric {name!r} is {value!r}")
        decode(encode(batch))


def check_trainable_only(case: Case) -> None:
    """Tokens that are not trainable weigh nothing, and some trainable token does."""
    algorithm = case.build()
    for what, groups in _cases().items():
        batch = _prepare(algorithm, groups)
        for term in batch.terms:
            leaking = np.flatnonzero((term.weights != 0) & ~batch.tokens.trainable)
            expect(not leaking.size, f"{what}: {term.name} weighs untrainable token {leaking[:1]}")
    some = any(t.weights.any() for t in _prepare(algorithm, _groups()).terms)
    expect(some, "groups with different rewards give no token any weight")


def check_order_of_groups(case: Case) -> None:
    """Groups in another order give every sample the same weights and inputs."""
    algorithm = case.build()
    groups = _groups()
    order = [2, 0, 3, 1]
    one = _by_sample(_prepare(algorithm, groups), groups)
    two = _by_sample(_prepare(algorithm, [groups[i] for i in order]), [groups[i] for i in order])
    for key, values in one.items():
        close = np.allclose(values, two[key], rtol=1e-4, atol=1e-6)
        expect(close, f"{key}: {values} and, with groups in another order, {two[key]}")


def check_pure(case: Case) -> None:
    """`prepare` gives the same for the same groups, time after time, and leaves what it was given
    alone."""
    algorithm = case.build()
    groups = _groups()
    passes = _passes(algorithm, groups)
    before = encode([groups, passes])
    one = encode(algorithm.prepare(groups, passes))
    algorithm.prepare(groups[::-1], _passes(algorithm, groups[::-1]))
    two = encode(algorithm.prepare(groups, passes))
    expect(one == two, "prepare gives something else the second time")
    expect(encode([groups, passes]) == before, "prepare changed its arguments")


def check_functions(case: Case) -> None:
    """Its term functions give one finite value a token, with a finite gradient, and mix no tokens
    up."""
    import torch

    algorithm = case.build()
    batch = _prepare(algorithm, _groups())
    size = len(batch.tokens.tokens)
    rng = np.random.default_rng(3)
    for term in batch.terms:
        function = _resolve(term.name, term.function)
        inputs = {k: torch.from_numpy(v.copy()) for k, v in term.inputs.items()}
        logprobs = torch.from_numpy(-4 * rng.random(size).astype(np.float32)).requires_grad_()
        entropy = torch.from_numpy(3 * rng.random(size).astype(np.float32)).requires_grad_()
        values = function(logprobs, entropy, inputs, dict(term.options))
        expect(
            values.shape == (size,), f"{term.function} gave {tuple(values.shape)}, not ({size},)"
        )
        expect(torch.isfinite(values).all(), f"{term.function} gave a value that is not finite")
        if not values.requires_grad:
            fault(f"{term.function} cuts the gradient")
        total = (values * torch.from_numpy(term.weights.copy())).sum()
        slopes = torch.autograd.grad(total, (logprobs, entropy), allow_unused=True)
        for slope in slopes:
            finite = slope is None or bool(torch.isfinite(slope).all())
            expect(finite, f"the gradient of {term.function} is not finite")
        head = {k: v[: size // 2] for k, v in inputs.items()}
        half = function(logprobs[: size // 2], entropy[: size // 2], head, dict(term.options))
        close = torch.allclose(half, values[: size // 2], rtol=1e-5, atol=1e-6)
        expect(close, f"{term.function} gives other values for the first tokens alone")


def _resolve(name: str, address: str) -> Any:
    where, _, function = address.partition(":")
    try:
        found = getattr(import_module(where), function, None)
    except ImportError as error:
        fault(f"term {name!r}: {address!r} cannot be imported: {error}")
    expect(callable(found), f"term {name!r}: {address!r} names no function")
    return found


def _prepare(algorithm: Any, groups: Sequence[Group]) -> Any:
    return algorithm.prepare(groups, _passes(algorithm, groups))


def _passes(algorithm: Any, groups: Sequence[Group]) -> dict[str, Array]:
    """Noise beside the rollout's own log-probs, the same for a sample wherever it stands."""
    found = {}
    for name in algorithm.needs():
        parts = []
        for sample in _samples(groups):
            rng = np.random.default_rng([len(name), *sample.tokens.tolist()])
            noise = 0.1 * rng.normal(size=len(sample.tokens))
            known = sample.logprobs if sample.logprobs is not None else np.zeros(1)
            parts.append((known + noise).astype(np.float32))
        found[name] = np.concatenate(parts)  # (T,) float32
    return found


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [s for g in groups for s in g.samples]


def _groups() -> list[Group]:
    return [
        make_group(0, rewards=(1.0, 0.0, 0.0), lengths=(4, 7, 2)),
        make_group(1, rewards=(0.25, 0.5), lengths=(3, 3)),
        make_group(2, rewards=(-1.0, 2.0, 0.0, 1.0), lengths=(1, 2, 3, 4)),
        make_group(3, rewards=(0.0, 1.0), versions=(0, 1)),
    ]


def _cases() -> dict[str, list[Group]]:
    mixed = make_group(0, rewards=(1.0, 0.0))
    first, second = mixed.trajectories
    branched = replace(second, samples=(second.samples[0], first.samples[0]))
    silent = replace(first.samples[0], trainable=np.zeros_like(first.samples[0].trainable))
    masked = Trajectory(id="g0/m", samples=(silent,), reward=1.0)
    return {
        "usual groups": _groups(),
        "equal rewards": [make_group(0, rewards=(1.0, 1.0, 1.0))],
        "one attempt": [make_group(0, rewards=(1.0,))],
        "huge rewards": [make_group(0, rewards=(1e20, -1e20)), make_group(1)],
        "tiny differences": [make_group(0, rewards=(1.0, 1.0 + 1e-12))],
        "a branched trajectory": [replace(mixed, trajectories=(first, branched))],
        "a masked sample": [replace(mixed, trajectories=(masked, second)), make_group(1)],
    }


def _expect_per_token(values: Any, size: int, where: str) -> None:
    good = isinstance(values, np.ndarray) and values.shape == (size,) and values.dtype == np.float32
    kind = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values)
    expect(good, f"{where} is {kind}, not float32 ({size},)")
    expect(np.isfinite(values).all(), f"{where} is not finite")


def _by_sample(batch: Batch, groups: Sequence[Group]) -> dict[tuple[str, str, str], Array]:
    ids = [f"{t.id}#{i}" for g in groups for t in g.trajectories for i in range(len(t.samples))]
    edges = np.cumsum(batch.tokens.lengths)[:-1]
    found = {}
    for term in batch.terms:
        for name, values in {"weights": term.weights, **term.inputs}.items():
            for id, part in zip(ids, np.split(values, edges), strict=True):
                found[term.name, name, id] = part
    return found
