"""Products with packed weights on every instruction set at hand, against float64."""

from collections.abc import Iterator

import pytest
import torch
from tests.tolerances import PRODUCT

from turnkv.kernels import cpu
from turnkv.kernels.matrices import Matrix, stacked

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the C++ kernels were not built")

SHAPES = [(16, 32), (1, 1), (33, 40), (80, 96), (272, 64), (100, 700)]
ROWS = [1, 2, 3, 7, 8, 16, 17, 40, 131, 700]
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@pytest.fixture(params=cpu.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(None)


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    unit = numbers(num_outputs, num_inputs, dtype=torch.float32, seed=1)
    return unit.div(num_inputs**0.5).to(dtype)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_equals_float64_whatever_the_number_of_rows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = weights(*shape, dtype), numbers(shape[0], dtype=dtype, seed=2)
    matrix = Matrix.pack(weight, bias)
    for count in ROWS:
        rows = numbers(count, shape[1], dtype=dtype, seed=count)
        want = rows.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(matrix.product(rows).double(), want, atol=PRODUCT[dtype], rtol=0)


@dtypes
def test_int8_weights_are_within_half_a_step_of_what_they_were(dtype: torch.dtype) -> None:
    weight = weights(48, 320, dtype)
    weight[5] = 0
    matrix = Matrix.pack(weight, is_int8=True)
    assert matrix.scales is not None
    found = matrix.rows(torch.arange(48)).double()
    # The scale itself is float32.
    assert ((found - weight.double()).abs() <= (0.5 + 1e-4) * matrix.scales[:48, None].double()).all()
    rows = numbers(19, 320, dtype=dtype, seed=3)
    want = rows.double() @ found.T
    torch.testing.assert_close(matrix.product(rows).double(), want, atol=PRODUCT[dtype], rtol=0)


@dtypes
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_row_has_the_same_bits_alone_and_among_others_on_one_thread_and_on_two(
    dtype: torch.dtype, is_int8: bool
) -> None:
    matrix = Matrix.pack(weights(200, 320, dtype), is_int8=is_int8)
    rows = numbers(150, 320, dtype=dtype, seed=4)
    whole = matrix.product(rows)
    for at in (0, 7, 130, 149):
        assert torch.equal(matrix.product(rows[at : at + 1])[0], whole[at])
    before = torch.get_num_threads()
    torch.set_num_threads(3 - before)
    try:
        assert torch.equal(matrix.product(rows), whole)
    finally:
        torch.set_num_threads(before)


@dtypes
def test_packed_weights_give_the_rows_of_an_embedding(dtype: torch.dtype) -> None:
    weight = weights(70, 40, dtype)
    ids = torch.tensor([[0, 69], [16, 15]])
    assert torch.equal(Matrix.pack(weight).rows(ids), weight[ids])


@dtypes
def test_layers_stacked_are_each_others_neighbours_and_a_missing_bias_is_zero(dtype: torch.dtype) -> None:
    first, second = weights(20, 32, dtype), weights(7, 32, dtype)
    bias = numbers(7, dtype=dtype, seed=5)
    rows = numbers(3, 32, dtype=dtype, seed=6)
    found = stacked([first, second], [None, bias]).product(rows).double()
    want = torch.cat([rows.double() @ first.double().T, rows.double() @ second.double().T + bias.double()], dim=1)
    torch.testing.assert_close(found, want, atol=PRODUCT[dtype], rtol=0)


@dtypes
def test_rows_that_lie_apart_and_rows_in_no_number_are_taken(dtype: torch.dtype) -> None:
    weight = weights(33, 40, dtype)
    matrix = Matrix.pack(weight)
    wide = numbers(5, 2, 100, dtype=dtype, seed=7)
    found = matrix.product(wide[..., :40])
    assert found.shape == (5, 2, 33)
    assert torch.equal(found, matrix.product(wide[..., :40].contiguous()))
    assert matrix.product(wide[:0, 0, :40]).shape == (0, 33)
