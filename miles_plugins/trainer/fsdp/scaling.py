"""Dynamic loss scaling: the scale, and how it follows steps that were good or overflowed.

It touches no tensor: `worker` multiplies the loss, `optimizer` the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from miles import LossScaling, TrainerError

__all__ = ["Scale"]

IN_A_ROW = 20
"""Steps that may overflow one after the other; a scale that only has to settle needs fewer."""
LOWEST = 2.0**-10
"""Below this scale it is not the scale that overflows."""
HIGHEST = math.ldexp(1.0, 127)
"""Largest power of two in float32."""


class Scale:
    """What the loss of a step is multiplied by; 1 for good without `rule`.

    The rule is that of `torch.amp.GradScaler`, which cannot be used itself, since it steps a
    resident optimizer only.
    """

    def __init__(self, rule: LossScaling | None, ranks: int = 1) -> None:
        self.rule, self._ranks = rule, float(ranks)
        self.reset()

    def reset(self) -> None:
        """As at the beginning."""
        self.value = 1.0 if self.rule is None else self.rule.initial
        self.good = 0  # steps since the scale changed
        self.skipped = 0  # the last steps, in a row

    @property
    def on_loss(self) -> float:
        """Factor of a rank's loss before its backward pass. FSDP averages gradients over ranks
        while the step's loss is their sum: without a rule ranks are in here, and with one they are
        in `on_gradients`, to leave the 16 bits of a rank what room there is."""
        return self._ranks if self.rule is None else self.value

    @property
    def on_gradients(self) -> float:
        """Factor that makes averaged float32 gradients those of the step's loss."""
        return 1.0 if self.rule is None else self._ranks / self.value

    def follow(self, *, finite: bool) -> None:
        """Take in whether a step's gradients were finite. Every rank has to be told the same.
        Raises `TrainerError` when a lower scale does not help."""
        rule = self.rule
        if rule is None:
            return
        if not finite:
            skipped, lower = self.skipped + 1, self.value * rule.backoff
            if skipped >= IN_A_ROW or lower < LOWEST:  # not followed: this step is none
                raise TrainerError(
                    f"trainer fsdp: gradients overflowed in {skipped} steps in a row, the last at "
                    f"a loss scale of {self.value:g}; the weights are unchanged since then. "
                    "The model leaves float16's range: use precision=bf16, or a smaller "
                    "precision.loss_scale if it has only to fall further"
                )
            self.good, self.skipped, self.value = 0, skipped, lower
            return
        self.good, self.skipped = self.good + 1, 0
        if self.good >= rule.interval:
            self.good, grown = 0, self.value * rule.growth
            self.value = grown if grown <= HIGHEST else self.value

    def state(self) -> dict[str, Any]:
        """For a checkpoint; empty without a rule."""
        if self.rule is None:
            return {}
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def set_state(self, stored: Mapping[str, Any]) -> None:
        """Continue from `state`; from the beginning where nothing was stored."""
        self.reset()
        if self.rule is not None and stored:
            self.value = float(stored["value"])
            self.good, self.skipped = int(stored["good"]), int(stored["skipped"])
