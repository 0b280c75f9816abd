"""Storage: the memory that keys and values lie in, one arena for each tier and layer."""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnkv.cache import native
from turnkv.cache.pages import Extent
from turnkv.cache.tiles import LayerShape, TileCodes, TileLayout
from turnkv.config import PAGE_TOKENS
from turnkv.errors import OverBudgetError
from turnkv.types import EXACT, Tier

Slots = NDArray[np.int32]
"""Slots of tokens in order, int32 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """How a tier is stored layer by layer."""

    layouts: tuple[TileLayout, ...]

    @staticmethod
    def of(
        tier: Tier, shapes: Sequence[LayerShape], dtype: torch.dtype, exact_layers: frozenset[int] = frozenset()
    ) -> "TierPlan":
        """The tier's formats in every layer, but in `exact_layers` the exact one."""
        return TierPlan(
            layouts=tuple(
                TileLayout(shape, EXACT if layer in exact_layers else tier, dtype) for layer, shape in enumerate(shapes)
            )
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of 16 tokens over all layers."""
        return sum(layout.page_bytes for layout in self.layouts)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's KV as attention bodies read it."""

    arenas: Mapping[Tier, Tensor]
    """uint8 `[num_pages, G, head_bytes]` each, 64-byte aligned."""
    layouts: Mapping[Tier, TileLayout]
    prepared: dict[object, Any] = field(default_factory=dict, repr=False)
    """What a body derived from the layer once for all calls."""

    def read(self, tier: Tier, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [G, N * 16, D] and values [G, N * 16, E] of N pages, float32 (the exact tier: its own dtype)."""
        layout = self.layouts[tier]
        codes = layout.unpack(self.arenas[tier][pages])
        keys = layout.key_format.read(codes.keys, codes.key_scales)
        values = layout.value_format.read(codes.values, codes.value_scales)
        return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


@dataclass(slots=True)
class _Arena:
    """Memory of one tier in one layer."""

    blocks: Tensor
    memory: mmap.mmap | None = field(repr=False)


class KVStorage:
    """Keys and values of every slot of every tier.

    Address space is reserved for each tier's whole pool at once; the system commits memory as slots are first written,
    and `give_back` returns that of pages no longer in use, so that what is committed follows what is held.
    """

    def __init__(self, plans: Mapping[Tier, TierPlan], num_pages: Mapping[Tier, int], device: torch.device) -> None:
        self.plans = dict(plans)
        self.device = device
        self._arenas = {
            tier: [_arena(num_pages[tier], layout, device) for layout in plan.layouts] for tier, plan in plans.items()
        }
        num_layers = len(plans[EXACT].layouts) if plans else 0
        self.layers = [
            LayerKV(
                {tier: arenas[layer].blocks for tier, arenas in self._arenas.items()},
                {tier: plan.layouts[layer] for tier, plan in plans.items()},
            )
            for layer in range(num_layers)
        ]

    def write(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        """Put the exact keys and values of new tokens into their slots.

        T tokens, G key-value heads, D and E dims. key: [G, T, D], value: [G, T, E].
        """
        kv = self.layers[layer]
        layout = kv.layouts[EXACT]
        if native.KERNELS is not None and native.can_serve(kv.arenas[EXACT], layout) and key.dtype == layout.dtype:
            key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (key, value))
            native.KERNELS.write(
                native.exact_arena(kv.arenas[EXACT], layout),
                (key.data_ptr(), key.stride(0), key.stride(1)),
                (value.data_ptr(), value.stride(0), value.stride(1)),
                slots,
            )
            return
        none = key.new_empty(*key.shape[:2], 0, dtype=torch.float16).transpose(0, 1)
        codes = TileCodes(key.transpose(0, 1).to(layout.dtype), value.transpose(0, 1).to(layout.dtype), none, none)
        _put(kv.arenas[EXACT], layout, slots, codes)

    def settle(self, source: Tier, source_slots: Slots, target: Tier, target_slots: Slots) -> None:
        """Store tokens again in another tier, in all layers. Where a format stays the same, its bits do too."""
        if native.KERNELS is not None and all(
            native.can_serve(kv.arenas[tier], kv.layouts[tier]) for kv in self.layers for tier in (source, target)
        ):
            native.KERNELS.settle(
                [
                    (
                        native.arena(kv.arenas[source], kv.layouts[source]),
                        native.arena(kv.arenas[target], kv.layouts[target]),
                        kv.layouts[source].shape.num_heads,
                        kv.layouts[source].shape.key_dim,
                        kv.layouts[source].shape.value_dim,
                    )
                    for kv in self.layers
                ],
                native.DTYPES[self.layers[0].layouts[source].dtype],
                source_slots,
                target_slots,
            )
            return
        for kv in self.layers:
            old, new = kv.layouts[source], kv.layouts[target]
            codes = _take(kv.arenas[source], old, source_slots)
            for part, scales, before, after in (
                ("keys", "key_scales", old.key_format, new.key_format),
                ("values", "value_scales", old.value_format, new.value_format),
            ):
                if before is not after:
                    vectors = before.read(getattr(codes, part), getattr(codes, scales))
                    again, steps = after.quantise(vectors)
                    setattr(codes, part, again.to(after.code_dtype(new.dtype)))
                    setattr(codes, scales, steps)
            _put(kv.arenas[target], new, target_slots, codes)

    def give_back(self, tier: Tier, extents: Sequence[Extent]) -> None:
        """Return to the system what it committed for these slots, which must hold no token.

        Only pages of the system's own that lie wholly inside an extent can go; the two at its edges stay.
        """
        for arena in self._arenas[tier]:
            if arena.memory is None:
                continue
            page_bytes = arena.blocks[0].numel()
            for extent in extents:
                start = -(-extent.start // PAGE_TOKENS * page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = extent.stop // PAGE_TOKENS * page_bytes // mmap.PAGESIZE * mmap.PAGESIZE
                if start < stop:
                    arena.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def bytes_of(self, tier: Tier, slots: Slots) -> bytes:
        """A copy of the codes and scales in these slots, for comparing bit by bit."""
        parts = []
        for kv in self.layers:
            codes = _take(kv.arenas[tier], kv.layouts[tier], slots)
            parts += [part.flatten().contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in codes.parts]
        return b"".join(parts)


class DryStorage(KVStorage):
    """Stands where storage would: no memory, and nothing is ever written."""

    def __init__(self) -> None:
        super().__init__({}, {}, torch.device("cpu"))

    def write(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        """Nothing."""

    def settle(self, source: Tier, source_slots: Slots, target: Tier, target_slots: Slots) -> None:
        """Nothing."""

    def give_back(self, tier: Tier, extents: Sequence[Extent]) -> None:
        """Nothing."""


def can_store(tier: Tier, shapes: Sequence[LayerShape], dtype: torch.dtype) -> bool:
    """Whether all layers of a model can be stored in a tier."""
    return all(TileLayout(shape, tier, dtype).can_hold for shape in shapes)


def _arena(num_pages: int, layout: TileLayout, device: torch.device) -> _Arena:
    shape = (num_pages, layout.shape.num_heads, layout.head_bytes)
    num_bytes = num_pages * layout.page_bytes
    if device.type != "cpu" or not num_bytes or not hasattr(mmap, "MADV_DONTNEED"):
        return _Arena(torch.empty(shape, dtype=torch.uint8, device=device), None)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise OverBudgetError(
            f"the system reserves no address space for the KV budget ({error.strerror}); lower the budget, or allow "
            "overcommit"
        ) from None
    return _Arena(torch.frombuffer(memory, dtype=torch.uint8).view(shape), memory)


def _take(blocks: Tensor, layout: TileLayout, slots: Slots) -> TileCodes:
    """Codes of N tokens: keys [N, G, D] and so on."""
    pages, at, lanes = _places(slots, blocks.device)
    return layout.unpack(blocks[pages]).taken(at, lanes)


def _put(blocks: Tensor, layout: TileLayout, slots: Slots, tokens: TileCodes) -> None:
    pages, at, lanes = _places(slots, blocks.device)
    codes = layout.unpack(blocks[pages])
    codes.put(at, lanes, tokens)
    blocks[pages] = layout.pack(codes)


def _places(slots: Slots, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The pages touched, and for each slot which of them it lies in and where."""
    pages, at = np.unique(slots // PAGE_TOKENS, return_inverse=True)
    parts = np.stack((at, slots % PAGE_TOKENS)).astype(np.int64)
    index = torch.from_numpy(parts).to(device)
    return torch.from_numpy(pages.astype(np.int64)).to(device), index[0], index[1]
