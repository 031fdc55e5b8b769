"""Keys and values of the rows that decode, in blocks of positions.

Where they lie, and nothing of what they are: no request, no weights, no attention.
"""

from __future__ import annotations

import torch

from miles import Decoder

__all__ = ["Cache"]


class Cache:
    """Keys and values of every row, in blocks of positions; one row more than asked for, for
    padding.

    `data` is (layers, blocks, rows + 1, kv_heads, 2, key_block, head_dim): a block of one row and
    head is contiguous, keys then values, so gathering rows copies long runs. It starts as zeros,
    because a masked key is multiplied by an exact 0 and must therefore be finite.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        rows: int,
        max_len: int,
        key_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.key_block = key_block
        self.rows = rows + 1
        self._width = decoder.head_dim
        self._lying: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        blocks = -(-max_len // key_block)
        self._pitch = decoder.kv_heads * 2 * key_block  # of a row in a block, in vectors
        with torch.inference_mode():
            at = torch.arange(blocks * key_block, device=device)
            block = at.div(key_block, rounding_mode="floor")
            self._vector = block * (self.rows * self._pitch) + at.remainder(key_block)
            heads = torch.arange(decoder.kv_heads, device=device) * (2 * key_block)
            self._heads = torch.cat((heads, heads + key_block))  # keys, then values
            shape = (decoder.kv_heads, 2, key_block, decoder.head_dim)
            self.data = torch.zeros(
                (decoder.layers, blocks, self.rows, *shape), dtype=dtype, device=device
            )
            self._flat = [layer.view(-1, decoder.head_dim) for layer in self.data]

    @torch.inference_mode()
    def places(self, rows_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """(T * 2 kv_heads,) int64: which vectors of a layer, flat, hold each slot's keys and then
        its values."""
        first_T = self._vector.index_select(0, positions_T).add_(rows_T, alpha=self._pitch)
        return (first_T[:, None] + self._heads).view(-1)

    def write(self, layer: int, places: torch.Tensor, vectors: torch.Tensor) -> None:
        """Put (places, head_dim) keys and values where `places` says."""
        self._flat[layer].index_copy_(0, places, vectors)

    def read(
        self, layer: int, block: int, rows_T: torch.Tensor | None, *, slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(T * kv_heads, head_dim, key_block) keys and (T * kv_heads, key_block, head_dim) values
        of a block of rows; without `rows_T` of the first `slots`, where they lie."""
        if rows_T is not None:
            return self._split(self.data[layer, block].index_select(0, rows_T))
        key = layer, block, slots
        if key not in self._lying:
            self._lying[key] = self._split(self.data[layer, block, :slots])
        return self._lying[key]

    def _split(self, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = held.view(-1, 2 * self.key_block, self._width)
        return held[:, : self.key_block].transpose(1, 2), held[:, self.key_block :]

    @torch.inference_mode()
    def copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of rows `sources` to rows `targets`, (n,) int64
        each."""
        view = self.data[:, : -(-length // self.key_block)]
        view.index_copy_(2, targets, view.index_select(2, sources))

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero everything, after numbers that were not finite may have been written."""
        self.data.zero_()
