"""Noise and draws against closed forms and an independent float64 reference."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_plugins.engine.torch.sampling import Rules, draw, logprob_of, mix, noise


def _rules(rows, *, temperature=1.0, greedy=False, top_p=1.0, top_k=0):
    return Rules(
        temperature=np.full(rows, temperature, np.float32),
        greedy=np.full(rows, greedy),
        top_p=np.full(rows, top_p),
        top_k=np.full(rows, top_k, np.int64),
    )


def _splitmix64(state: int) -> int:
    """One output of SplitMix64 in plain integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_noise_is_the_published_sequence():
    """SplitMix64 seeded with 1234567, first outputs as in its reference implementation."""
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    streams = np.full(3, 1234567, np.uint64)
    values = noise(streams, np.arange(3, dtype=np.uint64))
    assert values.tolist() == [(x >> 11) * 2.0**-53 for x in first]
    assert [_splitmix64(1234567)] == first[:1]


def test_noise_is_uniform_and_neighbours_are_unrelated():
    """Chi-square over 100 cells within 5 standard deviations; correlations within 5 of theirs."""
    seeds = mix(np.arange(1000, dtype=np.uint64) + np.uint64(1))
    grid = noise(seeds.repeat(64), np.tile(np.arange(64, dtype=np.uint64), 1000)).reshape(1000, 64)
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    chi2 = ((counts - 640) ** 2 / 640).sum()
    assert abs(chi2 - 99) < 5 * np.sqrt(2 * 99)
    for one, two in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        r = np.corrcoef(one.ravel(), two.ravel())[0, 1]
        assert abs(r) < 5 / np.sqrt(one.size)


def _reference(logits, temperature, top_p, top_k):
    """(V,) float64 probabilities after both cuts, straight from their definitions."""
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    full = p.copy()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        total, kept = p.sum(), 0.0
        for place, token in enumerate(order):
            if place and kept >= top_p * total:
                p[token] = 0
            kept += p[token]
    return full, p / p.sum()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 60),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_draw_inverts_the_cut_distribution(seed, vocab, temperature, top_p, top_k, u):
    logits = np.random.default_rng(seed).normal(scale=3, size=vocab).astype(np.float32)
    full, cut = _reference(logits, temperature, top_p, top_k)
    rules = _rules(1, temperature=temperature, top_p=top_p, top_k=top_k)
    got = draw(torch.from_numpy(logits)[None], rules, np.array([u]))
    token = int(got.tokens[0])
    assert cut[token] > 0
    upper = cut[: token + 1].sum()
    assert upper - cut[token] - 1e-6 <= u <= upper + 1e-6
    assert abs(got.logprobs[0] - np.log(full[token])) < 1e-5
    assert abs(got.truncated[0] - np.log(cut[token])) < 1e-5
    given_ = logprob_of(torch.from_numpy(logits)[None], got.tokens, rules.temperature)
    assert given_.tobytes() == got.logprobs.tobytes()


def test_draw_frequencies_match_the_distribution():
    """40,000 draws of one row: chi-square within 5 standard deviations."""
    logits = np.random.default_rng(0).normal(size=16).astype(np.float32)
    _, cut = _reference(logits, 0.8, 0.9, 12)
    n = 40_000
    u = noise(mix(np.arange(n, dtype=np.uint64)), np.full(n, 17, np.uint64))
    rules = _rules(n, temperature=0.8, top_p=0.9, top_k=12)
    got = draw(torch.from_numpy(logits).expand(n, -1), rules, u)
    counts = np.bincount(got.tokens, minlength=16)
    assert counts[cut == 0].sum() == 0
    expected = n * cut[cut > 0]
    chi2 = ((counts[cut > 0] - expected) ** 2 / expected).sum()
    freedom = (cut > 0).sum() - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


def test_draw_never_takes_what_has_no_probability():
    """The ends of the unit interval, over a row whose first and last tokens are impossible."""
    row = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        assert draw(row, _rules(1), np.array([u])).tokens[0] in (1, 3)


def test_draw_mixes_ways_of_sampling_row_by_row():
    """A row's draw is the same whatever the rows beside it ask for."""
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(size=(6, 264)).astype(np.float32))
    rules = Rules(
        temperature=np.array([1, 1, 0.5, 1, 2, 1], np.float32),
        greedy=np.array([False, True, False, False, False, True]),
        top_p=np.array([1, 1, 0.9, 0.5, 1, 0.2]),
        top_k=np.array([0, 0, 0, 7, 3, 2], np.int64),
    )
    u = rng.random(6)
    whole = draw(logits, rules, u)
    for i in range(6):
        one = Rules(
            temperature=rules.temperature[i : i + 1],
            greedy=rules.greedy[i : i + 1],
            top_p=rules.top_p[i : i + 1],
            top_k=rules.top_k[i : i + 1],
        )
        alone = draw(logits[i : i + 1], one, u[i : i + 1])
        assert alone.tokens[0] == whole.tokens[i]
        assert alone.logprobs.tobytes() == whole.logprobs[i : i + 1].tobytes()
        assert alone.truncated.tobytes() == whole.truncated[i : i + 1].tobytes()
    assert whole.tokens[1] == logits[1].argmax()
    assert (whole.truncated[[0, 1, 5]] == whole.logprobs[[0, 1, 5]]).all()
    assert (whole.truncated[[2, 3, 4]] > whole.logprobs[[2, 3, 4]]).all()
