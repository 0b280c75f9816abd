"""Tiles: how the codes of 16 tokens lie in memory, for one head of one layer.

    head block │ keys          │ values        │ key scales         │ value scales       │ padding to 64 bytes
               │ [D/p][16] lanes│ [16/p][E] lanes│ fp16 [groups(D)][16]│ fp16 [groups(E)][16]│

A lane is 32 bits wide (64 for float64) and holds p codes: of p neighbouring dims of one key, or of p neighbouring
tokens in one dim of the values; the first in the lowest bits. So scores and outputs are sums down the lanes, without a
horizontal sum, and the lanes are what `vdpbf16ps`, `vpdpbusd` and AMX take as they lie.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from turnkv.cache.formats import FORMATS, Format
from turnkv.config import PAGE_TOKENS
from turnkv.types import Tier

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of one layer's KV."""

    num_heads: int
    """Key-value heads, before they are shared among query heads."""
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class TileLayout:
    """The layout of one tier in one layer. G heads, D and E dims of keys and values, P pages of 16 tokens."""

    shape: LayerShape
    tier: Tier
    dtype: torch.dtype
    """Of exact codes."""

    @property
    def key_format(self) -> Format:
        """Format of the keys."""
        return FORMATS[self.tier.keys]

    @property
    def value_format(self) -> Format:
        """Format of the values."""
        return FORMATS[self.tier.values]

    @property
    def can_hold(self) -> bool:
        """Whether a key's codes fill whole lanes."""
        return self.shape.key_dim % _codes_a_lane(self.key_format, self.dtype) == 0

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Where keys, values, key scales and value scales begin inside a head block, and where they end; bytes."""
        sizes = (
            self.shape.key_dim * self.key_format.code_bits(self.dtype) * PAGE_TOKENS // 8,
            self.shape.value_dim * self.value_format.code_bits(self.dtype) * PAGE_TOKENS // 8,
            self.key_format.num_scales(self.shape.key_dim) * PAGE_TOKENS * 2,
            self.value_format.num_scales(self.shape.value_dim) * PAGE_TOKENS * 2,
        )
        keys, values, key_scales, value_scales = sizes
        return (0, keys, keys + values, keys + values + key_scales, keys + values + key_scales + value_scales)

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of 16 tokens of one head."""
        return -(-self.offsets[-1] // _ALIGNMENT) * _ALIGNMENT

    @property
    def page_bytes(self) -> int:
        """Bytes of 16 tokens of all heads."""
        return self.head_bytes * self.shape.num_heads

    def unpack(self, blocks: Tensor) -> "TileCodes":
        """Read head blocks, uint8 [P, G, head_bytes], as codes."""
        key, value, key_scale, value_scale, end = self.offsets
        keys = _lanes(blocks[..., key:value], self.key_format, self.dtype, (-1, PAGE_TOKENS))
        values = _lanes(blocks[..., value:key_scale], self.value_format, self.dtype, (-1, self.shape.value_dim))
        return TileCodes(
            keys=keys.movedim(-2, -3).flatten(-2),
            values=values.movedim(-1, -2).flatten(-3, -2),
            key_scales=_scales(blocks[..., key_scale:value_scale]),
            value_scales=_scales(blocks[..., value_scale:end]),
        )

    def pack(self, codes: "TileCodes") -> Tensor:
        """Write codes as head blocks, uint8 [P, G, head_bytes]."""
        pages, heads = codes.keys.shape[:2]
        per_key, per_value = (_codes_a_lane(form, self.dtype) for form in (self.key_format, self.value_format))
        keys = torch.unflatten(codes.keys, -1, (-1, per_key)).movedim(-3, -2)
        values = torch.unflatten(codes.values, -2, (-1, per_value)).movedim(-2, -1)
        parts = (
            _bytes(keys, self.key_format),
            _bytes(values, self.value_format),
            _bytes(codes.key_scales.movedim(-1, -2)),
            _bytes(codes.value_scales.movedim(-1, -2)),
            torch.zeros(pages, heads, self.head_bytes - self.offsets[-1], dtype=torch.uint8, device=keys.device),
        )
        return torch.cat(parts, dim=-1)


@dataclass(slots=True)
class TileCodes:
    """Codes and scales of P pages. keys: [P, G, 16, D], values: [P, G, 16, E], scales: [P, G, 16, groups], fp16."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor

    def taken(self, pages: Tensor, lanes: Tensor) -> "TileCodes":
        """Codes of N tokens: keys [N, G, D] and so on."""
        return TileCodes(*(part[pages, :, lanes] for part in self.parts))

    def put(self, pages: Tensor, lanes: Tensor, tokens: "TileCodes") -> None:
        """Overwrite the codes of N tokens, given as `taken` gives them."""
        for part, new in zip(self.parts, tokens.parts, strict=True):
            part[pages, :, lanes] = new

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and their scales."""
        return self.keys, self.values, self.key_scales, self.value_scales


def _codes_a_lane(form: Format, dtype: torch.dtype) -> int:
    return max(1, 32 // form.code_bits(dtype))


def _lanes(raw: Tensor, form: Format, dtype: torch.dtype, rows: tuple[int, int]) -> Tensor:
    """Bytes [P, G, N] → codes [P, G, *rows, p]."""
    raw = raw.contiguous()
    if form.code_bits(dtype) == 4:
        codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    else:
        codes = raw.view(form.code_dtype(dtype))
    return torch.unflatten(codes, -1, (*rows, _codes_a_lane(form, dtype)))


def _scales(raw: Tensor) -> Tensor:
    """Bytes [P, G, N] → fp16 [P, G, 16, groups]."""
    return torch.unflatten(raw.contiguous().view(torch.float16), -1, (-1, PAGE_TOKENS)).movedim(-1, -2)


def _bytes(codes: Tensor, form: Format | None = None) -> Tensor:
    """[P, G, ...] → uint8 [P, G, bytes]."""
    flat = codes.contiguous().flatten(2)
    if form is not None and form.code_bits(flat.dtype) == 4:
        return flat[..., 0::2] | flat[..., 1::2] << 4
    return flat.view(torch.uint8)
