"""The table of cases that every attention body must get right."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tests.kernels import oracle
from tests.kernels.oracle import Piece, Shape, Step
from tests.tolerances import ATTEND

from turnkv.kernels import BODIES, LayerAttention, Rotation
from turnkv.kernels.reference import QUERY_BLOCK
from turnkv.types import EXACT, Tier

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

INT8, FP8, INT4 = (Tier(name, name) for name in ("int8", "fp8", "int4"))
TIERS = (
    INT8,
    FP8,
    INT4,
    Tier("int8", "int4"),
    Tier("int4", "int8"),
    Tier("exact", "int4"),
    Tier("int8", "exact"),
    Tier("fp8", "int8"),
    Tier("int4", "fp8"),
)
"""Quantised tiers: each format on either side."""
DIMS = (8, 16, 64, 80, 96)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step and a layer. Each sequence is `(past pieces, newest tokens)`."""

    sequences: Sequence[tuple[Sequence[Piece], int]]
    layer: LayerAttention = PLAIN
    shape: Shape = SHAPE
    chunk: int = 16


def rotation_of(num_dims: int) -> Rotation:
    """All of a head's dims rotated."""
    return Rotation(10_000 ** -(torch.arange(num_dims // 2) / (num_dims / 2)), "half", 0)


_EXACT_CASES = {
    "one key": Case(sequences=[((), 1)]),
    "one past key": Case(sequences=[((Piece(1, 0),), 1)]),
    "only new tokens": Case(sequences=[((), 6)]),
    "a chunk behind a past": Case(sequences=[((Piece(20, 0),), 5)]),
    "a chunk behind a gap": Case(sequences=[((Piece(20, 0), Piece(0, 31)), 5)], layer=replace(PLAIN, window=14)),
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
    "a chunk for every token": Case(sequences=[(MOVED, 5)], layer=replace(PLAIN, rotation=HALF), chunk=1),
    "an empty view": Case(sequences=[((), 0), ((), 2)]),
    "a ragged batch": Case(
        sequences=[((), 1), (MOVED, 1), ((Piece(16, 0),), 17), ((Piece(3, 0, 8), Piece(1, 90)), 2)],
        layer=replace(PLAIN, rotation=HALF),
    ),
    **{
        f"values of {dim}": Case(
            sequences=[(MOVED, 3)], layer=replace(PLAIN, rotation=HALF), shape=Shape(value_dim=dim)
        )
        for dim in (1, 5, 12, 33)
    },
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


def settled(pieces: Sequence[Piece], tiers: Sequence[Tier]) -> tuple[Piece, ...]:
    """The pieces in these tiers, each beginning with another one, and the chunks of each in turns."""
    return tuple(
        replace(piece, tiers=(*tiers[i % len(tiers) :], *tiers[: i % len(tiers)])) for i, piece in enumerate(pieces)
    )


def _mixed(case: Case) -> Case:
    sequences = [(settled(pieces, (INT8, EXACT, INT4, *TIERS[3:], FP8)), new) for pieces, new in case.sequences]
    return replace(case, sequences=sequences)


CASES = {
    **_EXACT_CASES,
    **{
        f"{name}, in many tiers": _mixed(case)
        for name, case in _EXACT_CASES.items()
        if any(pieces for pieces, _ in case.sequences)
    },
    **{
        f"{tier}, {dim} dims": Case(
            sequences=[(settled(MOVED, (tier,)), 3), (settled((Piece(17, 0), Piece(16, 17, 2)), (tier, EXACT)), 1)],
            layer=LayerAttention(scale=dim**-0.5, rotation=rotation_of(dim), sinks=SINKS),
            shape=Shape(key_dim=dim, value_dim=dim),
            chunk=5,
        )
        for tier in (EXACT, *TIERS)
        for dim in DIMS
    },
    **{
        f"{tier}, values of {value_dim} to keys of {dim}": Case(
            sequences=[(settled(MOVED, (tier,)), 2)],
            layer=LayerAttention(scale=dim**-0.5, rotation=INTERLEAVED),
            shape=Shape(key_dim=dim, value_dim=value_dim),
            chunk=7,
        )
        for tier in (EXACT, *TIERS)
        for dim, value_dim in ((8, 5), (64, 24), (80, 128))
    },
    "a tier for every other token": Case(
        sequences=[((Piece(40, 0, 0, (INT8, EXACT)), Piece(30, 50, -4, (INT4, INT8))), 2)],
        layer=replace(PLAIN, rotation=HALF),
        chunk=1,
    ),
    "long pasts in every tier": Case(
        sequences=[(settled((Piece(100, 0), Piece(90, 100), Piece(110, 200, -7)), (tier,)), 1) for tier in TIERS],
        layer=replace(PLAIN, rotation=HALF, window=240),
    ),
}
"""By name. In all but the pieces' tiers, most come twice: exact, and in many tiers."""

BODY_DTYPES = [
    (body, dtype) for body in sorted(BODIES) for dtype in ATTEND if body == "reference" or dtype.itemsize < 8
]
"""What a body is asked for: float64 is for the reference alone."""


def step_of(case: Case, dtype: torch.dtype, seed: int = 0) -> Step:
    """The case's step with random contents."""
    return oracle.build(case.sequences, case.shape, dtype, chunk=case.chunk, seed=seed)


def assert_agrees(body: str, step: Step, layer: LayerAttention) -> None:
    """A body's output of a step is the oracle's, within the table's tolerance."""
    out = step.run(BODIES[body], layer)
    assert out.dtype == step.query.dtype
    torch.testing.assert_close(out.double(), oracle.attend(step, layer), rtol=0, atol=ATTEND[step.query.dtype])
