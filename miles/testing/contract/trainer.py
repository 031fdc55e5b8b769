"""What every trainer must do: lower the loss it is given, count versions, and lose nothing on the
way to disk.

Speed, memory and distribution over ranks are its own tests' business; the suite runs one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles.batch import Batch, Term, Tokens, Update, flatten
from miles.errors import TrainerError
from miles.settings import Settings
from miles.testing.contract.case import Case, expect, raises
from miles.testing.samples import make_sample
from miles.types import Array, Sample

STEPS = 8
"""Enough to be past a warm-up of a few steps."""
SIZES = ((3, 6), (1, 4), (5, 2), (2, 9), (4, 1))
"""Prompt and completion tokens of the samples that are trained on."""


def check_step_lowers_loss(case: Case) -> None:
    """Steps on one batch lower its loss, a mean negative log-prob."""
    trainer = case.build()
    batch = _batch(case)
    losses = [_loss(trainer.step(batch)) for _ in range(STEPS)]
    expect(losses[-1] < losses[0], f"the loss went from {losses[0]:.6f} to {losses[-1]:.6f}")


def check_versions_count(case: Case) -> None:
    """The version is 0 at first and one more after every step, in `version` and in the `Update`."""
    trainer = case.build()
    expect(trainer.version == 0, f"a new trainer has version {trainer.version}, not 0")
    for wanted in (1, 2, 3):
        update = trainer.step(_batch(case))
        expect(isinstance(update, Update), f"step() gave a {type(update).__name__}, not an Update")
        found = (update.version, trainer.version)
        expect(found == (wanted, wanted), f"after {wanted} steps: update and trainer say {found}")


def check_update_metrics(case: Case) -> None:
    """An update reports its loss terms, gradient norm, learning rate and trained tokens, all
    finite."""
    batch = _batch(case)
    metrics = case.build().step(batch).metrics
    for name in ("loss/nll", "grad_norm", "lr", "tokens/trained"):
        value = metrics.get(name)
        known = isinstance(value, int | float)
        expect(known and np.isfinite(value), f"metric {name!r} is {value!r}")
    wanted = int(np.count_nonzero(batch.terms[0].weights))
    found = metrics["tokens/trained"]
    expect(found == wanted, f"tokens/trained is {found}, {wanted} tokens carried loss")


def check_loss_is_the_weighted_sum(case: Case) -> None:
    """`loss/<term>` is the sum of weight × value over all tokens; inputs and options reach the
    term's function."""
    trainer = case.build()
    tokens = flatten(_samples(case))
    rng = np.random.default_rng(5)
    size = len(tokens.tokens)
    tilt = rng.normal(size=size).astype(np.float32)  # (T,) float32
    weights = (tokens.trainable * rng.random(size)).astype(np.float32)  # (T,) float32
    logprobs = trainer.logprobs(tokens, "current").astype(np.float64)
    terms = (
        _term("nll", "negative_logprob", weights),
        replace(_term("tilted", "tilted", weights), inputs={"tilt": tilt}, options={"scale": 0.25}),
    )
    metrics = trainer.step(Batch(tokens=tokens, terms=terms)).metrics
    wanted = {
        "nll": -(weights * logprobs).sum(),
        "tilted": (weights * 0.25 * tilt * logprobs).sum(),
    }
    for name, value in wanted.items():
        found = metrics[f"loss/{name}"]
        close = abs(found - value) <= 1e-4 * max(1.0, abs(value)) + _limit(case) * weights.sum()
        expect(close, f"loss/{name} is {found:.6f}; weights × values give {value:.6f}")


def check_order_is_nothing(case: Case) -> None:
    """The order of samples, and so how they are cut into micro-batches, changes neither loss nor
    gradient."""
    samples = _samples(case)
    one = case.build().step(_batch(case, samples)).metrics
    two = case.build().step(_batch(case, samples[::-1])).metrics
    for name in ("loss/nll", "grad_norm"):
        close = np.isclose(one[name], two[name], rtol=max(1e-4, 10 * _limit(case)))
        expect(close, f"{name} is {one[name]} and, with samples in another order, {two[name]}")


