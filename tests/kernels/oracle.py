"""Attention and rotation by brute force in float64, and the builder of steps for it.

Nothing here shares code or method with turnkv's bodies: keys are rotated, not queries; visibility is decided key by
key; what a stored code means is kept aside when it is stored, so that no tile is ever read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from turnkv.cache import KVStorage, LayerKV, LayerShape, TierPlan, TileGroup, TileLayout
from turnkv.cache.formats import Format
from turnkv.cache.tiles import TileCodes
from turnkv.config import PAGE_TOKENS
from turnkv.kernels import AttentionBody, Batch, LayerAttention, Rotation, SequenceView
from turnkv.types import EXACT, Tier

CPU = torch.device("cpu")


def rotation_matrix(rotation: Rotation, dim: int, distance: int) -> Tensor:
    """[dim, dim], float64: pair by pair."""
    matrix = torch.eye(dim, dtype=torch.float64)
    num_pairs = len(rotation.inverse_frequencies)
    for pair, frequency in enumerate(rotation.inverse_frequencies.tolist()):
        if rotation.layout == "half":
            a, b = rotation.first_dim + pair, rotation.first_dim + pair + num_pairs
        else:
            a, b = rotation.first_dim + 2 * pair, rotation.first_dim + 2 * pair + 1
        cos, sin = math.cos(frequency * distance), math.sin(frequency * distance)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = cos, -sin, sin, cos
    return matrix


@dataclass(frozen=True)
class Piece:
    """Past keys that were computed together: `length` keys from virtual position `position` on.

    A piece is stored in chunks, and chunk i of it in the i-th of `tiers`, which start over when they run out.
    """

    length: int
    position: int
    offset: int = 0
    tiers: tuple[Tier, ...] = (EXACT,)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer."""

    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8


@dataclass(frozen=True)
class KnownSequence:
    """One sequence as the oracle sees it. N keys, in no special order."""

    keys: Tensor
    """[G, N, D], float64, as computed: not moved by their offsets."""
    values: Tensor
    """[G, N, E], float64."""
    positions: list[int]
    offsets: list[int]
    first_position: int
    num_new: int


@dataclass(frozen=True)
class Step:
    """Inputs of a body, and the same as the oracle knows it."""

    query: Tensor
    kv: LayerKV
    batch: Batch
    sequences: list[KnownSequence]

    def run(self, body: AttentionBody, layer: LayerAttention) -> Tensor:
        """What a body makes of the step. Nothing that one body prepared is left for the next."""
        return body(self.query, self.kv, Batch(self.batch.sequences), layer)

    def with_query(self, query: Tensor) -> "Step":
        """The step with other queries of the same shape."""
        return replace(self, query=query)

    def in_single_slots(self) -> "Step":
        """The step with a tile of its own for every key."""
        return replace(self, batch=Batch(tuple(_in_single_slots(view) for view in self.batch.sequences)))


@dataclass(frozen=True)
class _Chunk:
    """Keys in consecutive slots of one tier."""

    sequence: int
    tier: Tier
    offset: int
    position: int
    length: int


