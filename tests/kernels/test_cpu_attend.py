"""Conformance of the C++ body on every instruction set that it was compiled for and that this machine has."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import oracle
from tests.kernels.cases import (
    CASES,
    HALF,
    INT4,
    INT8,
    INTERLEAVED,
    PARTIAL_TAIL,
    PLAIN,
    SINKS,
    TIERS,
    rotation_of,
    settled,
    step_of,
)
from tests.kernels.oracle import Piece, Shape, Step
from tests.tolerances import ATTEND

from turnkv.kernels import BODIES, LayerAttention, Rotation, cpu
from turnkv.types import EXACT, Tier

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the C++ kernels were not built")

DTYPES = [dtype for dtype in ATTEND if dtype.itemsize < 8]
MANY = (EXACT, *TIERS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(params=cpu.isas() or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Leaves the number of threads as it was, whatever a test sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def expected(name: str, dtype: torch.dtype) -> tuple[Step, torch.Tensor]:
    """A case's step and what the oracle makes of it: the same for all instruction sets."""
    step = step_of(CASES[name], dtype)
    return step, oracle.attend(step, CASES[name].layer)


def run(step: Step, layer: LayerAttention) -> torch.Tensor:
    out = step.run(BODIES["cpu"], layer)
    assert out.dtype == step.query.dtype
    return out


def assert_agrees(step: Step, layer: LayerAttention, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(run(step, layer).double(), wanted, rtol=0, atol=ATTEND[step.query.dtype])


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype.itemsize == 4 else torch.int16)


@dtypes
@pytest.mark.parametrize("name", CASES)
def test_every_instruction_set_agrees_with_the_oracle(isa: str, dtype: torch.dtype, name: str) -> None:
    step, wanted = expected(name, dtype)
    assert_agrees(step, CASES[name].layer, wanted)


@cache
def step_with_heads(heads: int, dim: int, tier: Tier, dtype: torch.dtype, num_new: int) -> tuple[Step, torch.Tensor]:
    """A view of a past in one tier at two offsets, for a layer of one key-value head, and the oracle's answer."""
    pieces = settled((Piece(37, 0, 3), Piece(30, 40)), (tier,))
    step = oracle.build([(pieces, num_new)], Shape(num_heads=heads, num_kv_heads=1, key_dim=dim, value_dim=dim), dtype)
    return step, oracle.attend(step, heads_layer(dim))


def heads_layer(dim: int) -> LayerAttention:
    return LayerAttention(scale=dim**-0.5, rotation=rotation_of(dim))


@dtypes
@pytest.mark.parametrize("tier", [EXACT, INT8, INT4, Tier("fp8", "int4")], ids=str)
@pytest.mark.parametrize(
    ("heads", "num_new"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (16, 1), (17, 1), (3, 11), (1, 40)]
)
def test_any_number_of_rows_agrees(isa: str, dtype: torch.dtype, tier: Tier, heads: int, num_new: int) -> None:
    step, wanted = step_with_heads(heads, 64, tier, dtype, num_new)
    assert_agrees(step, heads_layer(64), wanted)


@dtypes
@pytest.mark.parametrize("tier", MANY, ids=str)
@pytest.mark.parametrize("dim", [8, 40, 80, 256])
def test_a_chunk_of_many_rows_agrees_for_any_dims(isa: str, dtype: torch.dtype, tier: Tier, dim: int) -> None:
    step, wanted = step_with_heads(2, dim, tier, dtype, 20)
    assert_agrees(step, heads_layer(dim), wanted)


@dtypes
@pytest.mark.parametrize("num_new", [1, 12])
@pytest.mark.parametrize("tier", [EXACT, INT8, INT4], ids=str)
def test_splits_of_a_long_view_merge_into_one_softmax(isa: str, dtype: torch.dtype, tier: Tier, num_new: int) -> None:
    """More tiles than one split holds, with the largest scores in any of them."""
    pieces = settled((Piece(700, 0), Piece(500, 700, -9), Piece(400, 1200)), (tier,))
    step = oracle.build([(pieces, num_new)], Shape(num_heads=2, num_kv_heads=1), dtype, size=1.5)
    layer = LayerAttention(scale=0.5, rotation=HALF, sinks=SINKS[:2])
    torch.testing.assert_close(
        run(step, layer).double(), oracle.attend(step, layer), rtol=0, atol=2 * ATTEND[step.query.dtype]
    )


