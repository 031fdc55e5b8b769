"""Samples laid end to end: what `Tokens` cannot tell a trainer is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from miles import SampleError, flatten
from miles.testing import make_sample

ONE, TWO = make_sample(3, 4, seed=1), make_sample(2, 5, seed=2)


def routed(sample):
    """It, with experts of two layers."""
    return replace(sample, experts=np.ones((len(sample.tokens), 2, 1), np.uint8))


def test_flatten_refuses_images_instead_of_dropping_them():
    with pytest.raises(SampleError, match="2 images in 1 of 2 samples, the first in sample 1: no"):
        flatten([ONE, replace(TWO, images=(b"png", b"png"))])


def test_flatten_refuses_experts_that_only_some_samples_have():
    for samples in ([ONE, routed(TWO)], [routed(ONE), TWO]):
        with pytest.raises(SampleError, match="1 of 2 samples have experts to replay; all must"):
            flatten(samples)


def test_flatten_lays_experts_of_all_samples_end_to_end():
    assert flatten([routed(ONE), routed(TWO)]).experts.shape == (14, 2, 1)
    assert flatten([ONE, TWO]).experts is None
