import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnkv.cache.formats import FORMATS
from turnkv.cache.formats.int4 import blocks, hadamard

QUANTISED = ("int8", "fp8", "int4")
DIMS = (1, 2, 5, 8, 16, 24, 64, 80, 96, 128)
HALF_MAX = 65504.0
quantised = pytest.mark.parametrize("name", QUANTISED)


def unit(seed: int, dim: int, num: int = 64) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(seed))


KINDS = {
    "unit normal": lambda v: v,
    "an outlier": lambda v: v + 300 * torch.nn.functional.one_hot(torch.tensor(0), v.shape[-1]),
    "an outlier alone": lambda v: (
        -7.0 * torch.nn.functional.one_hot(torch.tensor(v.shape[-1] - 1), v.shape[-1]) + 0 * v
    ),
    "small": lambda v: v * 1e-4,
    "tiny": lambda v: v * 1e-6,
    "below any scale": lambda v: v * 1e-12,
    "large": lambda v: v * 1e4,
    "huge": lambda v: v * 1e6,
    "beyond any scale": lambda v: v * 1e12,
    "zero": lambda v: 0 * v,
    "all equal": lambda v: v[:, :1].expand_as(v),
    "one positive level": lambda v: v.abs().mean(dim=-1, keepdim=True).expand_as(v),
    "of sixteen bits": lambda v: v.bfloat16(),
}


@quantised
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", DIMS)
def test_what_is_read_is_off_by_no_more_than_the_bound(name: str, kind: str, dim: int) -> None:
    form = FORMATS[name]
    vectors = KINDS[kind](unit(dim, dim))
    codes, scales = form.quantise(vectors)
    assert codes.shape == vectors.shape
    assert scales.shape == (len(vectors), form.num_scales(dim))
    assert scales.isfinite().all()
    found = form.read(codes, scales)
    assert found.dtype == torch.float32
    error = (found.double() - vectors.double()).norm(dim=-1)
    # What float32 loses in the transform and back is not of the format.
    slack = 1e-6 * vectors.double().norm(dim=-1)
    assert (error <= form.error_bound(vectors).double() + slack).all()


@quantised
@settings(max_examples=200, deadline=None)
@given(
    numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
)
def test_the_bound_holds_for_any_vector(name: str, numbers: list[float]) -> None:
    form = FORMATS[name]
    vectors = torch.tensor(numbers)
    error = (form.read(*form.quantise(vectors)).double() - vectors.double()).norm()
    assert error <= form.error_bound(vectors).double() + 1e-6 * vectors.double().norm() + 1e-18


@pytest.mark.parametrize(("name", "largest"), [("int8", 0.0085), ("fp8", 0.03), ("int4", 0.12)])
def test_the_error_of_unit_normal_vectors_is_what_so_many_bits_allow(name: str, largest: float) -> None:
    """The bound must be no excuse: the usual error is far below it, and the bound is not far above."""
    form, vectors = FORMATS[name], unit(5, 64, 2000)
    error = (form.read(*form.quantise(vectors)) - vectors).norm(dim=-1) / vectors.norm(dim=-1)
    assert error.mean() < largest
    assert error.mean() > largest / 2
    assert (form.error_bound(vectors) / vectors.norm(dim=-1)).mean() < 6 * largest


def test_the_exact_format_keeps_every_bit() -> None:
    form = FORMATS["exact"]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        vectors = unit(0, 8).to(dtype)
        codes, scales = form.quantise(vectors)
        assert scales.shape == (64, 0)
        assert codes.dtype == form.code_dtype(dtype) == dtype
        assert torch.equal(form.read(codes, scales), vectors)
        assert not form.error_bound(vectors).any()


def test_int8_uses_every_level_and_never_the_lowest_code() -> None:
    levels = torch.arange(-127, 128) * 0.25
    codes, scales = FORMATS["int8"].quantise(levels)
    assert scales.tolist() == [0.25]
    assert codes.tolist() == list(range(-127, 128))
    # A scale that was rounded down would need 128 for the largest element.
    codes, scales = FORMATS["int8"].quantise(unit(1, 16, 5000))
    assert codes.min() == -127
    assert codes.max() == 127


