import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkv.cache import LayerShape, TierPlan, TileLayout
from turnkv.cache.storage import can_store
from turnkv.cache.tiles import TileCodes
from turnkv.types import EXACT, Tier

FORMATS = ("exact", "int8", "fp8", "int4")
TIERS = [Tier(*names) for names in itertools.product(FORMATS, repeat=2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INT8, FP8, INT4 = (Tier(name, name) for name in FORMATS[1:])


def layout_of(tier: Tier, dtype: torch.dtype, key_dim: int, value_dim: int, num_heads: int = 2) -> TileLayout:
    return TileLayout(LayerShape(num_heads=num_heads, key_dim=key_dim, value_dim=value_dim), tier, dtype)


def bits_of(form: str, dtype: torch.dtype) -> int:
    return {"exact": 8 * dtype.itemsize, "int8": 8, "fp8": 8, "int4": 4}[form]


def num_groups(form: str, dim: int) -> int:
    """Scales of a vector: for int4, one for each of the largest powers of two up to 32 that make up the dims."""
    if form != "int4":
        return int(form == "int8")
    return dim // 32 + (dim % 32).bit_count()


def random_codes(layout: TileLayout, pages: int, seed: int) -> TileCodes:
    """Codes and scales with any bits, as whole numbers in the dtypes of codes."""
    random = torch.Generator().manual_seed(seed)

    def of(form: str, dim: int) -> torch.Tensor:
        size = (pages, layout.shape.num_heads, 16, dim)
        if form == "int4":
            return torch.randint(0, 16, size, generator=random, dtype=torch.uint8)
        width = bits_of(form, layout.dtype) // 8
        raw = torch.randint(0, 256, (*size[:3], dim * width), generator=random, dtype=torch.uint8)
        return raw.view(torch.int8 if form == "int8" else torch.uint8 if form == "fp8" else layout.dtype)

    def scales(form: str, dim: int) -> torch.Tensor:
        size = (pages, layout.shape.num_heads, 16, num_groups(form, dim))
        return torch.randint(-(2**15), 2**15, size, generator=random, dtype=torch.int16).view(torch.float16)

    shape, tier = layout.shape, layout.tier
    return TileCodes(
        of(tier.keys, shape.key_dim),
        of(tier.values, shape.value_dim),
        scales(tier.keys, shape.key_dim),
        scales(tier.values, shape.value_dim),
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes: [..., N]. Copied, since a dim of size 1 may have any stride and still count as contiguous."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    dense[:] = tensor
    return dense.view(torch.uint8)


def integers(codes: torch.Tensor) -> list[list[int]]:
    """[16, N] as the whole numbers that the bits spell, lowest byte first."""
    width = codes.dtype.itemsize
    rows = raw(codes).tolist()
    return [[int.from_bytes(row[i : i + width], "little") for i in range(0, len(row), width)] for row in rows]


def block_by_hand(codes: TileCodes, layout: TileLayout) -> bytes:
    """A head block of `codes` [1, 1, 16, ...], put together code by code as DESIGN and the tile's drawing say."""
    tier, dtype = layout.tier, layout.dtype
    block = 0
    start = 0  # in bits

    def lane_bits(bits: int) -> tuple[int, int]:
        per_lane = max(1, 32 // bits)
        return per_lane, per_lane * bits

    bits = bits_of(tier.keys, dtype)
    per_lane, width = lane_bits(bits)
    for slot, row in enumerate(integers(codes.keys[0, 0])):
        for dim, code in enumerate(row):
            lane = dim // per_lane * 16 + slot
            block |= code << (start + lane * width + dim % per_lane * bits)
    start += 16 * layout.shape.key_dim * bits
    bits = bits_of(tier.values, dtype)
    per_lane, width = lane_bits(bits)
    for slot, row in enumerate(integers(codes.values[0, 0])):
        for dim, code in enumerate(row):
            lane = slot // per_lane * layout.shape.value_dim + dim
            block |= code << (start + lane * width + slot % per_lane * bits)
    start += 16 * layout.shape.value_dim * bits
    for scales in (codes.key_scales, codes.value_scales):
        for slot, row in enumerate(integers(scales[0, 0])):
            for group, scale in enumerate(row):
                block |= scale << (start + (group * 16 + slot) * 16)
        start += 16 * 16 * scales.shape[-1]
    return block.to_bytes(-(-start // 512) * 64, "little")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tier", TIERS, ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 8), (16, 5), (80, 96), (24, 1)])
def test_every_code_lies_where_the_layout_says(tier: Tier, dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    layout = layout_of(tier, dtype, key_dim, value_dim, num_heads=1)
    codes = random_codes(layout, 1, seed=key_dim)
    assert bytes(layout.pack(codes)[0, 0].tolist()) == block_by_hand(codes, layout)


@settings(max_examples=150, deadline=None)
@given(
    tier=st.sampled_from(TIERS),
    dtype=st.sampled_from(DTYPES),
    key_dim=st.integers(1, 20).map(lambda lanes: 8 * lanes),
    value_dim=st.integers(1, 140),
    num_heads=st.integers(1, 3),
    pages=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_what_is_packed_is_what_is_unpacked(
    tier: Tier, dtype: torch.dtype, key_dim: int, value_dim: int, num_heads: int, pages: int, seed: int
) -> None:
    layout = layout_of(tier, dtype, key_dim, value_dim, num_heads)
    codes = random_codes(layout, pages, seed)
    blocks = layout.pack(codes)
    assert blocks.dtype == torch.uint8
    assert blocks.shape == (pages, num_heads, layout.head_bytes)
    again = layout.unpack(blocks)
    for found, wanted in zip(again.parts, codes.parts, strict=True):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert torch.equal(raw(found), raw(wanted))
    assert torch.equal(layout.pack(again), blocks)
    assert not blocks[..., layout.offsets[-1] :].any()


@pytest.mark.parametrize(
    ("tier", "dtype", "part", "slot", "dim", "code", "at"),
    [
        # K lane (dim // p, slot) of 4 bytes, 16 lanes a row; V lane (slot // p, dim), E = 48 lanes a row.
        (EXACT, torch.float32, "keys", 3, 5, 1.0, {5 * 64 + 3 * 4 + 2: 0x80, 5 * 64 + 3 * 4 + 3: 0x3F}),
        (EXACT, torch.bfloat16, "keys", 3, 5, 1.0, {2 * 64 + 3 * 4 + 2: 0x80, 2 * 64 + 3 * 4 + 3: 0x3F}),
        (EXACT, torch.bfloat16, "values", 3, 5, 1.0, {2048 + 192 + 20 + 2: 0x80, 2048 + 192 + 20 + 3: 0x3F}),
        (EXACT, torch.float64, "keys", 1, 2, 1.0, {2 * 128 + 8 + 6: 0xF0, 2 * 128 + 8 + 7: 0x3F}),
        (INT8, torch.bfloat16, "keys", 15, 63, -1, {1023: 0xFF}),
        (INT8, torch.bfloat16, "keys", 2, 6, 7, {64 + 8 + 2: 7}),
        (INT8, torch.bfloat16, "values", 9, 47, 7, {1024 + 2 * 192 + 188 + 1: 7}),
        (INT8, torch.bfloat16, "key_scales", 4, 0, 1.0, {1792 + 9: 0x3C}),
        (INT8, torch.bfloat16, "value_scales", 4, 0, 1.0, {1792 + 32 + 9: 0x3C}),
        (FP8, torch.bfloat16, "keys", 2, 6, 0x38, {64 + 8 + 2: 0x38}),
        (INT4, torch.bfloat16, "keys", 2, 13, 5, {64 + 8 + 2: 0x50}),
        (INT4, torch.bfloat16, "keys", 2, 12, 5, {64 + 8 + 2: 0x05}),
        (INT4, torch.bfloat16, "values", 15, 1, 9, {512 + 192 + 4 + 3: 0x90}),
        (INT4, torch.bfloat16, "key_scales", 4, 1, 1.0, {896 + 32 + 9: 0x3C}),
        (INT4, torch.bfloat16, "value_scales", 0, 1, 1.0, {896 + 64 + 32 + 1: 0x3C}),
    ],
)
def test_a_single_code_touches_the_bytes_worked_out_on_paper(
    tier: Tier, dtype: torch.dtype, part: str, slot: int, dim: int, code: float, at: dict[int, int]
) -> None:
    layout = layout_of(tier, dtype, 64, 48, num_heads=1)
    codes = layout.unpack(torch.zeros(1, 1, layout.head_bytes, dtype=torch.uint8))
    codes = TileCodes(*(tensor.clone() for tensor in codes.parts))
    getattr(codes, part)[0, 0, slot, dim] = code
    block = layout.pack(codes)[0, 0].tolist()
    assert {place: byte for place, byte in enumerate(block) if byte} == at


@pytest.mark.parametrize(
    ("tier", "dtype", "key_dim", "value_dim", "head_bytes"),
    [
        (EXACT, torch.bfloat16, 64, 64, 4096),
        (EXACT, torch.float32, 64, 64, 8192),
        (EXACT, torch.float64, 8, 8, 2048),
        (EXACT, torch.bfloat16, 2, 1, 128),  # 64 + 32, rounded up
        (INT8, torch.bfloat16, 64, 64, 2112),  # 1024 + 1024 + 32 + 32
        (FP8, torch.bfloat16, 64, 64, 2048),
        (INT4, torch.bfloat16, 64, 64, 1152),  # 512 + 512 + 64 + 64
        (INT4, torch.bfloat16, 80, 80, 1472),  # 640 + 640 + 96 + 96: three groups
        (INT4, torch.bfloat16, 96, 96, 1728),  # 768 + 768 + 96 + 96
        (INT4, torch.bfloat16, 8, 5, 256),  # 64 + 40 + 32 + 64 = 200: groups of 8, and of 4 and 1
        (Tier("int8", "int4"), torch.bfloat16, 64, 64, 1664),  # 1024 + 512 + 32 + 64 = 1632
        (Tier("exact", "fp8"), torch.float16, 64, 128, 4096),
    ],
)
def test_the_bytes_of_a_head_are_as_worked_out_on_paper(
    tier: Tier, dtype: torch.dtype, key_dim: int, value_dim: int, head_bytes: int
) -> None:
    layout = layout_of(tier, dtype, key_dim, value_dim, num_heads=3)
    assert layout.head_bytes == head_bytes
    assert layout.page_bytes == 3 * head_bytes


@pytest.mark.parametrize(("tier", "share"), [(EXACT, 1), (INT8, 0.516), (FP8, 0.5), (INT4, 0.281)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_tier_takes_the_promised_share_of_16_bits(tier: Tier, share: float, dim: int) -> None:
    shapes = [LayerShape(num_heads=3, key_dim=dim, value_dim=dim)] * 2
    exact, stored = (TierPlan.of(t, shapes, torch.bfloat16).page_bytes for t in (EXACT, tier))
    assert stored / exact <= share + 0.0005
    assert dim != 64 or stored / exact == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_keys_that_fill_whole_lanes_can_be_held(dtype: torch.dtype) -> None:
    exact = max(1, 4 // dtype.itemsize)
    for tier, multiple in ((EXACT, exact), (INT8, 4), (FP8, 4), (INT4, 8), (Tier("exact", "int4"), exact)):
        for dim in range(1, 33):
            layout = layout_of(tier, dtype, dim, 5)
            assert layout.can_hold == (dim % multiple == 0)
    shapes = [LayerShape(num_heads=1, key_dim=dim, value_dim=3) for dim in (64, 12)]
    assert can_store(INT8, shapes, dtype)
    assert not can_store(INT4, shapes, dtype)
    assert can_store(INT4, shapes[:1], dtype)
