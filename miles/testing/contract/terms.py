"""A loss term for the trainer suite, so that it depends on no algorithm's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["negative_logprob", "tilted"]


def negative_logprob(
    logprobs: Any, entropy: Any, inputs: Mapping[str, Any], options: Mapping[str, float]
) -> Any:
    """(T,): minus the log-prob of each token."""
    return -logprobs


def tilted(
    logprobs: Any, entropy: Any, inputs: Mapping[str, Any], options: Mapping[str, float]
) -> Any:
    """(T,): `scale` times the `tilt` input times the log-prob, to see that both arrive."""
    return options["scale"] * inputs["tilt"] * logprobs
