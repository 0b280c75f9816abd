"""The C++ `write` and `settle` on every instruction set at hand, byte for byte against the torch reference."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnkv.cache import KVStorage, LayerShape, TierPlan, native
from turnkv.cache.formats import FORMATS
from turnkv.cache.formats.int4 import hadamard
from turnkv.config import PAGE_TOKENS
from turnkv.kernels import cpu
from turnkv.types import EXACT, Tier

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the C++ kernels were not built")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [(8, 8), (16, 5), (64, 7), (80, 96), (96, 64), (128, 255)]
PAIRS = list(itertools.product(FORMATS, repeat=2))
ISAS = list(enumerate(cpu.isas()))
NUM_PAGES = 4
NUM_SLOTS = NUM_PAGES * PAGE_TOKENS

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are small, and waking threads for each is slow where other processes run too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slots(numbers: Sequence[int]) -> NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


def scattered(seed: int, count: int, num_slots: int = NUM_SLOTS) -> NDArray[np.int32]:
    return np.random.default_rng(seed).permutation(num_slots)[:count].astype(np.int32)


def edge_vectors(num: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[num, dim], finite: all sizes, zeros of both signs, one element alone, ties in rounding and in magnitude."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(num, dim, generator=random, dtype=torch.float64)
    kinds = torch.arange(num) % 12
    exponents = {1: -4, 2: -7, 3: -12, 4: 3, 5: 6, 6: 30}
    for kind, exponent in exponents.items():
        rows[kinds == kind] *= 10.0**exponent
    rows[kinds == 7] *= 0.0
    alone = torch.randint(dim, (num,), generator=random)
    rows[kinds == 8] = -7.0 * torch.nn.functional.one_hot(alone, dim)[kinds == 8].double()
    halves = torch.randint(-127, 127, rows.shape, generator=random).double() + 0.5
    halves[:, 0] = 127
    rows[kinds == 9] = halves[kinds == 9]
    levels = torch.randint(-8, 7, rows.shape, generator=random).double() + 0.5
    levels[:, ::8] = -8
    rows[kinds == 10] = hadamard(levels)[kinds == 10]
    rows[kinds == 11] = rows[kinds == 11].sign()
    limit = torch.finfo(dtype).max
    return rows.clamp(-limit, limit).to(dtype)


def storage_of(
    tiers: Sequence[Tier], dims: tuple[int, int], dtype: torch.dtype, num_pages: int = NUM_PAGES
) -> KVStorage:
    shapes = [LayerShape(num_heads=heads, key_dim=dims[0], value_dim=dims[1]) for heads in (3, 1)]
    plans = {tier: TierPlan.of(tier, shapes, dtype) for tier in {EXACT, *tiers}}
    return KVStorage(plans, dict.fromkeys(plans, num_pages), CPU)


def fill(storage: KVStorage, seed: int = 0) -> None:
    """Edge values in all slots of the exact tier."""
    layouts = [kv.layouts[EXACT] for kv in storage.layers]
    for index, layout in enumerate(layouts):
        shape, count = layout.shape, storage.layers[index].arenas[EXACT].shape[0] * PAGE_TOKENS
        key, value = (
            edge_vectors(shape.num_heads * count, dim, layout.dtype, seed + index).view(shape.num_heads, count, dim)
            for dim in (shape.key_dim, shape.value_dim)
        )
        storage.write(index, slots(range(count)), key, value)


def settle_by(
    isa: int,
    storage: KVStorage,
    moves: tuple[Tier, NDArray[np.int32], Tier, NDArray[np.int32]],
) -> None:
    """As `KVStorage.settle`, on one instruction set."""
    source, source_slots, target, target_slots = moves
    assert native.KERNELS is not None
    native.KERNELS.settle(
        [
            (
                native.arena(kv.arenas[source], kv.layouts[source]),
                native.arena(kv.arenas[target], kv.layouts[target]),
                kv.layouts[source].shape.num_heads,
                kv.layouts[source].shape.key_dim,
                kv.layouts[source].shape.value_dim,
            )
            for kv in storage.layers
        ],
        native.DTYPES[storage.layers[0].layouts[source].dtype],
        source_slots,
        target_slots,
        isa=isa,
    )


def write_by(isa: int, storage: KVStorage, to: NDArray[np.int32], key: torch.Tensor, value: torch.Tensor) -> None:
    """As `KVStorage.write` of layer 0, on one instruction set."""
    kv = storage.layers[0]
    layout = kv.layouts[EXACT]
    shape = layout.shape
    assert native.KERNELS is not None
    native.KERNELS.write(
        (
            kv.arenas[EXACT].data_ptr(),
            layout.page_bytes,
            layout.head_bytes,
            native.DTYPES[layout.dtype],
            shape.num_heads,
            shape.key_dim,
            shape.value_dim,
        ),
        (key.data_ptr(), key.stride(0), key.stride(1)),
        (value.data_ptr(), value.stride(0), value.stride(1)),
        to,
        isa=isa,
    )


def in_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(native, "KERNELS", None)


def bytes_of(storage: KVStorage, tier: Tier) -> list[bytes]:
    return [kv.arenas[tier].numpy().tobytes() for kv in storage.layers]


def clear(storage: KVStorage, tier: Tier) -> None:
    for kv in storage.layers:
        kv.arenas[tier].zero_()


@dtypes
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_settle_gives_the_references_bytes_for_all_pairs_of_formats(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Keys go from one format to the other and values back, so that each pair is met in both layouts."""
    storage = storage_of([Tier(*pair) for pair in PAIRS], dims, dtype)
    fill(storage)
    all_slots = slots(range(NUM_SLOTS))
    for seed, (first, second) in enumerate(PAIRS):
        source, target = Tier(first, second), Tier(second, first)
        # A tier that moves within itself has its tokens in the lower half, and room for them in the upper one.
        count = NUM_SLOTS // 2 if source == target else 37
        old, new = scattered(seed, count, count if source == target else NUM_SLOTS), scattered(seed + 99, count)
        if source == target:
            new = NUM_SLOTS // 2 + scattered(seed + 99, count, count)
        with pytest.MonkeyPatch.context() as patch:
            in_torch(patch)
            if source != EXACT:
                clear(storage, source)
                storage.settle(EXACT, all_slots, source, all_slots)
            if source != target and target != EXACT:
                clear(storage, target)
            before = [kv.arenas[target].clone() for kv in storage.layers]
            storage.settle(source, old, target, new)
        wanted = bytes_of(storage, target)
        for isa, name in ISAS:
            for kv, block in zip(storage.layers, before, strict=True):
                kv.arenas[target].copy_(block)
            settle_by(isa, storage, (source, old, target, new))
            assert bytes_of(storage, target) == wanted, (name, source, target)
        if target == EXACT:
            fill(storage)


