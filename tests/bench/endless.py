"""A local miles plugin for `grpo_vs_trl.py`: the reward both halves use, and a tokenizer without
stop ids.

Importing it costs nothing heavy, because TRL's half, where miles is not installed, imports the
reward from here.
"""

from __future__ import annotations

from typing import Any

try:
    import miles
    from miles_plugins.tito.bytes import Bytes
except ModuleNotFoundError:  # TRL's environment, which wants the reward alone
    pass
else:

    class Endless(Bytes):
        """The byte-level tokenizer with no id that ends a turn, so that every completion has full
        length."""

        stop_ids: tuple[int, ...] = ()

    miles_components = {"tito": {"endless": Endless}}

    @miles.hookimpl
    def miles_rewards() -> dict[str, Any]:
        """Offer the reward to `environment=dataset`."""
        return {"evenness": lambda text, task: evenness(text)}


def evenness(text: str) -> float:
    """Share of characters with an even code: about a half for random text, and hardly ever the same
    in a group."""
    return sum(ord(character) % 2 == 0 for character in text) / max(1, len(text))
