"""Attention and rotation by brute force in float64, and the builder of cases for it.

Nothing here shares code or method with turnkv: keys are rotated, not queries; visibility is decided key by key.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnkv.cache import Run
from turnkv.config import PAGE_TOKENS
from turnkv.kernels import LayerAttention, Rotation, SequenceView

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
class Key:
    """One key that the oracle knows of."""

    slot: int
    position: int
    offset: int


@dataclass(frozen=True)
class KnownSequence:
    """One sequence as the oracle sees it: keys in order, of which the last `num_new` belong to its queries."""

    keys: tuple[Key, ...]
    num_new: int


@dataclass(frozen=True)
class Piece:
    """Past keys that were computed together: `length` keys from virtual position `position` on."""

    length: int
    position: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer."""

    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8


@dataclass(frozen=True)
class Batch:
    """Inputs of a body, and the same as the oracle knows it."""

    query: Tensor
    keys: Tensor
    values: Tensor
    views: list[SequenceView]
    sequences: list[KnownSequence]


def build(
    sequences: Sequence[tuple[Sequence[Piece], int]],
    shape: Shape,
    dtype: torch.dtype,
    *,
    chunk: int = PAGE_TOKENS,
    seed: int = 0,
) -> Batch:
    """Place the keys of sequences `(past pieces, newest tokens)` in memory and draw random contents.

    A piece is cut every `chunk` tokens, and the parts lie scattered in random order. Every slot that holds no key
    is NaN: whoever reads it is found out.
    """
    random = torch.Generator().manual_seed(seed)
    parts: list[tuple[int, int, int, int]] = []
    for index, (pieces, num_new) in enumerate(sequences):
        end = max((piece.position + piece.length for piece in pieces), default=0)
        for piece in (*pieces, Piece(num_new, end)):
            for start in range(0, piece.length, chunk):
                length = min(chunk, piece.length - start)
                parts.append((index, length, piece.position + start, piece.offset))
    starts = [0] * len(parts)
    slot = 1
    for place in torch.randperm(len(parts), generator=random).tolist():
        starts[place] = slot
        slot += parts[place][1] + int(torch.randint(0, 3, (), generator=random))
    keys = torch.full((shape.num_kv_heads, slot + 1, shape.key_dim), torch.nan, dtype=dtype)
    values = torch.full((shape.num_kv_heads, slot + 1, shape.value_dim), torch.nan, dtype=dtype)
    views, known, row = [], [], 0
    for index, (_, num_new) in enumerate(sequences):
        own = [(start, part) for start, part in zip(starts, parts, strict=True) if part[0] == index]
        runs = tuple(Run(start, length, position, offset) for start, (_, length, position, offset) in own)
        listed = tuple(Key(r.slot + i, r.position + i, r.offset) for r in runs for i in range(r.length))
        views.append(SequenceView(runs, row, num_new, CPU))
        known.append(KnownSequence(listed, num_new))
        slots = [key.slot for key in listed]
        keys[:, slots] = torch.randn(shape.num_kv_heads, len(slots), shape.key_dim, generator=random).to(dtype)
        values[:, slots] = torch.randn(shape.num_kv_heads, len(slots), shape.value_dim, generator=random).to(dtype)
        row += num_new
    query = torch.randn(row, shape.num_heads, shape.key_dim, generator=random).to(dtype)
    return Batch(query, keys, values, views, known)


def attend(batch: Batch, layer: LayerAttention) -> Tensor:
    """[T, H, E], float64: each query and head on its own, over an explicit list of keys."""
    num_heads, num_kv_heads = batch.query.shape[1], batch.keys.shape[0]
    out = torch.zeros(batch.query.shape[0], num_heads, batch.values.shape[-1], dtype=torch.float64)
    row = 0
    for sequence in batch.sequences:
        slots = [key.slot for key in sequence.keys]
        moved = batch.keys[:, slots].double()
        if layer.rotation is not None:
            for offset in {key.offset for key in sequence.keys}:
                matrix = rotation_matrix(layer.rotation, moved.shape[-1], offset)
                members = [place for place, key in enumerate(sequence.keys) if key.offset == offset]
                moved[:, members] = moved[:, members] @ matrix.T
        value = batch.values[:, slots].double()
        num_past = len(sequence.keys) - sequence.num_new
        for own in range(sequence.num_new):
            seen = [
                place
                for place, key in enumerate(sequence.keys)
                if place <= num_past + own
                and (layer.window is None or key.position > sequence.keys[num_past + own].position - layer.window)
            ]
            for head in range(num_heads):
                group = head * num_kv_heads // num_heads
                logits = layer.scale * (moved[group, seen] @ batch.query[row, head].double())
                if layer.softcap is not None:
                    logits = layer.softcap * torch.tanh(logits / layer.softcap)
                others = [] if layer.sinks is None else [float(layer.sinks[head])]
                highest = max([*logits.tolist(), *others])
                weights = torch.exp(logits - highest)
                total = float(weights.sum()) + sum(math.exp(other - highest) for other in others)
                out[row, head] = (weights / total) @ value[group, seen]
            row += 1
    return out
