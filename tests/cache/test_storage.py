import itertools
import mmap
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnkv.cache import DryStorage, Extent, KVStorage, LayerShape, TierPlan, native
from turnkv.cache.formats import FORMATS
from turnkv.config import PAGE_TOKENS
from turnkv.errors import OverBudgetError
from turnkv.types import EXACT, Tier

CPU = torch.device("cpu")
UNEVEN = (
    LayerShape(num_heads=3, key_dim=8, value_dim=8),
    LayerShape(num_heads=1, key_dim=16, value_dim=4),
    LayerShape(num_heads=5, key_dim=40, value_dim=7),
)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TIERS = [Tier(*names) for names in itertools.product(FORMATS, repeat=2)]
INT8, INT4 = Tier("int8", "int8"), Tier("int4", "int4")
NUM_PAGES = 4


@pytest.fixture(autouse=True, scope="module", params=["torch", "native"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Storage writes and settles in C++ where that was built, else in torch: both must do the same."""
    if request.param == "native" and native.KERNELS is None:
        pytest.skip("the C++ kernels are not built")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "KERNELS", None)
        yield


slot_lists = st.lists(st.integers(0, NUM_PAGES * PAGE_TOKENS - 1), min_size=1, max_size=20, unique=True)


def slots(numbers: Sequence[int]) -> NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


def new_kv(shape: LayerShape, num_tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    key = torch.randn(shape.num_heads, num_tokens, shape.key_dim, generator=random).to(dtype)
    return key, torch.randn(shape.num_heads, num_tokens, shape.value_dim, generator=random).to(dtype)


def storage_of(
    tiers: Sequence[Tier], dtype: torch.dtype = torch.float32, exact_layers: frozenset[int] = frozenset()
) -> KVStorage:
    plans = {tier: TierPlan.of(tier, UNEVEN, dtype, exact_layers) for tier in {EXACT, *tiers}}
    return KVStorage(plans, dict.fromkeys(plans, NUM_PAGES), CPU)


def read(storage: KVStorage, layer: int, tier: Tier, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [G, N, D] and values [G, N, E] as attention reads them."""
    keys, values = storage.layers[layer].read(tier, torch.arange(NUM_PAGES))
    return keys[:, list(numbers)], values[:, list(numbers)]


def fill(storage: KVStorage, numbers: Sequence[int], seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write random exact tokens to all layers."""
    written = []
    for layer, shape in enumerate(UNEVEN):
        written.append(new_kv(shape, len(numbers), storage.layers[layer].layouts[EXACT].dtype, seed + layer))
        storage.write(layer, slots(numbers), *written[-1])
    return written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bytes_of_a_page_are_exact_for_uneven_layers(dtype: torch.dtype) -> None:
    # 16 tokens of (heads * (D + E)) numbers; here each head's part is a multiple of 64 bytes as it is.
    by_hand = 16 * (3 * 16 + 1 * 20 + 5 * 47) * dtype.itemsize
    for layer, (heads, dims) in enumerate(((3, 16), (1, 20), (5, 47))):
        assert (
            TierPlan.of(EXACT, UNEVEN, dtype).layouts[layer].page_bytes
            == -(-16 * dims * dtype.itemsize // 64) * 64 * heads
        )
    assert TierPlan.of(EXACT, UNEVEN, dtype).page_bytes - by_hand == (5 * 32 if dtype.itemsize == 2 else 0)


def test_the_bytes_of_a_quantised_page_are_as_worked_out_on_paper() -> None:
    dtype = torch.bfloat16
    # A head: codes of keys and values, scales of each, to a multiple of 64. 320 = 128 + 128 + 32 + 32, and so on.
    assert [layout.head_bytes for layout in TierPlan.of(INT8, UNEVEN, dtype).layouts] == [320, 384, 832]
    assert TierPlan.of(INT8, UNEVEN, dtype).page_bytes == 3 * 320 + 384 + 5 * 832
    # int4: 64 + 64 + 32 + 32 | 128 + 32 + 32 + 32 | 320 + 56 + 64 (groups of 32, 8) + 96 (4, 2, 1) = 536
    assert TierPlan.of(INT4, UNEVEN, dtype).page_bytes == 3 * 192 + 256 + 5 * 576
    assert TierPlan.of(INT4, UNEVEN, dtype, frozenset({1})).page_bytes == 3 * 192 + 640 + 5 * 576
    everywhere = TierPlan.of(INT4, UNEVEN, dtype, frozenset({0, 1, 2}))
    assert everywhere.page_bytes == TierPlan.of(EXACT, UNEVEN, dtype).page_bytes


def test_arenas_have_a_page_of_bytes_a_page_and_lie_aligned() -> None:
    storage = storage_of(TIERS, torch.bfloat16)
    for tier, plan in storage.plans.items():
        arenas = [kv.arenas[tier] for kv in storage.layers]
        assert sum(arena.nbytes for arena in arenas) == NUM_PAGES * plan.page_bytes
        assert all(arena.data_ptr() % 64 == 0 and arena.is_contiguous() for arena in arenas)
        assert all(layout.head_bytes % 64 == 0 for layout in plan.layouts)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), slot_lists)
def test_what_is_written_is_what_is_read_and_nothing_else_changes(dtype: torch.dtype, numbers: list[int]) -> None:
    storage = storage_of([], dtype)
    everywhere = range(NUM_PAGES * PAGE_TOKENS)
    before = fill(storage, everywhere, seed=50)
    written = fill(storage, numbers)
    others = [slot for slot in everywhere if slot not in numbers]
    for layer in range(len(UNEVEN)):
        for found, new, old in zip(read(storage, layer, EXACT, everywhere), written[layer], before[layer], strict=True):
            assert torch.equal(found[:, numbers], new)
            assert torch.equal(found[:, others], old[:, others])


def test_wider_numbers_are_rounded_to_the_storages_own() -> None:
    storage = storage_of([], torch.bfloat16)
    key, value = new_kv(UNEVEN[0], 3, torch.float32)
    for numbers in ([0, 1, 2], [9, 5, 40]):
        storage.write(0, slots(numbers), key, value)
        found = read(storage, 0, EXACT, numbers)
        assert torch.equal(found[0], key.to(torch.bfloat16))
        assert torch.equal(found[1], value.to(torch.bfloat16))


@cache
def storage_of_all(dtype: torch.dtype, exact_layers: frozenset[int]) -> KVStorage:
    return storage_of(TIERS, dtype, exact_layers)


def formats_of(tier: Tier, is_exact: bool) -> Tier:
    return EXACT if is_exact else tier


@settings(max_examples=250, deadline=None)
@given(
    source=st.sampled_from(TIERS),
    target=st.sampled_from(TIERS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    exact_layers=st.sampled_from([frozenset[int](), frozenset({1}), frozenset({0, 2})]),
    data=st.data(),
)
def test_settling_quantises_what_is_stored_and_touches_nothing_else(
    source: Tier, target: Tier, dtype: torch.dtype, exact_layers: frozenset[int], data: st.DataObject
) -> None:
    storage = storage_of_all(dtype, exact_layers)
    count = data.draw(st.integers(1, 12))
    places = st.lists(st.integers(0, NUM_PAGES * PAGE_TOKENS - 1), min_size=count, max_size=count, unique=True)
    first, here, there = data.draw(places), data.draw(places), data.draw(places)
    fill(storage, first, seed=data.draw(st.integers(0, 9)))
    if source in (target, EXACT):
        here = first if source == EXACT else here
        there = [slot for slot in range(NUM_PAGES * PAGE_TOKENS) if slot not in here][:count]
    if source != EXACT:
        storage.settle(EXACT, slots(first), source, slots(here))
    before = {tier: [kv.arenas[tier].clone() for kv in storage.layers] for tier in TIERS}
    kept = storage.bytes_of(source, slots(here))
    others = [slot for slot in range(NUM_PAGES * PAGE_TOKENS) if slot not in there]
    beside = storage.bytes_of(target, slots(others))
    storage.settle(source, slots(here), target, slots(there))

    for layer in range(len(UNEVEN)):
        old, new = formats_of(source, layer in exact_layers), formats_of(target, layer in exact_layers)
        stored, found = read(storage, layer, source, here), read(storage, layer, target, there)
        for was, becomes, vectors, read_back in zip(old, new, stored, found, strict=True):
            if was == becomes:
                assert torch.equal(read_back, vectors)
            else:
                form = FORMATS[becomes]
                wanted = form.read(*form.quantise(vectors))
                assert torch.equal(read_back.float(), wanted.to(read_back.dtype).float())
    assert storage.bytes_of(source, slots(here)) == kept
    assert storage.bytes_of(target, slots(others)) == beside
    for tier in set(TIERS) - {target}:
        for kv, arena in zip(storage.layers, before[tier], strict=True):
            assert torch.equal(kv.arenas[tier], arena)


@pytest.mark.parametrize(
    ("source", "target", "part"),
    [
        (Tier("int8", "int4"), Tier("int8", "fp8"), "keys"),
        (Tier("int4", "int8"), Tier("int4", "exact"), "keys"),
        (Tier("exact", "int4"), Tier("int8", "int4"), "values"),
        (Tier("fp8", "int8"), Tier("int4", "int8"), "values"),
        (Tier("int4", "int4"), Tier("int4", "int4"), "both"),
        (Tier("int8", "fp8"), Tier("int8", "fp8"), "both"),
    ],
    ids=str,
)
def test_a_format_that_stays_keeps_its_codes_and_scales_bit_for_bit(source: Tier, target: Tier, part: str) -> None:
    """Of any codes: those of quantised vectors would come out the same if they were read and quantised again."""
    storage = storage_of([source, target])
    here, there = range(5, 13), [40, 3, 41, 2, 60, 61, 62, 63]
    for kv in storage.layers:
        kv.arenas[source][:] = torch.randint(0, 0x3C, kv.arenas[source].shape, dtype=torch.uint8)
    storage.settle(source, slots(here), target, slots(there))
    for kv in storage.layers:
        old = kv.layouts[source].unpack(kv.arenas[source])
        new = kv.layouts[target].unpack(kv.arenas[target])
        for was, becomes in zip(here, there, strict=True):
            for name in ("keys", "key_scales", "values", "value_scales"):
                if part in ("both", "keys" if name.startswith("key") else "values"):
                    a, b = getattr(old, name), getattr(new, name)
                    assert torch.equal(a[was // 16, :, was % 16], b[becomes // 16, :, becomes % 16]), name


def test_settling_many_times_between_equal_formats_never_drifts() -> None:
    storage = storage_of([INT4])
    fill(storage, range(16))
    storage.settle(EXACT, slots(range(16)), INT4, slots(range(16)))
    copy = storage.bytes_of(INT4, slots(range(16)))
    for step in range(1, 4):
        storage.settle(INT4, slots(range(16 * step - 16, 16 * step)), INT4, slots(range(16 * step, 16 * step + 16)))
    assert storage.bytes_of(INT4, slots(range(48, 64))) == copy


def test_layers_kept_exact_are_copied_where_others_are_quantised() -> None:
    storage = storage_of([INT4], torch.bfloat16, frozenset({1}))
    written = fill(storage, range(20))
    storage.settle(EXACT, slots(range(20)), INT4, slots(range(7, 27)))
    for layer in range(len(UNEVEN)):
        found = read(storage, layer, INT4, range(7, 27))
        for part, exact in zip(found, written[layer], strict=True):
            assert torch.equal(part.to(torch.bfloat16), exact) == (layer == 1)


@pytest.mark.parametrize("tier", [EXACT, INT8, INT4, Tier("int8", "exact")], ids=str)
def test_equal_tokens_give_equal_bytes_wherever_they_lie(tier: Tier) -> None:
    storage = storage_of([tier])
    for kv in storage.layers:
        kv.arenas[tier].fill_(0x55)
    fill(storage, range(7))
    for places in (range(7), [40, 41, 42, 20, 21, 22, 23]):
        storage.settle(EXACT, slots(range(7)), tier, slots(places))
    copy = storage.bytes_of(tier, slots(range(7)))
    assert storage.bytes_of(tier, slots([40, 41, 42, 20, 21, 22, 23])) == copy
    assert storage.bytes_of(tier, slots([41, 40, 42, 20, 21, 22, 23])) != copy
    for kv in storage.layers:
        kv.arenas[tier][1, -1] ^= 0x11
    assert storage.bytes_of(tier, slots([40, 41, 42, 20, 21, 22, 23])) != copy
    assert storage.bytes_of(tier, slots(range(7))) == copy
    assert storage.bytes_of(tier, slots([])) == b""


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([EXACT, INT8, INT4]), st.lists(st.integers(0, 100), min_size=2, max_size=8, unique=True))
def test_memory_given_back_reads_as_zero_and_what_is_held_is_left_alone(tier: Tier, edges: list[int]) -> None:
    edges = sorted(edges[: len(edges) // 2 * 2])
    extents = [Extent(a * PAGE_TOKENS, b * PAGE_TOKENS) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    shapes = (LayerShape(num_heads=2, key_dim=64, value_dim=64), LayerShape(num_heads=1, key_dim=8, value_dim=5))
    plans = {t: TierPlan.of(t, shapes, torch.float32) for t in (EXACT, INT8, INT4)}
    storage = KVStorage(plans, dict.fromkeys(plans, 100), CPU)
    for kv in storage.layers:
        for arena in kv.arenas.values():
            arena.fill_(0xA5)
    storage.give_back(tier, extents)
    for kv in storage.layers:
        for other, arena in kv.arenas.items():
            flat, page_bytes = arena.flatten(), kv.layouts[other].page_bytes
            is_zero = torch.zeros(len(flat), dtype=torch.bool)
            for start, stop in zip(edges[::2], edges[1::2], strict=True) if other == tier else ():
                # Whole pages of the system alone: what shares one with a page that is held stays.
                inner = range(-(-start * page_bytes // mmap.PAGESIZE), stop * page_bytes // mmap.PAGESIZE)
                is_zero[inner.start * mmap.PAGESIZE : max(inner.start, inner.stop) * mmap.PAGESIZE] = True
            assert torch.equal(flat == 0, is_zero)
            assert torch.equal(flat == 0xA5, ~is_zero)


def test_memory_given_back_can_be_written_again() -> None:
    storage = storage_of([])
    everywhere = range(NUM_PAGES * PAGE_TOKENS)
    fill(storage, everywhere)
    storage.give_back(EXACT, [Extent(0, NUM_PAGES * PAGE_TOKENS)])
    written = fill(storage, everywhere, seed=7)
    assert torch.equal(read(storage, 2, EXACT, everywhere)[0], written[2][0])


def test_more_address_space_than_the_system_has_is_refused_with_a_remedy() -> None:
    plans = {EXACT: TierPlan.of(EXACT, UNEVEN, torch.float32)}
    with pytest.raises(OverBudgetError, match="lower the budget"):
        KVStorage(plans, {EXACT: 2**46}, CPU)


def test_a_dry_storage_takes_everything_and_keeps_nothing() -> None:
    storage = DryStorage()
    storage.write(0, slots([1]), *new_kv(UNEVEN[0], 1, torch.float32))
    storage.settle(EXACT, slots([1]), INT8, slots([2]))
    storage.give_back(EXACT, [Extent(0, 16)])
    assert storage.layers == []
