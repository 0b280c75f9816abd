"""Storage: the tensors that keys and values lie in."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from turnkv.cache.pages import Extent
from turnkv.config import PAGE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of one layer's KV."""

    num_heads: int
    """Key-value heads, before they are shared among query heads."""
    key_dim: int
    value_dim: int


class KVStorage:
    """Keys and values of every slot, one pair of tensors a layer: `[num_heads, num_slots, dim]`.

    Memory is reserved for the whole budget at once and committed by the system as slots are first written.
    """

    def __init__(self, layers: Sequence[LayerShape], num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        num_slots = num_pages * PAGE_TOKENS
        self.layers = tuple(layers)
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self.keys = [
            torch.empty(layer.num_heads, num_slots, layer.key_dim, dtype=dtype, device=device) for layer in layers
        ]
        self.values = [
            torch.empty(layer.num_heads, num_slots, layer.value_dim, dtype=dtype, device=device) for layer in layers
        ]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return token_bytes(self.layers, self.dtype)

    def write(self, layer: int, slots: "SlotRange", key: Tensor, value: Tensor) -> None:
        """Put the keys and values of new tokens into their slots.

        T tokens, H key-value heads, D head dim. key, value: [H, T, D].
        """
        if isinstance(slots, slice):
            self.keys[layer][:, slots] = key
            self.values[layer][:, slots] = value
        else:
            self.keys[layer].index_copy_(1, slots, key.to(self.dtype))
            self.values[layer].index_copy_(1, slots, value.to(self.dtype))

    def bytes_of(self, extents: Sequence[Extent]) -> bytes:
        """A copy of the KV in these slots, for comparing bit by bit."""
        parts = []
        for tensor in (*self.keys, *self.values) if extents else ():
            # Joined first, so that equal tokens give equal bytes however they are spread over extents.
            part = torch.cat([tensor[:, extent.start : extent.stop] for extent in extents], dim=1)
            parts.append(part.view(torch.uint8).cpu().numpy().tobytes())
        return b"".join(parts)


SlotRange = slice | Tensor
"""Slots to read or write: a slice where they are contiguous, else an int64 index."""


def token_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one token's exact KV over all layers."""
    return sum(layer.num_heads * (layer.key_dim + layer.value_dim) for layer in layers) * dtype.itemsize


def slot_range(runs: Sequence[tuple[int, int]], device: torch.device) -> SlotRange:
    """Name runs `(start, length)` as one slice if each begins where the last ends, else as an index of every slot."""
    if not runs:
        return slice(0, 0)
    if all(start + length == following for (start, length), (following, _) in pairwise(runs)):
        return slice(runs[0][0], sum(runs[-1]))
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in runs])