def check_logprobs(case: Case) -> None:
    """`logprobs` are the exported weights' own: position t given what stands before it in its
    sample, 0 first."""
    from miles.testing.contract import reference

    for temperature in (1.0, 0.7):
        trainer = case.build(settings=Settings(temperature=temperature))
        trainer.step(_batch(case))
        tokens = flatten(_samples(case))
        found = trainer.logprobs(tokens, "current")
        shape = (len(tokens.tokens),)
        good = found.shape == shape and found.dtype == np.float32
        expect(good, f"logprobs gave {found.dtype} {found.shape}, not float32 {shape}")
        starts = np.cumsum(tokens.lengths) - tokens.lengths
        expect(
            (found[starts] == 0).all(), "the first token of a sample has a log-prob other than 0"
        )
        made = reference.module(case.companion("model"))
        made.load_state_dict(reference.as_tensors(trainer.export()), strict=False)
        worst = float(np.abs(found - reference.packed_logprobs(made, tokens, temperature)).max())
        limit = _limit(case)
        expect(
            worst <= limit,
            f"at temperature {temperature:g} log-probs are {worst:.3g} nats off a plain float64 "
            f"forward; at most {limit:g} is allowed",
        )


def check_logprobs_change_nothing(case: Case) -> None:
    """Asking for log-probs moves neither weights nor version, and gives the same bits twice."""
    from miles.testing.contract import reference

    trainer = case.build()
    trainer.step(_batch(case))
    before = reference.as_tensors(trainer.export())
    one, two = (trainer.logprobs(flatten(_samples(case)), "current") for _ in range(2))
    expect(np.array_equal(one, two), "the same log-probs asked for twice differ")
    reference.expect_same(before, reference.as_tensors(trainer.export()), "weights after logprobs")
    expect(trainer.version == 1, f"version is {trainer.version} after one step and log-probs")


def check_logprobs_refuses_other_sources(case: Case) -> None:
    """A source other than `current` and `reference` is a `TrainerError`."""
    with raises(TrainerError, "logprobs of 'no_such_source'"):
        case.build().logprobs(flatten(_samples(case)), "no_such_source")


def check_refuses_experts_unless_replayed(case: Case) -> None:
    """Tokens with experts are a `TrainerError`, weights unchanged, unless it says that it
    `replays_experts`."""
    trainer = case.build()
    if getattr(type(trainer), "replays_experts", False):
        return
    tokens = flatten(_samples(case))
    routed = replace(tokens, experts=np.zeros((len(tokens.tokens), 1, 1), np.uint8))
    with raises(TrainerError, "logprobs of samples with experts"):
        trainer.logprobs(routed, "current")
    with raises(TrainerError, "a step on samples with experts"):
        trainer.step(_batch(case, tokens=routed))
    expect(trainer.version == 0, f"version is {trainer.version} after a refused step")


def check_export(case: Case) -> None:
    """Export gives every Hugging Face name once, whole, in a fixed order, in the precision's export
    type."""
    import torch

    from miles.testing.contract import reference

    trainer = case.build()
    one, two = (reference.as_tensors(trainer.export()) for _ in range(2))
    reference.expect_same(one, two, "two exports of the same weights")
    wanted = reference.names(reference.module(case.companion("model")))
    wrong = sorted(set(one) ^ set(wanted))
    expect(not wrong, f"exported names are not those of the model: {', '.join(wrong[:4])}")
    dtype = getattr(torch, case.companion("precision").export)
    for name, tensor in one.items():
        shape = tuple(tensor.shape)
        expect(shape == tuple(wanted[name].shape), f"{name} is exported as {shape}")
        expect(tensor.dtype == dtype, f"{name} is exported as {tensor.dtype}, not {dtype}")


def check_seeded(case: Case) -> None:
    """Two trainers of one seed that take the same steps have the same bits."""
    from miles.testing.contract import reference

    trainers = [case.build(), case.build()]
    for _ in range(2):
        metrics = [t.step(_batch(case)).metrics for t in trainers]
        losses = [m["loss/nll"] for m in metrics]
        expect(losses[0] == losses[1], f"losses of two equal trainers: {losses}")
    one, two = (reference.as_tensors(t.export()) for t in trainers)
    reference.expect_same(one, two, "two trainers of one seed")


