"""What a step does about numbers that are not finite: a loss is refused; a gradient is refused too,
or, where the loss is scaled, skipped.

It updates no weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from miles import TrainerError
from miles_plugins.trainer.fsdp.optimizer import Masters
from miles_plugins.trainer.fsdp.scaling import Scale

__all__ = ["norm_or_skip", "refuse_losses"]


def refuse_losses(losses: Mapping[str, float], version: int, compute: str) -> None:
    """Raises `TrainerError` naming the first term that is not finite. No scale helps there, since
    scaling comes after the forward."""
    for name, value in losses.items():
        if math.isfinite(value):
            continue
        error = TrainerError(
            f"trainer fsdp: loss term {name!r} is {value} in the step from version {version}; the "
            "weights are unchanged"
        )
        if compute == "float16":
            error.add_note(
                "float16 ends at 65,504: if the model's activations are larger, use "
                "precision=bf16, or precision.residual=float32 where only sums of layers are"
            )
        raise error


def norm_or_skip(
    masters: Masters, scale: Scale, losses: Mapping[str, float], version: int
) -> tuple[float | None, dict[str, float], tuple[str, ...]]:
    """Unscale the gradients. Their global norm, or None when one of them overflowed on any rank;
    metrics; and a warning where the step is to be skipped. The scale has followed, unless there was
    nothing to learn.

    Every rank has to ask; a norm is one number for all, and so is whether it is finite. Raises
    `TrainerError` where the loss is not scaled, or its scale has fallen too far.
    """
    used, metrics = scale.value, {}
    if scale.rule is not None:
        metrics["trainer/loss_scale"] = used
    masters.scale_gradients(scale.on_gradients)
    norm = masters.norm()
    if math.isfinite(norm):
        if norm or any(losses.values()):  # or there was nothing to learn, which tells of no scale
            scale.follow(finite=True)
        if metrics:
            metrics["trainer/skipped_steps"] = 0.0
        return norm, {**metrics, "grad_norm": norm}, ()
    where = ", ".join(masters.not_finite()[:4]) or "another rank's part"
    if scale.rule is None:
        said = ", ".join(f"{name} {value:.6g}" for name, value in losses.items())
        raise TrainerError(
            f"trainer fsdp: the gradient is {norm} in the step from version {version} ({where}); "
            f"loss terms: {said}; the weights are unchanged"
        )
    scale.follow(finite=False)
    warning = (
        f"trainer fsdp: step {version + 1} changed no weight, since the gradient is {norm} at a "
        f"loss scale of {used:g} ({where}); the scale is {scale.value:g} now"
    )
    return None, {**metrics, "trainer/skipped_steps": 1.0}, (warning,)