@dtypes
@pytest.mark.parametrize("form", FORMATS)
def test_settle_copies_any_bits_of_a_format_that_stays(dtype: torch.dtype, form: str) -> None:
    tier, random = Tier(form, form), torch.Generator().manual_seed(1)
    storage = storage_of([tier], (40, 7), dtype)
    here, there = scattered(1, 30, 32), 32 + scattered(2, 30, 32)
    for isa, name in ISAS:
        for kv in storage.layers:
            kv.arenas[tier].copy_(torch.randint(256, kv.arenas[tier].shape, generator=random, dtype=torch.uint8))
        wanted = storage.bytes_of(tier, here)
        others = slots([slot for slot in range(NUM_SLOTS) if slot not in there])
        kept = storage.bytes_of(tier, others)
        settle_by(isa, storage, (tier, here, tier, there))
        assert storage.bytes_of(tier, there) == wanted, name
        assert storage.bytes_of(tier, others) == kept, name


@dtypes
@pytest.mark.parametrize("form", [name for name in FORMATS if name != "exact"])
def test_what_settle_stored_is_off_by_no_more_than_the_formats_bound(dtype: torch.dtype, form: str) -> None:
    tier = Tier(form, form)
    storage = storage_of([tier], (80, 96), dtype)
    fill(storage, seed=3)
    pages, everywhere = torch.arange(NUM_PAGES), slots(range(NUM_SLOTS))
    for isa, name in ISAS:
        settle_by(isa, storage, (EXACT, everywhere, tier, everywhere))
        for kv in storage.layers:
            for exact, found in zip(kv.read(EXACT, pages), kv.read(tier, pages), strict=True):
                error = (found.double() - exact.double()).norm(dim=-1)
                slack = 1e-6 * exact.double().norm(dim=-1)
                assert (error <= FORMATS[form].error_bound(exact).double() + slack).all(), name


