"""What follows stored tokens: an extension, or everything anew where the template rewrites history.

It asks the tito handler and stores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from miles.errors import TokenMismatch
from miles.protocols import Tito, Tool
from miles.types import Array, Message

__all__ = ["Following", "follow"]


class Following(NamedTuple):
    """How a prompt goes on."""

    fresh: bool
    """It begins anew: nothing of what is stored comes before."""
    added: Array
    """(new tokens,) int32; the whole prompt when it begins anew."""
    kept: bool = False
    """History was kept although the template would now write it differently."""


def follow(
    tito: Tito,
    stored: Array,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool],
    *,
    rebase: bool,
) -> Following:
    """After `stored`, which say `history`, with `new`. With `rebase`, a template that would rewrite
    history is followed; otherwise what is stored is kept. Raises what the handler raises, of it
    `TokenMismatch` only when history is kept."""
    deviates = _may_rewrite(tito, history, new, tools, rebase=rebase)
    if deviates and (rebase or not hasattr(tito, "rewrites")):
        # what an earlier rebase dropped is in the messages still, but no longer in the tokens
        whole = tito.render([*history, *new], tools=tools)
        deviates = not tito.decode(whole).startswith(tito.decode(stored))
        if rebase and deviates:
            return Following(True, whole)
    try:
        return Following(False, tito.extend(stored, history, new, tools=tools), deviates)
    except TokenMismatch:
        if not rebase:
            raise
        return Following(True, tito.render([*history, *new], tools=tools))


def _may_rewrite(
    tito: Tito,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool],
    *,
    rebase: bool,
) -> bool:
    """Whether the template might now write earlier turns differently. A handler that knows has a
    method `rewrites`; others might whenever there is reasoning to drop, and with `rebase`, where
    it decides what is sampled after, always."""
    if (knows := getattr(tito, "rewrites", None)) is not None:
        return bool(knows(history, new, tools=tools))
    return rebase or any(m.get("reasoning_content") for m in history)