def build(
    sequences: Sequence[tuple[Sequence[Piece], int]],
    shape: Shape,
    dtype: torch.dtype,
    *,
    chunk: int = PAGE_TOKENS,
    size: float = 1.0,
    seed: int = 0,
) -> Step:
    """Place the keys of sequences `(past pieces, newest tokens)` in memory and draw random contents.

    A piece is cut every `chunk` tokens, and the chunks of a tier lie scattered in random order, so that pages are
    shared by chunks of any sequence. Slots that hold no key are poison: NaN, or codes at their limit times NaN; and so
    are the positions of slots that a group's mask leaves out. The newest tokens follow one past the furthest piece
    (one of length 0 makes a gap). Queries and keys are unit normal times `size`.
    """
    random = torch.Generator().manual_seed(seed)
    chunks, firsts = _cut(sequences, chunk)
    starts, num_pages = _scattered(chunks, random)
    tiers = {EXACT: 1} | num_pages
    layers = [LayerShape(num_heads=shape.num_kv_heads, key_dim=shape.key_dim, value_dim=shape.value_dim)]
    kv = KVStorage({tier: TierPlan.of(tier, layers, dtype) for tier in tiers}, tiers, CPU).layers[0]
    memories = {tier: _Memory(kv.layouts[tier], count) for tier, count in tiers.items()}
    views, known, row = [], [], 0
    for index, (_, num_new) in enumerate(sequences):
        own = [(start, part) for start, part in zip(starts, chunks, strict=True) if part.sequence == index]
        keys, values = [], []
        for start, part in own:
            new_keys = torch.randn(shape.num_kv_heads, part.length, shape.key_dim, generator=random) * size
            new_values = torch.randn(shape.num_kv_heads, part.length, shape.value_dim, generator=random)
            stored = memories[part.tier].store(start, new_keys.to(dtype), new_values.to(dtype))
            keys.append(stored[0])
            values.append(stored[1])
        views.append(SequenceView(_groups(own, random), row, num_new, firsts[index]))
        known.append(
            KnownSequence(
                torch.cat(keys, dim=1) if keys else torch.empty(shape.num_kv_heads, 0, shape.key_dim).double(),
                torch.cat(values, dim=1) if values else torch.empty(shape.num_kv_heads, 0, shape.value_dim).double(),
                [part.position + i for _, part in own for i in range(part.length)],
                [part.offset for _, part in own for _ in range(part.length)],
                firsts[index],
                num_new,
            )
        )
        row += num_new
    for tier, memory in memories.items():
        kv.arenas[tier][:] = kv.layouts[tier].pack(memory.codes)
    query = (torch.randn(row, shape.num_heads, shape.key_dim, generator=random) * size).to(dtype)
    return Step(query, kv, Batch(tuple(views)), known)


def _cut(sequences: Sequence[tuple[Sequence[Piece], int]], chunk: int) -> tuple[list[_Chunk], list[int]]:
    """All chunks, those of the newest tokens last in each sequence, and the position where those begin."""
    chunks, firsts = [], []
    for index, (pieces, num_new) in enumerate(sequences):
        firsts.append(max((piece.position + piece.length for piece in pieces), default=0))
        for piece in (*pieces, Piece(num_new, firsts[-1])):
            for count, start in enumerate(range(0, piece.length, chunk)):
                tier = piece.tiers[count % len(piece.tiers)]
                length = min(chunk, piece.length - start)
                chunks.append(_Chunk(index, tier, piece.offset, piece.position + start, length))
    return chunks, firsts


