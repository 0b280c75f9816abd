import pytest
import torch

from turnkv.cache import Extent, KVStorage, LayerShape, token_bytes
from turnkv.cache.storage import SlotRange, slot_range
from turnkv.config import PAGE_TOKENS

CPU = torch.device("cpu")
UNEVEN = (
    LayerShape(num_heads=3, key_dim=8, value_dim=8),
    LayerShape(num_heads=1, key_dim=6, value_dim=4),
    LayerShape(num_heads=5, key_dim=2, value_dim=7),
)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def new_kv(shape: LayerShape, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    key = torch.randn(shape.num_heads, num_tokens, shape.key_dim).to(dtype)
    return key, torch.randn(shape.num_heads, num_tokens, shape.value_dim).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_a_token_are_exact_for_uneven_layers(dtype: torch.dtype) -> None:
    by_hand = (3 * 16 + 1 * 10 + 5 * 9) * dtype.itemsize
    storage = KVStorage(UNEVEN, 2, dtype, CPU)
    held = sum(tensor.nbytes for tensor in (*storage.keys, *storage.values))
    assert token_bytes(UNEVEN, dtype) == storage.token_bytes == by_hand
    assert held == by_hand * storage.num_slots == by_hand * 2 * PAGE_TOKENS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_scattered", [False, True])
def test_what_is_written_is_what_is_read(dtype: torch.dtype, is_scattered: bool) -> None:
    storage = KVStorage(UNEVEN, 3, dtype, CPU)
    runs = [(30, 3), (2, 4)] if is_scattered else [(14, 7)]
    before = storage.bytes_of([Extent(0, 2)])
    for layer, shape in enumerate(UNEVEN):
        key, value = new_kv(shape, 7, dtype)
        storage.write(layer, slot_range(runs, CPU), key, value)
        order = [slot for start, length in runs for slot in range(start, start + length)]
        for place, slot in enumerate(order):
            assert torch.equal(storage.keys[layer][:, slot], key[:, place])
            assert torch.equal(storage.values[layer][:, slot], value[:, place])
    assert storage.bytes_of([Extent(0, 2)]) == before
    assert len(storage.bytes_of([Extent(start, start + n) for start, n in runs])) == 7 * storage.token_bytes


def test_equal_tokens_give_equal_bytes_wherever_they_lie() -> None:
    storage = KVStorage(UNEVEN, 4, torch.float32, CPU)
    for layer, shape in enumerate(UNEVEN):
        key, value = new_kv(shape, 7, torch.float32)
        storage.write(layer, slice(0, 7), key, value)
        storage.write(layer, slot_range([(40, 3), (20, 4)], CPU), key, value)
    copy = storage.bytes_of([Extent(0, 7)])
    assert storage.bytes_of([Extent(40, 43), Extent(20, 24)]) == copy
    storage.values[2][4, 21, 6] += 1
    assert storage.bytes_of([Extent(40, 43), Extent(20, 24)]) != copy
    assert storage.bytes_of([Extent(0, 7)]) == copy
    assert storage.bytes_of([]) == b""


def test_wider_numbers_are_rounded_to_the_storages_own() -> None:
    storage = KVStorage(UNEVEN[:1], 1, torch.bfloat16, CPU)
    key, value = new_kv(UNEVEN[0], 3, torch.float32)
    ranges: list[SlotRange] = [slice(0, 3), torch.tensor([9, 5, 7])]
    for slots in ranges:
        storage.write(0, slots, key, value)
        assert torch.equal(storage.keys[0][:, slots], key.to(torch.bfloat16))
        assert torch.equal(storage.values[0][:, slots], value.to(torch.bfloat16))


def test_contiguous_slots_are_a_slice_and_others_an_index() -> None:
    assert slot_range([], CPU) == slice(0, 0)
    assert slot_range([(5, 3)], CPU) == slice(5, 8)
    index = slot_range([(5, 2), (0, 1)], CPU)
    assert isinstance(index, torch.Tensor)
    assert index.tolist() == [5, 6, 0]