slot_lists = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=40, unique=True)
TIERS = [Tier("int8", "int8"), Tier("int4", "int4"), Tier("int8", "int4"), Tier("fp8", "exact")]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TIERS), slot_lists, slot_lists, st.sampled_from(DTYPES))
def test_settle_of_any_slots_gives_the_references_bytes(
    tier: Tier, old: list[int], new: list[int], dtype: torch.dtype
) -> None:
    count = min(len(old), len(new))
    storage = storage_of([tier], (24, 9), dtype)
    fill(storage, seed=count)
    with pytest.MonkeyPatch.context() as patch:
        in_torch(patch)
        if count:
            storage.settle(EXACT, slots(old[:count]), tier, slots(new[:count]))
    wanted = bytes_of(storage, tier)
    for isa, name in ISAS:
        clear(storage, tier)
        settle_by(isa, storage, (EXACT, slots(old[:count]), tier, slots(new[:count])))
        assert bytes_of(storage, tier) == wanted, name


@settings(max_examples=30, deadline=None)
@given(slot_lists, st.sampled_from(DTYPES), st.sampled_from(DIMS), st.booleans())
def test_write_puts_the_bits_where_the_reference_puts_them(
    numbers: list[int], dtype: torch.dtype, dims: tuple[int, int], is_token_first: bool
) -> None:
    storage = storage_of([], dims, dtype)
    heads, count = storage.layers[0].layouts[EXACT].shape.num_heads, len(numbers)
    random = torch.Generator().manual_seed(count)
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    limits = torch.iinfo(bits)
    shape = (count, heads) if is_token_first else (heads, count)
    # Any bits, those of NaN too: they are copied, not computed with. Rows have room behind, as slices of a batch do.
    key, value = (
        torch.randint(limits.min, limits.max, (*shape, dim + 4), generator=random, dtype=bits).view(dtype)[..., :dim]
        for dim in dims
    )
    if is_token_first:
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    with pytest.MonkeyPatch.context() as patch:
        in_torch(patch)
        fill(storage)
        before = storage.layers[0].arenas[EXACT].clone()
        if count:
            storage.write(0, slots(numbers), key, value)
    wanted = bytes_of(storage, EXACT)
    for isa, name in ISAS:
        storage.layers[0].arenas[EXACT].copy_(before)
        write_by(isa, storage, slots(numbers), key, value)
        assert bytes_of(storage, EXACT) == wanted, name


def test_many_tokens_divided_among_threads_give_the_bytes_of_one_thread() -> None:
    tier, num_pages = Tier("int8", "int4"), 128
    storage = storage_of([tier], (128, 128), torch.bfloat16, num_pages)
    count = num_pages * PAGE_TOKENS  # large enough for `write` and `settle` to wake threads (csrc/settle.cpp)
    here, there = scattered(1, count, count), scattered(2, count, count)
    key, value = torch.randn(2, 3, count, 128).bfloat16()
    found, threads = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            clear(storage, EXACT)
            clear(storage, tier)
            write_by(len(ISAS) - 1, storage, here, key, value)
            settle_by(len(ISAS) - 1, storage, (EXACT, here, tier, there))
            found.append((bytes_of(storage, EXACT), bytes_of(storage, tier)))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_what_cannot_be_settled_is_refused() -> None:
    storage = storage_of([TIERS[0]], (8, 8), torch.float32)
    with pytest.raises(ValueError, match="each source slot needs a target"):
        settle_by(0, storage, (EXACT, slots([1, 2]), TIERS[0], slots([1])))
    with pytest.raises(IndexError):
        settle_by(len(ISAS), storage, (EXACT, slots([1]), TIERS[0], slots([1])))


def test_torch_and_the_kernels_share_one_openmp() -> None:
    """Two would each spin their own threads on the same cores."""
    try:
        with open("/proc/self/maps") as maps:
            mapped = {line.split()[-1] for line in maps if "gomp" in line or "libomp" in line or "libiomp" in line}
    except FileNotFoundError:
        pytest.skip("this system does not say what a process has mapped")
    assert len(mapped) <= 1, mapped