def _scattered(chunks: Sequence[_Chunk], random: torch.Generator) -> tuple[list[int], dict[Tier, int]]:
    """First slot of each chunk, and the pages of each tier that is used; the last page is empty."""
    starts = [0] * len(chunks)
    free: dict[Tier, int] = {}
    for place in torch.randperm(len(chunks), generator=random).tolist():
        tier = chunks[place].tier
        starts[place] = free.get(tier, 1)
        free[tier] = starts[place] + chunks[place].length + int(torch.randint(0, 3, (), generator=random))
    return starts, {tier: slot // PAGE_TOKENS + 2 for tier, slot in free.items()}


class _Memory:
    """Codes of a tier's slots before they are packed."""

    def __init__(self, layout: TileLayout, num_pages: int) -> None:
        self._formats = (layout.key_format, layout.value_format)
        keys = _poison(layout.key_format, (num_pages, layout.shape.num_heads), layout.shape.key_dim, layout.dtype)
        values = _poison(layout.value_format, (num_pages, layout.shape.num_heads), layout.shape.value_dim, layout.dtype)
        self.codes = TileCodes(keys[0], values[0], keys[1], values[1])

    def store(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put vectors [G, N, D] and [G, N, E] into slots from `start` on; return what is stored as float64."""
        slots = torch.arange(start, start + keys.shape[1])
        meant = []
        parts = ((self.codes.keys, self.codes.key_scales, keys), (self.codes.values, self.codes.value_scales, values))
        for form, (all_codes, all_scales, vectors) in zip(self._formats, parts, strict=True):
            codes, scales = form.quantise(vectors)
            all_codes[slots // PAGE_TOKENS, :, slots % PAGE_TOKENS] = codes.transpose(0, 1)
            all_scales[slots // PAGE_TOKENS, :, slots % PAGE_TOKENS] = scales.transpose(0, 1)
            meant.append(form.read(codes, scales).double())
        return meant[0], meant[1]


def _poison(form: Format, pages: tuple[int, int], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [P, G, 16, D] and scales [P, G, 16, groups] that mean no number, or a huge one if a scale is ignored."""
    value = {"exact": math.nan, "int8": 127, "fp8": 0x7F, "int4": 15}[form.name]
    codes = torch.full((*pages, PAGE_TOKENS, dim), value, dtype=form.code_dtype(dtype))
    return codes, torch.full((*pages, PAGE_TOKENS, form.num_scales(dim)), torch.nan, dtype=torch.float16)


def _groups(chunks: Sequence[tuple[int, _Chunk]], random: torch.Generator) -> tuple[TileGroup, ...]:
    """The tiles of one sequence's chunks `(first slot, chunk)` by tier and offset, key by key."""
    found: dict[tuple[Tier, int], list[tuple[int, dict[int, int]]]] = {}
    for start, part in chunks:
        tiles = found.setdefault((part.tier, part.offset), [])
        for i in range(part.length):
            page, lane = divmod(start + i, PAGE_TOKENS)
            if not tiles or tiles[-1][0] != page:
                tiles.append((page, {}))
            tiles[-1][1][lane] = part.position + i
    return tuple(_group(tier, offset, tiles, random) for (tier, offset), tiles in found.items())


def _group(tier: Tier, offset: int, tiles: Sequence[tuple[int, dict[int, int]]], random: torch.Generator) -> TileGroup:
    """A group of tiles `(page, position by lane)`."""
    noise = torch.randint(-50, 100, (len(tiles), PAGE_TOKENS), generator=random, dtype=torch.int32)
    positions = noise.numpy().copy()
    for row, (_, lanes) in enumerate(tiles):
        for lane, position in lanes.items():
            positions[row, lane] = position
    return TileGroup(
        tier,
        offset,
        np.array([page for page, _ in tiles], dtype=np.int32),
        np.array([sum(1 << lane for lane in lanes) for _, lanes in tiles], dtype=np.uint16),
        positions,
    )


def _in_single_slots(view: SequenceView) -> SequenceView:
    groups = []
    for group in view.groups:
        places = [(i, lane) for i, mask in enumerate(group.masks.tolist()) for lane in range(16) if mask >> lane & 1]
        rows = [i for i, _ in places]
        masks = np.array([1 << lane for _, lane in places], dtype=np.uint16)
        groups.append(TileGroup(group.tier, group.offset, group.pages[rows], masks, group.positions[rows]))
    return replace(view, groups=tuple(groups))


def attend(step: Step, layer: LayerAttention) -> Tensor:
    """[T, H, E], float64: each query and head on its own, over an explicit list of keys."""
    num_heads, value_dim = step.query.shape[1], step.sequences[0].values.shape[-1]
    out = torch.zeros(step.query.shape[0], num_heads, value_dim, dtype=torch.float64)
    row = 0
    for sequence in step.sequences:
        moved = sequence.keys.clone()
        if layer.rotation is not None:
            for offset in set(sequence.offsets):
                matrix = rotation_matrix(layer.rotation, moved.shape[-1], offset)
                members = [place for place, own in enumerate(sequence.offsets) if own == offset]
                moved[:, members] = moved[:, members] @ matrix.T
        for at in range(sequence.first_position, sequence.first_position + sequence.num_new):
            seen = [
                place
                for place, position in enumerate(sequence.positions)
                if position <= at and (layer.window is None or position > at - layer.window)
            ]
            for head in range(num_heads if seen else 0):
                group = head * moved.shape[0] // num_heads
                logits = layer.scale * (moved[group, seen] @ step.query[row, head].double())
                if layer.softcap is not None:
                    logits = layer.softcap * torch.tanh(logits / layer.softcap)
                others = [] if layer.sinks is None else [float(layer.sinks[head])]
                highest = max([*logits.tolist(), *others])
                weights = torch.exp(logits - highest)
                total = float(weights.sum()) + sum(math.exp(other - highest) for other in others)
                out[row, head] = (weights / total) @ sequence.values[group, seen]
            row += 1
    return out
