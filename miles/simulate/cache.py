"""A prefix cache as lengths: what an engine still holds of each conversation, in whole pages.

It holds no tokens. The least recently used conversation gives its last pages up first, as a radix
tree does; what running requests hold is the engine's count, not this one's.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["PrefixCache"]


class PrefixCache:
    """Tokens by conversation, or by what conversations share."""

    def __init__(self, page_tokens: int) -> None:
        """`page_tokens` 0 holds nothing."""
        self._page = page_tokens
        self._held: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.tokens = 0
        """Held in all."""

    def find(self, key: str, prompt: int) -> int:
        """Tokens of a prompt that are held under this key; it was used now."""
        held = self._held.get(key, 0)
        if held:
            self._held.move_to_end(key)
        return self._whole(min(held, prompt - 1))  # the last one gives the first new token

    def take(self, key: str, prompt: int) -> int:
        """As `find`; they belong to a running request from now on."""
        held = self._held.pop(key, 0)
        self.tokens -= held
        return self._whole(min(held, prompt - 1))

    def put(self, key: str, tokens: int) -> None:
        """Hold the whole pages of a conversation that is this long; it was used now."""
        tokens = self._whole(tokens)
        self.tokens += tokens - self._held.get(key, 0)
        if tokens:
            self._held[key] = tokens
            self._held.move_to_end(key)
        else:
            self._held.pop(key, None)

    def shrink(self, limit: int) -> None:
        """Give up pages until no more than `limit` tokens are held."""
        if self.tokens <= limit:
            return
        limit = max(0, limit)
        while self.tokens > limit:
            key, held = next(iter(self._held.items()))
            kept = self._whole(max(0, held - (self.tokens - limit)))
            self.tokens -= held - kept
            if kept:
                self._held[key] = kept
            else:
                del self._held[key]

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()
        self.tokens = 0

    def _whole(self, tokens: int) -> int:
        return tokens - tokens % self._page if self._page and tokens > 0 else 0