def test_int8_rounds_halves_to_even() -> None:
    codes, _ = FORMATS["int8"].quantise(torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]))
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("sign", [1, -1])
def test_int4_uses_all_sixteen_levels(sign: int) -> None:
    levels = torch.tensor([-8, *range(-7, 8), *[0] * 16]) * 0.5 * sign
    codes, scales = FORMATS["int4"].quantise(hadamard(levels.double()).float())
    assert scales.tolist() == [0.5 * sign]
    assert codes.tolist() == [*range(16), *[8] * 16]
    codes, _ = FORMATS["int4"].quantise(unit(1, 32, 500))
    assert set(codes.flatten().tolist()) == set(range(16))


def test_the_first_of_equal_largest_elements_sets_the_sign_of_an_int4_scale() -> None:
    for first, wanted in ((4.0, -0.5), (-4.0, 0.5)):
        turned = torch.tensor([1.0, first, 2.0, -first])
        codes, scales = FORMATS["int4"].quantise(hadamard(turned))
        assert scales.tolist() == [wanted]
        assert codes.tolist()[1] == 0
        assert codes.tolist()[3] == 15


@quantised
def test_scales_too_large_for_half_precision_are_held_at_its_limit(name: str) -> None:
    form = FORMATS[name]
    codes, scales = form.quantise(torch.tensor([3e38] + [0.0] * 7))
    assert scales.float().abs().tolist() == [HALF_MAX] * form.num_scales(8)
    assert form.read(codes, scales).isfinite().all()


@quantised
def test_zero_is_read_as_zero(name: str) -> None:
    form = FORMATS[name]
    codes, scales = form.quantise(torch.zeros(3, 8))
    assert not scales.any()
    assert set(codes.flatten().tolist()) == {8 if name == "int4" else 0}
    assert not form.read(codes, scales).any()


def fp8_value(code: int) -> float:
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_fp8_codes_mean_what_the_e4m3_format_says() -> None:
    form = FORMATS["fp8"]
    values = torch.tensor([fp8_value(code) for code in range(256)])
    codes = torch.arange(256, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.float16)
    torch.testing.assert_close(form.read(codes, none), values, rtol=0, atol=0, equal_nan=True)
    is_number = ~values.isnan()
    assert torch.equal(form.quantise(values[is_number])[0], codes[is_number])


@pytest.mark.parametrize("value", [448.0, 449.0, 465.0, 1e5, math.inf])
def test_fp8_clamps_at_448(value: float) -> None:
    form = FORMATS["fp8"]
    assert form.read(*form.quantise(torch.tensor([value, -value]))).tolist() == [448, -448]


