"""Conformance: every attention body against an oracle in float64, in every edge case."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import oracle
from tests.kernels.cases import (
    BODY_DTYPES,
    CASES,
    HALF,
    INT4,
    INT8,
    INTERLEAVED,
    MOVED,
    PARTIAL_HEAD,
    PARTIAL_TAIL,
    PLAIN,
    SHAPE,
    SINKS,
    TIERS,
    assert_agrees,
    settled,
    step_of,
)
from tests.kernels.oracle import Piece, Shape
from tests.tolerances import ATTEND

from turnkv.kernels import BODIES, Batch, LayerAttention, SequenceView
from turnkv.types import EXACT, Tier

bodies = pytest.mark.parametrize("body", sorted(BODIES))
bodies_and_dtypes = pytest.mark.parametrize(
    ("body", "dtype"), BODY_DTYPES, ids=lambda value: str(value).removeprefix("torch.")
)
MANY = (EXACT, *TIERS)


@bodies_and_dtypes
@pytest.mark.parametrize("name", CASES)
def test_a_body_agrees_with_the_oracle(body: str, dtype: torch.dtype, name: str) -> None:
    assert_agrees(body, step_of(CASES[name], dtype), CASES[name].layer)


@bodies_and_dtypes
def test_a_window_may_hide_most_keys_of_a_long_chunk(body: str, dtype: torch.dtype) -> None:
    step = oracle.build([((Piece(5, 0, 2, (INT8,)),), 600)], Shape(num_heads=1, num_kv_heads=1), dtype)
    assert_agrees(body, step, replace(PLAIN, window=3, rotation=HALF))


@bodies_and_dtypes
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_a_query_without_keys_gets_zeros(body: str, dtype: torch.dtype, sinks: torch.Tensor | None) -> None:
    step = oracle.build([((Piece(3, 0, 0, (INT4,)),), 2)], SHAPE, dtype)
    (view,) = step.batch.sequences
    batch = Batch(
        (SequenceView((), 0, 1, 0), replace(view, first_query=1), replace(view, first_query=3, num_queries=0))
    )
    layer = replace(PLAIN, sinks=sinks)
    out = BODIES[body](torch.cat([step.query[:1], step.query]), step.kv, batch, layer)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    torch.testing.assert_close(out[1:].double(), oracle.attend(step, layer), rtol=0, atol=ATTEND[dtype])


@bodies_and_dtypes
@pytest.mark.parametrize("tier", [EXACT, INT8, INT4], ids=str)
def test_a_query_that_sees_none_of_the_keys_there_are_gets_zeros(body: str, dtype: torch.dtype, tier: Tier) -> None:
    step = oracle.build([((Piece(20, 0, 0, (tier,)),), 1)], SHAPE, dtype)
    (view,) = step.batch.sequences
    groups = tuple(group for group in view.groups if group.tier == tier)
    for first, window in ((90, 5), (-1, None)):
        batch = Batch((SequenceView(groups[:1], 0, 1, first),))
        out = BODIES[body](step.query, step.kv, batch, replace(PLAIN, window=window))
        assert torch.equal(out, torch.zeros_like(out))


@bodies_and_dtypes
@pytest.mark.parametrize("order", ["tokens first", "heads first", "inside a wider tensor", "heads of a wider tensor"])
def test_the_strides_of_the_query_do_not_matter(body: str, dtype: torch.dtype, order: str) -> None:
    step = oracle.build([(settled(MOVED, MANY), 3), ((Piece(20, 0),), 1), ((), 4)], SHAPE, dtype)
    query = step.query
    if "wider" in order:
        wide = torch.full((query.shape[0], 9, 24), torch.nan, dtype=dtype)
        wide[:, 2:6, 8:16] = query
        query = wide[:, 2:6, 8:16]
    if "heads" in order:
        query = query.transpose(0, 1).contiguous().transpose(0, 1)
    strided = step.with_query(query)
    assert_agrees(body, strided, replace(PLAIN, rotation=HALF))
    assert_agrees(body, strided, replace(PLAIN, window=6, rotation=HALF))


@bodies_and_dtypes
@pytest.mark.parametrize("pieces", [(Piece(20, 0),), MOVED], ids=["in place", "moved"])
@pytest.mark.parametrize("tier", MANY, ids=str)
@pytest.mark.parametrize("window", [None, 4])
def test_huge_logits_stay_finite_and_inside_the_values(
    body: str, dtype: torch.dtype, pieces: Sequence[Piece], tier: Tier, window: int | None
) -> None:
    huge = oracle.build([(settled(pieces, (tier,)), 5)], SHAPE, dtype, size=60)
    (known,) = huge.sequences
    logits = torch.einsum("thd,hsd->ths", huge.query.double()[:, ::2], known.keys)
    assert logits.max() > 1e4
    assert logits.min() < -1e4
    layer = LayerAttention(scale=1.0, window=window, rotation=HALF, sinks=SINKS * 1e4)
    out = huge.run(BODIES[body], layer)
    assert out.isfinite().all()
    assert out.abs().max() <= known.values.abs().max() * (1 + 2 * torch.finfo(dtype).eps)
    if pieces is not MOVED:  # a rotated query is rounded, and 16 bits are then too few for such logits
        torch.testing.assert_close(out.double(), oracle.attend(huge, layer), rtol=0, atol=2 * ATTEND[dtype] + 1e-3)


@bodies
@pytest.mark.parametrize("tier", MANY, ids=str)
def test_far_offsets_are_as_exact_as_the_angle_in_float32(body: str, tier: Tier) -> None:
    pieces = settled((Piece(9, 0, 100_000), Piece(9, 9, -100_000)), (tier,))
    layer = replace(PLAIN, rotation=HALF)
    step = oracle.build([(pieces, 2)], SHAPE, torch.float32)
    assert (step.run(BODIES[body], layer).double() - oracle.attend(step, layer)).abs().max() < 100_000 * 2**-24
    if body == "reference":
        step = oracle.build([(pieces, 2)], SHAPE, torch.float64)
        assert (step.run(BODIES[body], layer) - oracle.attend(step, layer)).abs().max() < 1e-9


@bodies
def test_inputs_are_left_as_they_are(body: str) -> None:
    step = oracle.build([(settled(MOVED, MANY), 3)], SHAPE, torch.float32)
    query, arenas = step.query.clone(), {tier: arena.clone() for tier, arena in step.kv.arenas.items()}
    groups = [group for view in step.batch.sequences for group in view.groups]
    arrays = [(array, array.copy()) for group in groups for array in (group.pages, group.masks, group.positions)]
    step.run(BODIES[body], replace(PLAIN, rotation=HALF, window=9))
    assert torch.equal(step.query, query)
    assert all(torch.equal(step.kv.arenas[tier], arena) for tier, arena in arenas.items())
    assert all((array == copy).all() for array, copy in arrays)


@bodies_and_dtypes
@pytest.mark.parametrize("window", [None, 5])
def test_a_view_cut_into_single_slots_gives_the_same(body: str, dtype: torch.dtype, window: int | None) -> None:
    step = oracle.build([(settled(MOVED, MANY), 4)], SHAPE, dtype)
    layer = replace(PLAIN, rotation=HALF, window=window)
    assert_agrees(body, step.in_single_slots(), layer)
    whole, parts = step.run(BODIES[body], layer), step.in_single_slots().run(BODIES[body], layer)
    torch.testing.assert_close(parts, whole, rtol=0, atol=ATTEND[dtype])


@bodies
def test_the_order_of_groups_and_tiles_does_not_matter(body: str) -> None:
    step = oracle.build([(settled(MOVED, MANY), 4)], SHAPE, torch.float32, chunk=3)
    (view,) = step.batch.sequences
    turned = [
        replace(g, pages=g.pages[::-1].copy(), masks=g.masks[::-1].copy(), positions=g.positions[::-1].copy())
        for g in view.groups[::-1]
    ]
    assert_agrees(
        body,
        replace(step, batch=Batch((replace(view, groups=tuple(turned)),))),
        replace(PLAIN, rotation=HALF, window=9),
    )


@bodies
def test_one_batch_serves_layer_after_layer(body: str) -> None:
    """What a body prepares once for a step must not depend on the layer that came first."""
    step = oracle.build([(settled(MOVED, MANY), 4), ((), 2)], SHAPE, torch.float32)
    for layer in (
        PLAIN,
        replace(PLAIN, rotation=HALF, window=4),
        replace(PLAIN, rotation=INTERLEAVED, sinks=SINKS),
        replace(PLAIN, softcap=3.0, window=9),
        PLAIN,
    ):
        out = BODIES[body](step.query, step.kv, step.batch, layer)
        torch.testing.assert_close(out.double(), oracle.attend(step, layer), rtol=0, atol=ATTEND[torch.float32])


tiers = st.lists(st.sampled_from(MANY), min_size=1, max_size=3).map(tuple)
pieces = st.builds(
    Piece, st.integers(1, 18), st.integers(0, 40), st.sampled_from([0, 0, -300, -3, -1, 1, 2, 50]), tiers
)
sequences = st.lists(st.tuples(st.lists(pieces, max_size=5), st.integers(1, 18)), min_size=1, max_size=3)
layers = st.builds(
    LayerAttention,
    scale=st.sampled_from([8**-0.5, 1.0, 0.1]),
    softcap=st.sampled_from([None, None, 3.0]),
    window=st.none() | st.integers(1, 40),
    sinks=st.sampled_from([None, SINKS]),
    rotation=st.sampled_from([HALF, INTERLEAVED, PARTIAL_HEAD, PARTIAL_TAIL]),
)


@settings(max_examples=120, deadline=None)
@given(
    sequences=sequences,
    layer=layers,
    num_kv_heads=st.sampled_from([1, 2, 4]),
    value_dim=st.sampled_from([8, 8, 3]),
    body_and_dtype=st.sampled_from([pair for pair in BODY_DTYPES if pair[1].itemsize >= 4]),
    chunk=st.integers(1, 17),
    seed=st.integers(0, 99),
)
def test_any_batch_agrees_with_the_oracle(
    sequences: list[tuple[list[Piece], int]],
    layer: LayerAttention,
    num_kv_heads: int,
    value_dim: int,
    body_and_dtype: tuple[str, torch.dtype],
    chunk: int,
    seed: int,
) -> None:
    shape = Shape(num_kv_heads=num_kv_heads, value_dim=value_dim)
    body, dtype = body_and_dtype
    assert_agrees(body, oracle.build(sequences, shape, dtype, chunk=chunk, seed=seed), layer)