@dtypes
def test_prefill_past_the_largest_split_merges(isa: str, dtype: torch.dtype) -> None:
    """Tiles of one key each: far more than 512 of them, so that a block of queries has two splits."""
    step = oracle.build([((Piece(600, 0, 0, (INT8,)),), 30)], Shape(num_heads=1, num_kv_heads=1), dtype, chunk=300)
    assert_agrees(step.in_single_slots(), PLAIN, oracle.attend(step, PLAIN))


@dtypes
def test_a_chunk_of_several_blocks_of_queries_agrees(isa: str, dtype: torch.dtype) -> None:
    step = oracle.build([((Piece(40, 0, 2, (INT8, INT4)),), 150)], Shape(num_heads=4, num_kv_heads=1), dtype)
    for layer in (replace(PLAIN, rotation=HALF), replace(PLAIN, rotation=HALF, window=37, softcap=4.0)):
        assert_agrees(step, layer, oracle.attend(step, layer))


@dtypes
def test_the_number_of_threads_changes_no_bit(isa: str, dtype: torch.dtype, one_thread: None) -> None:
    pieces = settled((Piece(600, 0), Piece(300, 600, -7), Piece(20, 900, 3)), MANY)
    sequences = [(pieces, 1), (pieces[1:], 70), ((), 1), (pieces[:1], 2)]
    step = oracle.build(sequences, Shape(num_heads=6, num_kv_heads=2, key_dim=64, value_dim=64), dtype)
    layer = LayerAttention(scale=0.125, rotation=rotation_of(64))
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found += [run(step, layer), run(step, layer)]
    assert all(torch.equal(bits(found[0]), bits(other)) for other in found[1:])


@dtypes
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(isa: str, dtype: torch.dtype) -> None:
    pieces = settled((Piece(300, 0), Piece(120, 300, -7)), MANY)
    step = oracle.build([(pieces, 1), (pieces, 40), (pieces, 1)], Shape(key_dim=64, value_dim=64), dtype)
    layer = LayerAttention(scale=0.125, rotation=rotation_of(64), window=200)
    together = run(step, layer)
    for view in step.batch.sequences:
        rows = slice(view.first_query, view.first_query + view.num_queries)
        alone = replace(
            step,
            query=step.query[rows],
            batch=type(step.batch)((replace(view, first_query=0),)),
        )
        assert torch.equal(bits(run(alone, layer)), bits(together[rows]))


pieces_of_any_kind = st.builds(
    Piece,
    st.integers(1, 40),
    st.integers(0, 60),
    st.sampled_from([0, 0, -300, -3, 2, 50]),
    st.lists(st.sampled_from(MANY), min_size=1, max_size=3).map(tuple),
)
shapes = st.builds(
    lambda kv_heads, group, key_dim, value_dim: Shape(
        num_heads=kv_heads * group, num_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim
    ),
    st.integers(1, 2),
    st.sampled_from([1, 2, 3, 5, 16]),
    st.sampled_from([8, 16, 24, 64, 96]),
    st.sampled_from([8, 16, 48, 64, 5]),
)


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(
        st.tuples(st.lists(pieces_of_any_kind, max_size=4), st.sampled_from([1, 1, 2, 7, 25])), min_size=1, max_size=3
    ),
    shape=shapes,
    softcap=st.sampled_from([None, None, 3.0]),
    window=st.none() | st.integers(1, 60),
    rotation=st.sampled_from([HALF, INTERLEAVED, PARTIAL_TAIL, None]),
    dtype=st.sampled_from(DTYPES),
    chunk=st.sampled_from([1, 5, 16, 17, 40]),
    seed=st.integers(0, 99),
)
def test_any_batch_agrees_with_the_oracle_on_every_instruction_set(
    sequences: list[tuple[list[Piece], int]],
    shape: Shape,
    softcap: float | None,
    window: int | None,
    rotation: Rotation | None,
    dtype: torch.dtype,
    chunk: int,
    seed: int,
) -> None:
    layer = LayerAttention(
        scale=shape.key_dim**-0.5,
        softcap=softcap,
        window=window,
        rotation=rotation,
    )
    step = oracle.build(sequences, shape, dtype, chunk=chunk, seed=seed)
    wanted = oracle.attend(step, layer)
    try:
        for isa in cpu.isas():
            cpu.use_isa(isa)
            assert_agrees(step, layer, wanted)
    finally:
        cpu.use_isa(None)