def explicit_hadamard(size: int) -> torch.Tensor:
    """Entry (i, j) is the parity of the bits that i and j share (Sylvester's construction), normalised."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)


@pytest.mark.parametrize("dim", DIMS)
def test_the_hadamard_transform_is_the_block_diagonal_matrix_and_its_own_inverse(dim: int) -> None:
    matrix, start = torch.zeros(dim, dim, dtype=torch.float64), 0
    for size in blocks(dim):
        matrix[start : start + size, start : start + size] = explicit_hadamard(size)
        start += size
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim).double(), rtol=0, atol=1e-14)
    vectors = unit(dim, dim).double()
    assert (hadamard(vectors) - vectors @ matrix).abs().max() < 1e-13
    assert (hadamard(hadamard(vectors)) - vectors).abs().max() < 1e-13
    assert (hadamard(vectors.float()).double() - vectors @ matrix).abs().max() < 2e-6


def test_blocks_are_the_largest_powers_of_two_that_fit() -> None:
    wanted = {
        1: [1],
        5: [4, 1],
        8: [8],
        64: [32, 32],
        80: [32, 32, 16],
        96: [32, 32, 32],
        40: [32, 8],
        31: [16, 8, 4, 2, 1],
    }
    assert {dim: blocks(dim) for dim in wanted} == wanted


def int8_by_hand(vector: NDArray[np.float32]) -> tuple[list[int], list[float]]:
    largest = np.abs(vector).max() / np.float32(127)
    scale = np.float16(min(largest, np.float32(HALF_MAX)))
    step = np.float32(scale)
    codes = [0 if step == 0 else int(np.clip(np.rint(x / step), -127, 127)) for x in vector]
    return codes, [float(scale)]


def int4_by_hand(vector: NDArray[np.float32]) -> tuple[list[int], list[float]]:
    codes, scales, start = [], [], 0
    while start < len(vector):
        size = 32
        while size > len(vector) - start:
            size //= 2
        part = [np.float32(x) for x in vector[start : start + size]]
        stride = 1
        while stride < size:
            for i in range(size):
                if not i & stride:
                    part[i], part[i + stride] = part[i] + part[i + stride], part[i] - part[i + stride]
            stride *= 2
        part = [x * np.float32(1 / math.sqrt(size)) for x in part]
        largest = max(part, key=abs) / np.float32(-8)
        scale = np.float16(np.clip(largest, np.float32(-HALF_MAX), np.float32(HALF_MAX)))
        step = np.float32(scale)
        codes += [8 if step == 0 else int(np.clip(np.rint(x / step), -8, 7)) + 8 for x in part]
        scales.append(float(scale))
        start += size
    return codes, scales


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [5, 8, 80])
def test_codes_and_scales_are_those_of_plain_float32_arithmetic_to_the_bit(kind: str, dim: int) -> None:
    """What the C++ kernels are held to: each operation rounded once, in the order of the docs."""
    vectors = KINDS[kind](unit(dim, dim, 12)).float()
    for name, by_hand in (("int8", int8_by_hand), ("int4", int4_by_hand)):
        codes, scales = FORMATS[name].quantise(vectors)
        for row, vector in enumerate(vectors.numpy()):
            assert (codes[row].tolist(), scales[row].tolist()) == by_hand(vector), name


def test_int4_loses_less_to_outliers_than_plain_int4() -> None:
    vectors = unit(3, 64, 500)
    vectors[:, [5, 40]] *= 30
    form = FORMATS["int4"]
    ours = (form.read(*form.quantise(vectors)) - vectors).norm(dim=-1)
    plain = []
    for part in vectors.view(500, 2, 32).unbind(1):
        step = part.gather(-1, part.abs().argmax(dim=-1, keepdim=True)) / -8
        plain.append((part / step).round().clamp(-8, 7) * step - part)
    plainly = torch.cat(plain, dim=-1).norm(dim=-1)
    assert ours.mean() < 0.8 * plainly.mean()
    # What is left between the outliers is what attention reads; plain int4 rounds nearly all of it to 0.
    rest = [i for i in range(64) if i not in (5, 40)]
    kept = ((form.read(*form.quantise(vectors)) - vectors)[:, rest].norm(dim=-1) / vectors[:, rest].norm(dim=-1)).mean()
    lost = (torch.cat(plain, dim=-1)[:, rest].norm(dim=-1) / vectors[:, rest].norm(dim=-1)).mean()
    assert kept < 0.9 * lost


@quantised
def test_any_leading_dims_and_strides_give_the_same(name: str) -> None:
    form = FORMATS[name]
    flat = unit(2, 24, 12)
    codes, scales = form.quantise(flat)
    folded = flat.view(3, 4, 24).transpose(0, 1)
    again, steps = form.quantise(folded)
    assert torch.equal(again.transpose(0, 1).reshape(12, 24), codes)
    assert torch.equal(steps.transpose(0, 1).reshape(12, -1), scales)
    assert torch.equal(form.read(again, steps).transpose(0, 1).reshape(12, 24), form.read(codes, scales))
    assert form.read(again[:0], steps[:0]).shape == (0, 3, 24)


def test_formats_are_registered_under_their_own_names() -> None:
    assert {name: form.name for name, form in FORMATS.items()} == {name: name for name in ("exact", *QUANTISED)}
