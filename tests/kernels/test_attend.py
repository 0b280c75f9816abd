"""Conformance: every attention body against an oracle in float64, in every edge case."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import oracle
from tests.kernels.oracle import CPU, Piece, Shape
from tests.tolerances import ATTEND

from turnkv.cache import Run
from turnkv.kernels import BODIES, LayerAttention, Rotation, SequenceView
from turnkv.kernels.reference import QUERY_BLOCK

FREQUENCIES = torch.tensor([1.0, 0.3, 0.05, 0.004])
HALF = Rotation(FREQUENCIES, "half", 0)
INTERLEAVED = Rotation(FREQUENCIES, "interleaved", 0)
PARTIAL_HEAD = Rotation(FREQUENCIES[:2], "half", 0)
PARTIAL_TAIL = Rotation(FREQUENCIES[1:3], "interleaved", 4)
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])
SHAPE = Shape()
PLAIN = LayerAttention(scale=8**-0.5)
MOVED = (Piece(7, 0, -3), Piece(9, 4, 5), Piece(4, 20), Piece(5, 24, -3), Piece(3, 40, 300))
"""Offsets of either sign, one of them twice, positions with gaps and shared ones."""


@dataclass(frozen=True, kw_only=True)
class Case:
    sequences: Sequence[tuple[Sequence[Piece], int]]
    layer: LayerAttention = PLAIN
    shape: Shape = SHAPE
    chunk: int = 16


CASES = {
    "one key": Case(sequences=[((), 1)]),
    "one past key": Case(sequences=[((Piece(1, 0),), 1)]),
    "only new tokens": Case(sequences=[((), 6)]),
    "a chunk behind a past": Case(sequences=[((Piece(20, 0),), 5)]),
    "a token behind a past": Case(sequences=[((Piece(20, 0),), 1)]),
    **{f"{n} past keys": Case(sequences=[((Piece(n, 0),), 2)]) for n in (15, 16, 17)},
    **{f"{n} new keys": Case(sequences=[((Piece(3, 0),), n)]) for n in (15, 16, 17)},
    **{
        f"{heads} query heads on {kv_heads}": Case(
            sequences=[(MOVED, 3)],
            layer=replace(PLAIN, rotation=HALF),
            shape=Shape(num_heads=heads, num_kv_heads=kv_heads),
        )
        for heads, kv_heads in ((3, 3), (1, 1), (6, 2), (3, 1), (8, 1), (16, 2))
    },
    "another scale": Case(sequences=[((Piece(20, 0),), 5)], layer=LayerAttention(scale=1.3)),
    "a soft cap": Case(sequences=[((Piece(20, 0),), 5)], layer=LayerAttention(scale=3.0, softcap=2.0)),
    "sinks": Case(sequences=[((Piece(20, 0),), 5)], layer=replace(PLAIN, sinks=SINKS)),
    "sinks and one key": Case(sequences=[((), 1)], layer=replace(PLAIN, sinks=SINKS)),
    **{
        f"a window of {window}, {new} new": Case(
            sequences=[((Piece(8, 0), Piece(9, 15)), new)], layer=replace(PLAIN, window=window), chunk=4
        )
        for window in (1, 3, 12, 1000)
        for new in (1, 5, 17)
    },
    "a window and shared positions": Case(
        sequences=[((Piece(6, 0), Piece(5, 7, 3), Piece(6, 6, -2), Piece(4, 12, 3)), 4)],
        layer=replace(PLAIN, window=8, rotation=HALF, sinks=SINKS),
    ),
    "a window that hides a whole group": Case(
        sequences=[((Piece(6, 0, 9), Piece(6, 6)), 6)], layer=replace(PLAIN, window=8, rotation=HALF)
    ),
    "more new tokens than a block and a window": Case(
        sequences=[((Piece(5, 0),), QUERY_BLOCK + 2)],
        layer=replace(PLAIN, window=3),
        shape=Shape(num_heads=2, num_kv_heads=1),
    ),
    **{
        f"offsets, {name}": Case(sequences=[(MOVED, 4)], layer=replace(PLAIN, rotation=rotation))
        for name, rotation in {
            "rotated by halves": HALF,
            "rotated interleaved": INTERLEAVED,
            "the first dims rotated": PARTIAL_HEAD,
            "the last dims rotated": PARTIAL_TAIL,
            "no rotation": None,
        }.items()
    },
    "offsets and one new token": Case(sequences=[(MOVED, 1)], layer=replace(PLAIN, rotation=HALF)),
    "offsets everywhere but the new": Case(sequences=[((Piece(9, 2, 2),), 3)], layer=replace(PLAIN, rotation=HALF)),
    "a run for every token": Case(sequences=[(MOVED, 5)], layer=replace(PLAIN, rotation=HALF), chunk=1),
    "an empty view": Case(sequences=[((), 0), ((), 2)]),
    "a ragged batch": Case(
        sequences=[((), 1), (MOVED, 1), ((Piece(16, 0),), 17), ((Piece(3, 0, 8), Piece(1, 90)), 2)],
        layer=replace(PLAIN, rotation=HALF),
    ),
    "narrower values": Case(sequences=[(MOVED, 3)], layer=replace(PLAIN, rotation=HALF), shape=Shape(value_dim=5)),
    "wider values": Case(sequences=[(MOVED, 3)], layer=replace(PLAIN, rotation=HALF), shape=Shape(value_dim=12)),
    "everything at once": Case(
        sequences=[(MOVED, 19), ((Piece(7, 3),), 1), (MOVED[1:3], 1)],
        layer=LayerAttention(scale=0.7, softcap=5.0, window=11, sinks=SINKS, rotation=INTERLEAVED),
        chunk=3,
    ),
    "all but the soft cap": Case(
        sequences=[(MOVED, 19), ((Piece(7, 3),), 1), (MOVED[1:3], 1)],
        layer=LayerAttention(scale=0.7, window=11, sinks=SINKS, rotation=PARTIAL_TAIL),
        chunk=3,
    ),
}

bodies = pytest.mark.parametrize("body", sorted(BODIES))
dtypes = pytest.mark.parametrize("dtype", ATTEND, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_agrees(body: str, batch: oracle.Batch, layer: LayerAttention) -> None:
    out = BODIES[body](batch.query, batch.keys, batch.values, batch.views, layer)
    assert out.dtype == batch.query.dtype
    torch.testing.assert_close(out.double(), oracle.attend(batch, layer), rtol=0, atol=ATTEND[batch.query.dtype])


@bodies
@dtypes
@pytest.mark.parametrize("name", CASES)
def test_a_body_agrees_with_the_oracle(body: str, dtype: torch.dtype, name: str) -> None:
    case = CASES[name]
    batch = oracle.build(case.sequences, case.shape, dtype, chunk=case.chunk)
    assert_agrees(body, batch, case.layer)


@bodies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_window_may_hide_more_keys_than_the_fused_kernel_reads_at_once(body: str, dtype: torch.dtype) -> None:
    batch = oracle.build([((Piece(5, 0, 2),), 600)], Shape(num_heads=1, num_kv_heads=1), dtype)
    assert_agrees(body, batch, replace(PLAIN, window=3, rotation=HALF))


@bodies
@dtypes
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_a_query_without_keys_gets_zeros(body: str, dtype: torch.dtype, sinks: torch.Tensor | None) -> None:
    batch = oracle.build([((Piece(3, 0),), 2)], SHAPE, dtype)
    views = [SequenceView((), 0, 1, CPU), replace(batch.views[0], first_query=1, _plans={})]
    query = torch.cat([batch.query[:1], batch.query])
    layer = replace(PLAIN, sinks=sinks)
    out = BODIES[body](query, batch.keys, batch.values, views, layer)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    torch.testing.assert_close(out[1:].double(), oracle.attend(batch, layer), rtol=0, atol=ATTEND[dtype])


@bodies
@dtypes
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)], ids=str)
def test_the_order_of_dims_in_memory_does_not_matter(body: str, dtype: torch.dtype, order: tuple[int, ...]) -> None:
    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        back = [order.index(dim) for dim in range(3)]
        return tensor.permute(order).contiguous().permute(back)

    batch = oracle.build([(MOVED, 3), ((Piece(20, 0),), 1), ((), 4)], SHAPE, dtype)
    strided = replace(batch, query=laid_out(batch.query), keys=laid_out(batch.keys), values=laid_out(batch.values))
    assert_agrees(body, strided, replace(PLAIN, rotation=HALF))
    assert_agrees(body, strided, replace(PLAIN, window=6, rotation=HALF))


@bodies
@dtypes
@pytest.mark.parametrize("pieces", [(Piece(20, 0),), MOVED], ids=["in place", "moved"])
@pytest.mark.parametrize("window", [None, 4])
def test_huge_logits_stay_finite_and_inside_the_values(
    body: str, dtype: torch.dtype, pieces: Sequence[Piece], window: int | None
) -> None:
    batch = oracle.build([(pieces, 5)], SHAPE, dtype)
    huge = replace(batch, query=batch.query * 60, keys=batch.keys * 60)
    slots = [key.slot for key in batch.sequences[0].keys]
    logits = torch.einsum("thd,hsd->ths", huge.query.double()[:, ::2], huge.keys[:, slots].double())
    assert logits.max() > 1e4
    assert logits.min() < -1e4
    layer = LayerAttention(scale=1.0, window=window, rotation=HALF, sinks=SINKS * 1e4)
    out = BODIES[body](huge.query, huge.keys, huge.values, huge.views, layer)
    assert out.isfinite().all()
    assert out.abs().max() <= batch.values[:, slots].abs().max()
    if pieces is not MOVED:  # a rotated query is rounded, and 16 bits are then too few for such logits
        torch.testing.assert_close(out.double(), oracle.attend(huge, layer), rtol=0, atol=2 * ATTEND[dtype] + 1e-3)


@bodies
def test_far_offsets_are_as_exact_as_the_angle_in_float32(body: str) -> None:
    batch = oracle.build([((Piece(9, 0, 100_000), Piece(9, 9, -100_000)), 2)], SHAPE, torch.float32)
    layer = replace(PLAIN, rotation=HALF)
    out = BODIES[body](batch.query, batch.keys, batch.values, batch.views, layer)
    assert (out.double() - oracle.attend(batch, layer)).abs().max() < 100_000 * 2**-24
    exact = replace(batch, query=batch.query.double(), keys=batch.keys.double(), values=batch.values.double())
    out = BODIES[body](exact.query, exact.keys, exact.values, exact.views, layer)
    assert (out - oracle.attend(exact, layer)).abs().max() < 1e-9


@bodies
def test_inputs_are_left_as_they_are(body: str) -> None:
    batch = oracle.build([(MOVED, 3)], SHAPE, torch.float32)
    copies = [tensor.clone() for tensor in (batch.query, batch.keys, batch.values)]
    BODIES[body](batch.query, batch.keys, batch.values, batch.views, replace(PLAIN, rotation=HALF, window=9))
    for tensor, copy in zip((batch.query, batch.keys, batch.values), copies, strict=True):
        assert torch.equal(tensor.nan_to_num(nan=7.0), copy.nan_to_num(nan=7.0))


@bodies
def test_a_view_cut_into_single_slots_gives_the_same(body: str) -> None:
    batch = oracle.build([(MOVED, 4)], SHAPE, torch.float64)
    (view,) = batch.views
    singles = tuple(Run(r.slot + i, 1, r.position + i, r.offset) for r in view.runs for i in range(r.length))
    cut = replace(batch, views=[SequenceView(singles, 0, 4, CPU)])
    for window in (None, 5):
        layer = replace(PLAIN, rotation=HALF, window=window)
        whole = BODIES[body](batch.query, batch.keys, batch.values, batch.views, layer)
        parts = BODIES[body](cut.query, cut.keys, cut.values, cut.views, layer)
        torch.testing.assert_close(parts, whole, rtol=0, atol=ATTEND[torch.float64])


pieces = st.builds(Piece, st.integers(1, 18), st.integers(0, 40), st.sampled_from([0, 0, -300, -3, -1, 1, 2, 50]))
sequences = st.lists(st.tuples(st.lists(pieces, max_size=5), st.integers(1, 18)), min_size=1, max_size=3)
layers = st.builds(
    LayerAttention,
    scale=st.sampled_from([8**-0.5, 1.0, 0.1]),
    softcap=st.sampled_from([None, None, 3.0]),
    window=st.none() | st.integers(1, 40),
    sinks=st.sampled_from([None, SINKS]),
    rotation=st.sampled_from([HALF, INTERLEAVED, PARTIAL_HEAD, PARTIAL_TAIL]),
)


@bodies
@settings(max_examples=60, deadline=None)
@given(
    sequences=sequences,
    layer=layers,
    num_kv_heads=st.sampled_from([1, 2, 4]),
    value_dim=st.sampled_from([8, 8, 3]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    chunk=st.integers(1, 17),
    seed=st.integers(0, 99),
)
def test_any_batch_agrees_with_the_oracle(
    body: str,
    sequences: list[tuple[list[Piece], int]],
    layer: LayerAttention,
    num_kv_heads: int,
    value_dim: int,
    dtype: torch.dtype,
    chunk: int,
    seed: int,
) -> None:
    shape = Shape(num_kv_heads=num_kv_heads, value_dim=value_dim)
    assert_agrees(body, oracle.build(sequences, shape, dtype, chunk=chunk, seed=seed), layer)