def check_save_load(case: Case) -> None:
    """A trainer loaded from what another saved goes on with the same bits: weights, optimizer,
    version."""
    from miles.testing.contract import reference

    one = case.build()
    for _ in range(2):
        one.step(_batch(case))
    folder = case.folder("checkpoint")
    one.save(folder)
    for part in ("model/config.json", "trainer"):
        expect((folder / part).exists(), f"save() wrote no {part}")
    other = case.build(seed=1)
    other.load(folder)
    expect(other.version == 2, f"the loaded trainer's version is {other.version}, not 2")
    _expect_equal(one, other, "after load()")
    for _ in range(2):
        losses = [_loss(t.step(_batch(case))) for t in (one, other)]
        expect(losses[0] == losses[1], f"losses of the saved and the loaded trainer: {losses}")
    _expect_equal(one, other, "two steps after load()")
    weights_only = case.build(seed=1)
    weights_only.load(folder, weights_only=True)
    expect(weights_only.version == 2, f"weights_only: version is {weights_only.version}, not 2")
    saved = case.build(seed=2)
    saved.load(folder)
    reference.expect_same(
        reference.as_tensors(saved.export()),
        reference.as_tensors(weights_only.export()),
        "weights_only",
    )


def check_refuses_what_is_not_finite(case: Case) -> None:
    """A loss or gradient that is not finite is a `TrainerError`; weights, version and the next step
    are as before."""
    one, other = case.build(), case.build()
    for bad in (np.nan, np.inf):
        poisoned = _batch(case)
        poisoned.terms[0].weights[np.flatnonzero(poisoned.terms[0].weights)[0]] = bad
        with raises(TrainerError, f"a step whose weights hold {bad}"):
            one.step(poisoned)
        expect(one.version == 0, f"version is {one.version} after a refused step")
        _expect_equal(one, other, "after a refused step")
    losses = [_loss(t.step(_batch(case))) for t in (one, other)]
    expect(losses[0] == losses[1], f"losses with and without a refused step before: {losses}")
    _expect_equal(one, other, "a step after a refused one")


def check_measures_mismatch(case: Case) -> None:
    """Rollout log-probs that are its own measure as no mismatch, others by how far they are off."""
    trainer = case.build()
    tokens = flatten(_samples(case))
    own = np.where(tokens.sampled, trainer.logprobs(tokens, "current"), 0).astype(np.float32)
    for shift in (0.0, 1e-3):
        moved = np.where(tokens.sampled, own - np.float32(shift), 0).astype(np.float32)
        batch = _batch(case, tokens=replace(tokens, logprobs=moved))
        try:
            metrics = case.build().step(batch).metrics
        except TrainerError as error:
            expect(shift and "mismatch" in str(error), f"a mismatch of {shift:g} nats: {error}")
            continue
        found = metrics.get("mismatch/logprob_abs_mean", np.nan)
        close = abs(found - shift) <= _limit(case)
        expect(close, f"a mismatch of {shift:g} nats is measured as {found:.3g}")


def check_sleep_wake(case: Case) -> None:
    """After `sleep` and `wake` it goes on as if nothing had happened."""
    one, other = case.build(), case.build()
    for trainer in (one, other):
        trainer.step(_batch(case))
    one.sleep()
    one.wake()
    _expect_equal(one, other, "after sleep and wake")
    losses = [_loss(t.step(_batch(case))) for t in (one, other)]
    expect(losses[0] == losses[1], f"losses with and without a sleep: {losses}")


def _expect_equal(one: Any, other: Any, what: str) -> None:
    from miles.testing.contract import reference

    reference.expect_same(
        reference.as_tensors(one.export()), reference.as_tensors(other.export()), what
    )


def _loss(update: Update) -> float:
    return float(update.metrics["loss/nll"])


def _limit(case: Case) -> float:
    return float(case.companion("precision").budget.max)


def _samples(case: Case) -> list[Sample]:
    """Without rollout log-probs, so that no mismatch is measured or masked."""
    vocab_size = min(int(case.companion("model").decoder().vocab_size), 256)
    return [
        make_sample(prompt, size, vocab_size=vocab_size, logprobs=False, seed=index)
        for index, (prompt, size) in enumerate(SIZES)
    ]


def _term(name: str, function: str, weights: Array) -> Term:
    return Term(name=name, function=f"miles.testing.contract.terms:{function}", weights=weights)


def _batch(case: Case, samples: Sequence[Sample] = (), *, tokens: Tokens | None = None) -> Batch:
    tokens = tokens or flatten(list(samples) or _samples(case))
    mean = (tokens.trainable / tokens.trainable.sum()).astype(np.float32)  # (T,) float32
    return Batch(tokens=tokens, terms=(_term("nll", "negative_logprob", mean),))
