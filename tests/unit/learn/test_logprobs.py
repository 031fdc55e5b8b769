"""Chunked log-probs against the plain formula: values, gradients, types, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.learn import logprobs
from miles.learn.logprobs import token_logprobs

BENCH = Path(__file__).parents[2] / "bench" / "logprob_memory.py"


def plain(hidden, head, targets, temperature):
    """log_softmax and its entropy in float64, by autograd."""
    logits = hidden @ head.t() / temperature
    full = logits.log_softmax(-1)
    return full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)


def make(rows, vocab, hidden=5, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, hidden, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(),
        torch.randn(vocab, hidden, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(),
        torch.randint(0, vocab, (rows,), generator=draw),
    )


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 17),
    vocab=st.integers(2, 23),
    tile=st.sampled_from([1, 3, 8, 20, 64, 10_000]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    entropy=st.booleans(),
)
def test_token_logprobs_equal_log_softmax_for_any_tile(rows, vocab, tile, temperature, entropy):
    hidden, head, targets = make(rows, vocab, seed=rows * 100 + vocab)
    found, spread = token_logprobs(
        hidden, head, targets, temperature=temperature, entropy=entropy, tile=tile
    )
    expected, expected_spread = plain(hidden, head, targets, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 2, rows, dtype=torch.float64)
    loss, expected_loss = found @ weights, expected @ weights
    if entropy:
        torch.testing.assert_close(spread, expected_spread, rtol=1e-10, atol=1e-12)
        loss = loss + spread @ weights.flip(0)
        expected_loss = expected_loss + expected_spread @ weights.flip(0)
    else:
        assert spread is None
    gradients = torch.autograd.grad(loss, (hidden, head))
    wanted = torch.autograd.grad(expected_loss, (hidden, head))
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tile", [6, 10_000])
@pytest.mark.parametrize("entropy", [False, True])
def test_token_logprobs_pass_gradcheck(tile, entropy):
    hidden, head, targets = make(4, 7)

    def function(hidden, head):
        found, spread = token_logprobs(
            hidden, head, targets, temperature=0.8, entropy=entropy, tile=tile
        )
        return (found, spread) if entropy else found

    assert torch.autograd.gradcheck(function, (hidden, head))


def test_token_logprobs_survive_enormous_logits():
    hidden = torch.tensor([[1e4], [-1e4]], dtype=torch.float32)
    head = torch.tensor([[1.0], [0.0], [-1.0]], dtype=torch.float32)
    targets = torch.tensor([0, 0])
    for tile in (1, 100):
        found, spread = token_logprobs(hidden, head, targets, entropy=True, tile=tile)
        assert found.tolist() == [0.0, -2e4]
        assert spread.tolist() == [0.0, 0.0]


def test_token_logprobs_of_bfloat16_reduce_in_float32():
    hidden, head, targets = make(64, 300, hidden=32, dtype=torch.bfloat16)
    found, _ = token_logprobs(hidden, head, targets, tile=1000)
    assert found.dtype == torch.float32
    found.sum().backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16
    exact_hidden, exact_head = (t.detach().double().requires_grad_() for t in (hidden, head))
    expected, _ = plain(exact_hidden, exact_head, targets, 1.0)
    expected.sum().backward()
    # logits are rounded to 8 bits once; everything after is exact enough
    assert (found - expected).abs().max() < 0.1
    gap = (head.grad.double() - exact_head.grad).abs().max() / exact_head.grad.abs().max()
    assert gap < 0.02


@pytest.mark.parametrize("tile", [1000, 10**6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_logits_of_narrow_types_are_exact_to_float32(dtype, tile):
    hidden, head, targets = make(64, 300, hidden=32, dtype=dtype)
    found, spread = token_logprobs(
        hidden, head, targets, temperature=0.6, entropy=True, tile=tile, wide=True
    )
    (found.sum() + spread.sum()).backward()
    assert hidden.grad.dtype == head.grad.dtype == dtype
    exact_hidden, exact_head = (t.detach().double().requires_grad_() for t in (hidden, head))
    expected, expected_spread = plain(exact_hidden, exact_head, targets, 0.6)
    (expected.sum() + expected_spread.sum()).backward()
    assert (found - expected).abs().max() < 1e-4
    assert (spread - expected_spread).abs().max() < 1e-4
    for narrow, exact in ((hidden, exact_hidden), (head, exact_head)):
        gap = (narrow.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
        assert gap < 0.01


def test_token_logprobs_leave_a_frozen_head_without_gradient():
    hidden, head, targets = make(3, 5)
    head.requires_grad_(False)
    found, _ = token_logprobs(hidden, head, targets)
    found.sum().backward()
    assert head.grad is None
    assert hidden.grad is not None


def test_token_logprobs_of_no_rows_are_empty_and_differentiable():
    hidden, head, targets = make(0, 5)
    found, spread = token_logprobs(hidden, head, targets, entropy=True)
    (found.sum() + spread.sum()).backward()
    assert found.shape == spread.shape == (0,)
    assert head.grad.abs().max() == 0


def test_token_logprobs_refuse_what_does_not_fit():
    hidden, head, targets = make(3, 5)
    with pytest.raises(ValueError, match=r"hidden \(3, 4\) does not fit head \(5, 5\)"):
        token_logprobs(hidden[:, :4], head, targets)
    with pytest.raises(ValueError, match="temperature is 0; it must be above 0"):
        token_logprobs(hidden, head, targets, temperature=0)


@pytest.mark.slow
def test_token_logprobs_take_a_third_of_the_plain_memory():
    """The full size is in `docs/measurements.md`; this one is 1/32 of it with the same
    proportions."""
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tokens", "1024", "--vocab", "37500"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    ratio = float(done.stdout.split("ratio")[1].split()[0])
    assert ratio <= 0.35, done.stdout


@pytest.mark.parametrize("tile", [None, 64])
@pytest.mark.parametrize("entropy", [False, True])
def test_fused_arithmetic_is_the_plain_one(monkeypatch, tile, entropy):
    """Uncompiled here, which changes no value: what a compiler is given to fuse."""
    monkeypatch.setattr(logprobs, "_compiled", lambda function: function)
    torch.manual_seed(0)
    targets = torch.randint(0, 50, (13,))
    weight = torch.randn(13)
    found = []
    for fused in (False, True):
        torch.manual_seed(1)
        hidden, head = (
            torch.randn(13, 8, requires_grad=True),
            torch.randn(50, 8, requires_grad=True),
        )
        values, spread = token_logprobs(
            hidden, head, targets, temperature=0.7, entropy=entropy, tile=tile, fused=fused
        )
        total = (values * weight).sum() + (0.0 if spread is None else (spread * weight).sum() * 2)
        total.backward()
        found.append((values, hidden.grad, head.grad, *((spread,) if entropy else ())))
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=2e-6)
