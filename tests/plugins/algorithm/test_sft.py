"""Supervised fine-tuning: one term over the trainable tokens."""

from __future__ import annotations

import numpy as np
import pytest

from miles.testing import context, make_group
from miles_plugins.algorithm.sft import Sft

GROUPS = (make_group(0, rewards=(0.0,), lengths=(6,), logprobs=False),
          make_group(1, rewards=(0.0,), lengths=(2,), logprobs=False))  # fmt: skip


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", [1 / 8] * 8), ("sequence_mean", [1 / 12] * 6 + [1 / 4] * 2)],
)
def test_prepare_averages_over_trainable_tokens(tmp_path, aggregation, expected):
    algorithm = Sft(Sft.Config(aggregation=aggregation), context(tmp_path))
    batch = algorithm.prepare(GROUPS, {})
    (term,) = batch.terms
    assert (term.name, term.function) == ("nll", "miles.learn.losses:nll")
    np.testing.assert_allclose(term.weights[batch.tokens.trainable], expected, rtol=1e-6)
    assert not term.weights[~batch.tokens.trainable].any()
    assert algorithm.needs() == ()
